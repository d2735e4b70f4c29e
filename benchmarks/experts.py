"""Layers with experts: what they cost beyond the experts' products, dropless beside capacity dispatch, and beside
megatron-core's layer; paired.

    python -m benchmarks.experts                                 # every case but megatron, 30 pairs each
    pip install --no-deps --target /tmp/megatron megatron-core==0.16.1
    PYTHONPATH=/tmp/megatron python -m benchmarks.experts --case megatron

Hidden 512, experts of 512 -> 2048 -> 512, 8 of them, top-2, 4,096 tokens in all, fp32, one thread a rank.

products: one layer, forward and backward on one device, beside the products (with activation) of its experts alone.
dropless: a full step at ep=2 with dropless routing, beside one with capacity dispatch and factor 1.25.
megatron: one layer's forward and backward at ep=2, the same weights and tokens; outputs must agree first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.pairs import WithTorchsProducts, compare, on_ranks, read_arguments, summarise, time_pairs
from parallelrun.models import dropout
from parallelrun.models.moe.layer import MoE
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

HIDDEN, FFN, EXPERTS, TOKENS, SEQ = 512, 2048, 8, 4096, 256
BARS = {"products": 1.15, "dropless": 1.00, "megatron": 0.85}
MODEL: dict[str, Any] = {
    "model.layers": 1,
    "model.hidden": HIDDEN,
    "model.heads": 8,
    "model.seq": SEQ,
    "model.ffn": FFN,
    "model.vocab": 256,
    "model.experts": EXPERTS,
    "model.expert_period": 1,
    "model.router.top_k": 2,
    "dataset.vocab": 256,
    "dataset.samples": 64,
    "global_batch": TOKENS // SEQ,
    "optimizer.lr": 1e-4,
    "optimizer.schedule": "constant",
}


def _training(**overrides: Any) -> Training:
    config = tiny_config({**MODEL, **{key.replace("__", "."): value for key, value in overrides.items()}})
    return build(config, resolve(config), torch.device("cpu"))


def _layer(training: Training) -> MoE:
    (layer,) = [module for module in training.model_parts[0].modules() if isinstance(module, MoE)]
    return layer


def _one_layer(layer: MoE, x: Tensor, ids: Tensor) -> Tensor:
    """Forward and backward; the gradients stay."""
    layer.zero_grad()
    with dropout.scope(ids):
        y = layer(x)
    y.backward(y.detach())
    return y.detach()


def _products(layer: MoE, rows: Tensor, counts: list[int], activated: bool) -> None:
    """What no layer can do without: the products of every expert with its rows, forward and backward."""
    layer.zero_grad()
    given = []
    for part, up, down in zip(rows.split(counts), layer.experts.up.unbind(), layer.experts.down.unbind()):
        inside = functional.linear(part, up)
        given.append(functional.linear(layer.experts.activation(inside) if activated else inside, down))
    torch.autograd.backward(given, [part.detach() for part in given])


def products(pairs: int, warmup: int) -> dict[str, Any]:
    """One device: the layer beside its experts' products, with their activation and without."""
    torch.set_num_threads(1)
    training = _training()
    layer = _layer(training)
    samples = TOKENS // SEQ
    x = torch.randn(samples, SEQ, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids = torch.arange(samples)
    with torch.no_grad(), dropout.scope(ids):
        routing = layer.router(x)
    counts = torch.bincount(routing.experts, minlength=EXPERTS).tolist()
    rows = x.detach().flatten(0, 1)[routing.tokens[routing.experts.argsort(stable=True)]].requires_grad_()
    times = time_pairs(
        lambda: _one_layer(layer, x, ids),
        lambda: _products(layer, rows, counts, activated=True),
        pairs,
        warmup,
        bare=lambda: _products(layer, rows, counts, activated=False),
    )
    return {"times": times, "rows_of_experts": counts}


def _step(training: Training) -> Any:
    state: dict[str, Any] = {"step": 0, "loss": 0.0}

    def run() -> None:
        state["step"] += 1
        state["loss"] = train_step(training, state["step"], 1e-4, LossScaler(training.config.precision, False)).loss

    return run, state


def dispatches(pairs: int, warmup: int) -> dict[str, Any]:
    """Two ranks, ep=2: full steps of the dropless dispatch (ours) and of the capacity dispatch (theirs)."""
    limited = {"model__router__capacity_factor": 1.25}
    ours = _training(dp=2, ep=2, strategy__expert__kind="dropless")
    theirs = _training(dp=2, ep=2, strategy__expert__kind="capacity", **limited)
    (run, mine), (run_theirs, other) = _step(ours), _step(theirs)
    run()
    run_theirs()
    losses = [mine["loss"], other["loss"]]
    return {"times": time_pairs(run, run_theirs, pairs, warmup), "first_losses": losses}


def megatron(pairs: int, warmup: int) -> dict[str, Any]:
    """Two ranks, ep=2: our dropless layer and megatron-core's, with its all-to-all dispatcher and no capacity."""
    from benchmarks.megatron import OnCpu, build_layer

    training = _training(dp=2, ep=2, model__router__aux_coefficient=0.0)
    layer = _layer(training)
    theirs = build_layer(HIDDEN, FFN, EXPERTS, layer)
    samples = TOKENS // SEQ // 2
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(samples, SEQ, HIDDEN, generator=generator, requires_grad=True)
    turned = x.detach().transpose(0, 1).contiguous().requires_grad_()  # megatron-core's order: seq, batch, hidden
    ids = torch.arange(samples)

    def their_step() -> Tensor:
        theirs.zero_grad()
        with OnCpu():
            y, _ = theirs(turned)
            y.backward(y.detach())
        return y.detach()

    worst = float((_one_layer(layer, x, ids) - their_step().transpose(0, 1)).abs().max())
    assert worst < 1e-4, f"the two layers differ by {worst}"
    times = time_pairs(lambda: _one_layer(layer, x, ids), WithTorchsProducts(their_step), pairs, warmup)
    return {"times": times, "differ_by": worst}


def _measure(case: str, pairs: int, warmup: int) -> dict[str, Any]:
    if case == "products":
        return products(pairs, warmup)
    if case == "megatron":
        return on_ranks(2, megatron, pairs, warmup)
    return on_ranks(2, dispatches, pairs, warmup)


def main() -> None:
    arguments = read_arguments(__doc__, "experts", ("products", "dropless"))
    results = (
        ({"case": case, **_measure(case, arguments.pairs, arguments.warmup)}, BARS[case])
        for case in arguments.case.split(",")
    )
    compare(arguments.name, results, _to_bare_products)


def _to_bare_products(row: dict[str, Any]) -> str:
    if "bare" not in row["times"]:
        return ""
    row["ratio_to_bare_products"] = summarise({**row["times"], "theirs": row["times"]["bare"]}, None)["ratio"]
    return f"to the products without activation: {row['ratio_to_bare_products']:.2f}"


if __name__ == "__main__":
    main()
