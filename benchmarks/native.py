"""parallelrun against torch's own strategies: the same model, weights, tokens and optimizer, full step, paired.

    python -m benchmarks.native                          # every case and size, 40 pairs each, results committed
    python -m benchmarks.native --case tp --size mixed --pairs 30

Peers: a plain training loop on one rank, DistributedDataParallel, FSDP2 `fully_shard`, DTensor `parallelize_module`
with loss_parallel, and raw `torch.distributed.pipelining` (1F1B). Rows where the peer wins are printed like any other.

A full step on both sides: the same samples read by the same reader, forward, backward, gradients summed over ranks,
the global norm clipped, torch's fused AdamW, one thread a rank. Each side has its default on CPUs: ours shared memory
and products by oneDNN where `distributed.torch_private.products` has them, peers gloo and torch's products. Only ours
also has on every rank, in every step, the mean loss of the global batch, the agreement on a stop request and the check
that loss and norm are finite, by one small all-reduce more (none more under pp)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pairs import WithTorchsProducts, compare, on_ranks, peers_on_gloo, read_arguments, time_pairs
from benchmarks.plain_gpt import SIZES, PlainGpt, Sizes, loss_of
from parallelrun.models.initialise import logical
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

LR, CLIP, WEIGHT_DECAY = 1e-3, 1.0, 0.1
CASES: dict[str, dict[str, Any]] = {
    "single": {"overrides": {}, "bar": 1.00},
    "ddp": {"overrides": {"dp": 2, "strategy.data.kind": "ddp"}, "bar": 0.85},
    "horovod": {"overrides": {"dp": 2, "strategy.data.kind": "horovod"}, "bar": 0.85},
    "fsdp": {"overrides": {"dp": 2, "strategy.data.kind": "fsdp"}, "bar": 0.85},
    "tp": {"overrides": {"tp": 2}, "bar": 0.55},
    "pp": {"overrides": {"pp": 2, "strategy.pipeline.kind": "1f1b"}, "bar": 0.92},
}


class Peer:
    """torch's own way of one case: `step()` is a full step, as its documentation writes it. overrides: of the model."""

    overrides: Any = staticmethod(lambda sizes: sizes.overrides)

    def __init__(self, case: str, sizes: Sizes, training: Training):
        self.case, self.sizes, self.training = case, sizes, training
        self.number = 0
        self.loss = torch.zeros(())
        model = self.make(training)
        with peers_on_gloo() as self.group:
            self.mesh = DeviceMesh.from_group(self.group, "cpu")
        self.model, self.run, self.norm = getattr(self, f"_{case}")(model)
        self.optimizer = torch.optim.AdamW(_groups(self.model), lr=LR, betas=(0.9, 0.95), fused=True)

    def make(self, training: Training) -> Any:
        """The module, with the weights of ours."""
        model = PlainGpt(self.sizes)
        specs = training.plan.spec.parameters
        model.load_state_dict({name: logical(spec, training.config.seed) for name, spec in specs.items()})
        return model

    def step(self) -> None:
        self.number += 1
        batch = self.training.reader.batch(self.number)
        self.optimizer.zero_grad()
        self.loss = self.run(batch.inputs, batch.targets)
        self.norm()
        self.optimizer.step()

    def _whole(self, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def run(inputs: Tensor, targets: Tensor) -> Tensor:
            with loss_parallel() if self.case == "tp" else nullcontext():
                loss = loss_of(model(inputs), targets)
                loss.backward()
            return loss.detach()

        return run

    def _clip(self, model: nn.Module) -> Callable[[], None]:
        def clip() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)

        return clip

    def _single(self, model: nn.Module) -> tuple[nn.Module, Callable, Callable]:
        return model, self._whole(model), self._clip(model)

    def _ddp(self, model: nn.Module) -> tuple[nn.Module, Callable, Callable]:
        wrapped = DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)
        return wrapped, self._whole(wrapped), self._clip(wrapped)

    _horovod = _ddp  # what there is on torch; Horovod itself is not built for it any more

    def _fsdp(self, model: PlainGpt) -> tuple[nn.Module, Callable, Callable]:
        for layer in model.layers.values():
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model, self._whole(model), self._clip(model)

    def _tp(self, model: PlainGpt) -> tuple[nn.Module, Callable, Callable]:
        plan: dict[str, Any] = {
            "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
            "head.head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for index in range(self.sizes.layers):
            name = f"layers.{index}"
            plan |= {f"{name}.attention.qkv.{part}": ColwiseParallel() for part in "qkv"}
            plan |= {f"{name}.attention.out": RowwiseParallel(), f"{name}.mlp.down": RowwiseParallel()}
            plan[f"{name}.mlp.up.up"] = ColwiseParallel()
        parallelize_module(model, self.mesh, plan)
        return model, self._whole(model), self._clip_mixed(model)

    def _clip_mixed(self, model: nn.Module) -> Callable[[], None]:
        split = [p for p in model.parameters() if isinstance(p, DTensor)]
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]

        def clip() -> None:
            # clip_grad_norm_ refuses to mix DTensors with the plain norms that this plan leaves whole
            norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in (split, whole)]
            assert isinstance(norms[0], DTensor)
            total = torch.linalg.vector_norm(torch.stack([norms[0].full_tensor(), norms[1]]))
            for group in (split, whole):
                nn.utils.clip_grads_with_norm_(group, CLIP, total)

        return clip

    def _pp(self, model: PlainGpt) -> tuple[nn.Module, Callable, Callable]:
        rank, half = dist.get_rank(), self.sizes.layers // 2
        for index in range(self.sizes.layers):
            if (index < half) != (rank == 0):
                del model.layers[str(index)]
        if rank == 0:
            model.head = None
        else:
            model.embedding = None
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=self.mesh.get_group())
        schedule = Schedule1F1B(stage, self.sizes.microbatches, loss_fn=loss_of)

        def run(inputs: Tensor, targets: Tensor) -> Tensor:
            if rank == 0:
                schedule.step(inputs)
                return torch.zeros(())
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
            return torch.stack(losses).mean().detach()

        def clip() -> None:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            squared = norm**2
            dist.all_reduce(squared, group=self.group)
            nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, squared.sqrt())

        return model, run, clip


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups by weight decay, and apart for DTensors: the fused update takes no mixture."""
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    return [{"params": held, "weight_decay": WEIGHT_DECAY * decays} for (decays, _), held in kinds.items()]


def make_sides(case: str, sizes: Sizes, peer: type[Peer] = Peer) -> tuple[Training, Peer]:
    """Return both sides of a case on this rank: the same weights and samples."""
    optimizer = {"optimizer.lr": LR, "optimizer.schedule": "constant", "optimizer.clip": CLIP}
    pipelined = {"microbatches": sizes.microbatches} if case == "pp" else {"microbatches": 1}
    config = tiny_config({**optimizer, **peer.overrides(sizes), **pipelined, **CASES[case]["overrides"]})
    training = build(config, resolve(config), torch.device("cpu"))
    return training, peer(case, sizes, training)


def run(case: str, size: str, pairs: int, warmup: int, kind: type[Peer] = Peer) -> dict[str, Any]:
    """One rank: build both sides, alternate, check that both have learnt the same."""
    training, peer = make_sides(case, SIZES[size], kind)
    scaler = LossScaler(training.config.precision, scaled=False)
    state: dict[str, Any] = {"step": 0, "loss": 0.0}

    def ours() -> None:
        state["step"] += 1
        state["loss"] = train_step(training, state["step"], LR, scaler).loss

    losses: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(3):  # the same steps on both sides, before any timing: equal losses prove equal work
        ours()
        peer.step()
        losses["ours"].append(state["loss"])
        losses["theirs"].append(_mean_loss(case, peer.loss))
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["theirs"]))
    assert worst < 1e-4, f"{case} {size}: the two sides do not train alike: {losses}"
    times = time_pairs(ours, WithTorchsProducts(peer.step), pairs, warmup)
    return {"case": case, "size": size, "first_losses": losses, "times": times}


def _mean_loss(case: str, loss: Tensor) -> float:
    """The peer's loss over the whole batch: mean over replicas, or the last stage's."""
    value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss.clone()
    if case in ("ddp", "horovod", "fsdp"):
        dist.all_reduce(value)
        value /= 2
    if case == "pp":
        dist.broadcast(value, src=1)
    return float(value)


def main() -> None:
    arguments = read_arguments(__doc__, "native", CASES, SIZES)
    cells = [(case, size) for case in arguments.case.split(",") for size in arguments.size.split(",")]
    sides = (on_ranks(1 if cell[0] == "single" else 2, run, *cell, arguments.pairs, arguments.warmup) for cell in cells)
    compare(arguments.name, zip(sides, (CASES[case]["bar"] for case, _ in cells)))


if __name__ == "__main__":
    main()
