"""A step of ring attention at cp=2 beside torch's own ring attention, and beside dp=2 of the same tokens, paired.

    python -m benchmarks.context                                # both cases, sequences of 4,096 to 16,384
    python -m benchmarks.context --case torch --size 4096 --pairs 30

torch: the functions behind `torch.distributed.tensor.experimental.context_parallel`, load-balanced, with the kernel for
CPUs: that function itself dispatches CUDA kernels only. Both sides are the same training with the same tokens; only the
attention over ranks differs, and what carries it: shared memory, or gloo. dp: samples instead of sequences are divided.
One thread a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from benchmarks.pairs import compare, on_ranks, peers_on_gloo, read_arguments, time_pairs
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

BARS = {"torch": 1.0, "dp": 1.1}
SIZES = ("4096", "8192", "16384")
MODEL = {
    "model.layers": 2,
    "model.hidden": 128,
    "model.heads": 4,
    "model.vocab": 512,
    "dataset.vocab": 512,
    "dataset.samples": 64,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "constant",
}


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = peer._templated_ring_attention(group, 2, op, query, key, value, is_causal=True, dropout_p=0.0)[:2]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = peer._templated_ring_attention_backward(
            ctx.group, 2, op, grads[0], "grad_out", query, key, value, out, lse, is_causal=True, dropout_p=0.0
        )
        return (*found[:3], None)


@dataclass(frozen=True)
class _Peer:
    """Takes the place of `AttentionOverRanks`."""

    group: dist.ProcessGroup

    def __call__(self, layer: AttentionProduct, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = _TorchRing.apply(query, key, value, self.group)
        return out


def _stepper(degree: str, seq: int, samples: int) -> tuple[Training, Callable[[], float]]:
    config = tiny_config({**MODEL, degree: 2, "model.seq": seq, "global_batch": samples})
    training = build(config, resolve(config), torch.device("cpu"))
    scaler, state = LossScaler(config.precision, scaled=False), {"step": 0}

    def step() -> float:
        state["step"] += 1
        return train_step(training, state["step"], 1e-3, scaler).loss

    return training, step


def _step(case: str, seq: int, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: both sides from the same weights, on the same samples."""
    samples = 2 if case == "dp" else 1
    training, ours = _stepper("cp", seq, samples)
    beside, theirs = _stepper("cp" if case == "torch" else "dp", seq, samples)
    if case == "torch":
        with peers_on_gloo() as group:
            for module in beside.model_parts[0].modules():
                if isinstance(module, AttentionProduct):
                    module.over_ranks = _Peer(group)
    losses = {"ours": [ours() for _ in range(3)], "theirs": [theirs() for _ in range(3)]}
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["theirs"]))
    assert worst < 1e-4, f"the two sides do not train alike: {losses}"
    parameters = training.plan.spec.num_parameters
    return {"parameters": parameters, "first_losses": losses, "times": time_pairs(ours, theirs, pairs, warmup)}


def main() -> None:
    arguments = read_arguments(__doc__, "context", BARS, SIZES)
    cells = [(case, int(size)) for case in arguments.case.split(",") for size in arguments.size.split(",")]
    results = (
        ({"case": case, "size": seq, **on_ranks(2, _step, case, seq, arguments.pairs, arguments.warmup)}, BARS[case])
        for case, seq in cells
    )
    compare(arguments.name, results)


if __name__ == "__main__":
    main()
