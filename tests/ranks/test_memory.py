"""The predicted peak of a step beside the bytes of all tensors that were alive at once, on every rank, within 3 %."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from parallelrun.models import host_copies
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests import matrix, vision
from tests.peak_bytes import PeakBytes
from tests.plans import llama, tiny_config
from tests.pool import run_ranks
from tests.unit import user_net

BOUND = 0.03
GPT: dict[str, Any] = {
    "model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.seq": 64, "model.ffn": 256, "model.vocab": 128,
    "dataset.vocab": 128, "global_batch": 16, "micro_batch": 4, "optimizer.name": "adamw",
}  # fmt: skip
LLAMA = GPT | llama(model__ffn=192)
LATENT = LLAMA | {
    "model.kv_heads": None, "model.kv_lora_rank": 24, "model.q_lora_rank": 40, "model.qk_nope_head_dim": 16,
    "model.qk_rope_head_dim": 8, "model.v_head_dim": 20,
}  # fmt: skip
MOE = GPT | {
    "model.experts": 4, "model.expert_period": 1, "model.expert_ffn": 128, "model.router.kind": "expert_choice",
}  # fmt: skip
BERT, MLP = GPT | {"model.name": "bert"}, GPT | {"model.name": "mlp"}
RESNET: dict[str, Any] = {
    "model.name": "resnet", "dataset.name": "digits", "model.layers": 1, "model.vocab": 10, "global_batch": 16,
    "micro_batch": 16, "model.width": 16,
}  # fmt: skip

SMALL_RESNET = vision.RESNET | {"model.width": 16, "micro_batch": 8}
LOCAL = {"model.norm_samples": "local", "micro_batch": 4}
MODULE = {key: value for key, value in GPT.items() if key not in ("model.layers", "model.heads", "model.ffn")} | {
    "model.name": "module", "model.source": f"{user_net.__file__}:build", "model.blocks": ["embed", "layers.*", "head"],
    "model.arguments": {"head_dim": 16, "depth": 4},
}  # fmt: skip
ROLES = {"model.roles": {"layers.*.[qkv]": "column_parallel", "layers.*.out": "row_parallel"}}
ALL_ROLES = {"model.roles": {**ROLES["model.roles"], "layers.*.fc1": "column_parallel", "layers.*.fc2": "row_parallel"}}
GEMMA = {
    "model.qk_norm": "head", "model.norm_position": "both", "model.activation": "geglu", "model.scaled_embedding": True,
    "model.query_pre_attn_scalar": 3.0, "model.attention_softcap": 2.0, "model.logit_softcap": 3.0,
}  # fmt: skip
GPT_OSS = {
    "model.sinks": True, "model.activation": "swiglu_clamped", "model.bias": True, "model.expert_bias": True,
    "model.experts": 4, "model.expert_period": 1, "model.expert_ffn": 128, "model.window": 20,
}  # fmt: skip
LORA, BF16_BASE = {"model.lora.rank": 8}, {"model.lora.base_dtype": "bf16"}
FEW = GPT | {"global_batch": 2, "micro_batch": 1, "model.seq": 16, "recompute": "full"}
FP16, BF16 = ({"precision.name": name} for name in ("fp16", "bf16"))
MUON = {"optimizer.name": "muon", "optimizer.momentum": 0.9}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
PACKED = {"dataset.pack": True}
ONE_LAYER = {"model.layers": 1}
GRID = {"model.layers": 1, "global_batch": 8}
NARROW = {"tp": 2, "layout": "2d", "pp": 2, "global_batch": 8, "micro_batch": 2}
LARGE: dict[str, Any] = {"model.vocab": 1024, "dataset.vocab": 1024}
CHUNKS, AHEAD = {**LARGE, "loss_chunks": 7}, {"model.mtp_depth": 1}
# The peak lies inside attention, where other ranks' keys pass by.
LONG = GPT | {
    "model.layers": 1, "model.ffn": 32, "model.seq": 512, "model.vocab": 64, "dataset.vocab": 64, "global_batch": 2,
    "micro_batch": 2,
}  # fmt: skip


def data(kind: str, **more: Any) -> dict[str, Any]:
    return {"dp": 2, "strategy.data.kind": kind, **{f"strategy.data.{key}": value for key, value in more.items()}}


def context(kind: str, cp: int = 2, **more: Any) -> dict[str, Any]:
    return {"cp": cp, **{f"strategy.context.{key}": value for key, value in {"kind": kind, **more}.items()}}


def _shorter(overrides: dict[str, Any]) -> dict[str, Any]:
    """With two microbatches on each replica: one without gradients, one that adds to them."""
    if "pp" in overrides or overrides["global_batch"] < 16 or overrides["micro_batch"] != 4:
        return overrides
    return overrides | {"global_batch": 8 * overrides.get("dp", 1)}


def pipeline(schedule: str) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule}


PLANS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "gpt large vocabulary": GPT | LARGE,
    # The gradients of the tied weight by head and by embedding, and their sum.
    "gpt large vocabulary, few tokens": FEW | LARGE,
    "llama": LLAMA,
    "moe": MOE,
    "bert": BERT,
    "mlp": MLP,
    "module": MODULE,
    "module lora, tp": MODULE | LORA | ALL_ROLES | {"tp": 2, "global_batch": 4},
    # The largest gradients are those of an activation between two layers.
    "module 1f1b": MODULE | pipeline("1f1b") | {"global_batch": 8},
    "module lora": MODULE | LORA,
    "module lora 1f1b": MODULE | LORA | pipeline("1f1b"),
    "module lora bf16, base in bf16": MODULE | LORA | BF16 | BF16_BASE,
    "module lora full bf16, base in bf16, fsdp": MODULE | LORA | BF16 | BF16_BASE | FULL | data("fsdp"),
    # A small model and batch: the peak lies where backward has the gradient of a large weight in bf16 and in fp32.
    "gradient of the largest weight": MLP
    | BF16
    | {
        "model.layers": 1,
        "global_batch": 2,
        "micro_batch": 1,
        "optimizer.name": "sgd",
    },
    "resnet": RESNET,
    "ddp": GPT | data("ddp"),
    "naive ddp": GPT | data("naive_ddp"),
    "zero1": GPT | data("zero1"),
    "zero1 bf16": GPT | data("zero1") | BF16,
    "zero2": GPT | data("zero2"),
    "fsdp": GPT | data("fsdp"),
    "fsdp of one rank": GPT | data("fsdp") | ONE_LAYER | {"dp": 1},
    # Of a single microbatch: a step begins without gradients, and those in no unit stay unsharded.
    "fsdp, experts without copies": MOE | FEW | data("fsdp") | {"ep": 2, "recompute": "none"},
    "hsdp, experts of two copies": MOE | FEW | data("fsdp", shard=2) | {"dp": 4, "ep": 2, "global_batch": 4},
    "latent": LATENT,
    "packed": LLAMA | PACKED,
    "norms of heads with biases, tp sequence": GPT | {"tp": 2, "model.qk_norm": "head"} | SEQUENCE,
    "norms of heads, 2d": GPT | GRID | {"tp": 4, "layout": "2d", "model.qk_norm": "head", "model.norm": "rmsnorm"},
    "norms of all heads and of results, tp sequence selective": LLAMA
    | ONE_LAYER
    | {"tp": 2, "model.qk_norm": "all", "model.norm_position": "post"}
    | SEQUENCE
    | SELECTIVE,
    # A norm of the sums is the first to ask for what is computed again: no gathered gradient is there beside it.
    "norms of results, tp sequence full": LLAMA
    | ONE_LAYER
    | {"tp": 2, "model.qk_norm": "head", "model.norm_position": "post"}
    | SEQUENCE
    | FULL,
    "window, long": LONG | {"model.window": 200},
    "window, long, cp": LONG | {"model.window": 100} | context("ring", order="striped"),
    "soft caps, long, cp": LONG | {"model.attention_softcap": 2.0} | context("ring"),
    "parts of gemma, tp sequence": LLAMA | ONE_LAYER | {"tp": 2} | SEQUENCE | GEMMA,
    "parts of gpt-oss, tp": LLAMA | ONE_LAYER | {"tp": 2} | GPT_OSS,
    "wide heads tp": LLAMA | ONE_LAYER | {"tp": 2, "model.head_dim": 48},
    "latent tp sequence selective, queries of x": LATENT
    | ONE_LAYER
    | {"tp": 2, "model.q_lora_rank": None}
    | SEQUENCE
    | SELECTIVE,
    "fsdp, reduced once": LLAMA | data("fsdp", reduce_each_microbatch=False),
    "local sgd": GPT | data("local_sgd"),
    "fsdp x 1f1b bf16, highest when a block is reduced": FEW
    | data("fsdp")
    | pipeline("1f1b")
    | BF16
    | {"global_batch": 8},
    "local sgd, highest when replicas meet": FEW | data("local_sgd", sync_every=2),
    "diloco, highest when replicas meet, two buckets": FEW | data("diloco", sync_every=2, bucket_mb=0.1),
    "moe ep": MOE | data("ddp") | {"ep": 2},
    "tp": GPT | {"tp": 2},
    "fsdp bf16, rounded at random, few tokens": FEW | data("fsdp") | BF16 | {"optimizer.rounding": "stochastic"},
    "tp sequence fp8": GPT | {"tp": 2, "precision.name": "fp8"} | SEQUENCE,
    "1f1b": GPT | pipeline("1f1b"),
    "interleaved": GPT | pipeline("interleaved") | {"model.layers": 4},
    "interleaved, an embedding and a head alone": GPT | pipeline("interleaved") | {"model.layers": 2},
    "cp, long": LONG | context("ring"),
    "cp, long, ulysses": LONG | context("ulysses"),
    "zero bubble bf16": GPT | pipeline("zero_bubble") | BF16,
    # The gradients of experts' weights come when those of attention have freed what they read.
    "moe zero bubble selective bf16": MOE
    | pipeline("zero_bubble")
    | SELECTIVE
    | BF16
    | {"model.layers": 2, "model.seq": 32, "micro_batch": 2, "global_batch": 8},
    "2d, rotary positions and biases": GPT
    | GRID
    | {"tp": 2, "layout": "2d", "strategy.tensor.grid": "1x2", "model.position": "rope"},
    "2d llama, norms of heads, gathered again": LLAMA
    | GRID
    | {"tp": 4, "layout": "2d", "model.kv_heads": 4, "strategy.tensor.save_gathered": False, "model.qk_norm": "head"},
    "2d of one row, large vocabulary": GPT
    | GRID
    | {"tp": 2, "layout": "2d", "strategy.tensor.grid": "1x2", "model.vocab": 1024, "dataset.vocab": 1024},
    # The gradient of a table that is gathered is the largest tensor.
    "2d of one column bf16, few tokens": FEW
    | BF16
    | {"tp": 2, "layout": "2d", "strategy.tensor.grid": "2x1", "micro_batch": 2, "recompute": "none"},
    # Norms of split features and products that gather their input do not save it.
    "2d of one row x 1f1b": GPT | NARROW | {"strategy.tensor.grid": "1x2", "schedule": "1f1b"},
    # A pass for the gradients of inputs alone frees nothing, and moves what its products read and give.
    "2d of one row x zero bubble": GPT | NARROW | {"strategy.tensor.grid": "1x2", "schedule": "zero_bubble"},
    "2d of one column x zero bubble selective": GPT
    | NARROW
    | {"strategy.tensor.grid": "2x1", "schedule": "zero_bubble"}
    | SELECTIVE,
    "moe, 2d of one row x 1f1b selective bf16": MOE
    | NARROW
    | {"strategy.tensor.grid": "1x2", "schedule": "1f1b"}
    | SELECTIVE
    | BF16,
    # The end of a block's second forward needs most: partial sums are scattered beside the gradient that was gathered.
    "2d of one row full": GPT | GRID | {"tp": 4, "layout": "2d", "strategy.tensor.grid": "1x4"} | FULL,
    # Weights that the second forward has rounded stay until their products' backward.
    "llama full bf16, few tokens": LLAMA | FULL | BF16 | {"model.seq": 16, "micro_batch": 1},
    "moe 2d of one row full": MOE | GRID | {"tp": 4, "layout": "2d", "strategy.tensor.grid": "1x4"} | FULL,
    "moe 2d, ep over tp, full": MOE | GRID | {"tp": 4, "layout": "2d", "ep": 4, "strategy.expert.tp": 1} | FULL,
    "3d": GPT | GRID | {"tp": 8, "layout": "3d"},
    "2.5d": GPT | GRID | {"tp": 8, "layout": "2.5d"},
    "ring, several buckets": GPT | data("ring", bucket_mb=0.05),
    "loss in chunks bf16": LLAMA | CHUNKS | BF16,
    "loss in chunks, tp sequence": GPT | CHUNKS | {"tp": 2} | SEQUENCE,
    "loss in chunks, fsdp bf16": GPT | CHUNKS | data("fsdp") | BF16,
    "loss in chunks, zero bubble bf16": GPT | CHUNKS | pipeline("zero_bubble") | BF16,
    "loss in chunks, 1f1b": GPT | CHUNKS | pipeline("1f1b") | {"model.layers": 1},
    "loss in chunks, soft cap, tp bf16": LLAMA | CHUNKS | {"tp": 2, "model.logit_softcap": 3.0} | BF16,
    "soft cap, large vocabulary, tp": LLAMA | LARGE | {"tp": 2, "model.logit_softcap": 3.0},
    "z-loss bf16": LLAMA | LARGE | {"model.z_loss": 1e-3} | BF16,
    "tokens ahead, large vocabulary": LLAMA | LARGE | AHEAD,
    "two tokens ahead, tp, large vocabulary": LLAMA | LARGE | {"tp": 2, "model.mtp_depth": 2},
    "tokens ahead, fsdp": LLAMA | AHEAD | data("fsdp"),
    "tokens ahead, loss in chunks, tied bf16": GPT | AHEAD | CHUNKS | BF16,
    "tokens ahead, 1f1b": LLAMA | AHEAD | pipeline("1f1b"),
    "tokens ahead, 1f1b, offload": LLAMA | AHEAD | pipeline("1f1b") | {"recompute": "offload"},
    "tokens ahead, moe full": MOE | AHEAD | FULL,
    "moe, gated shared experts, tp sequence": MOE
    | {"tp": 2, "model.shared_experts": 2, "model.shared_gate": True}
    | SEQUENCE,
    "offload bf16": LLAMA | BF16 | MUON | {"recompute": "offload", "optimizer.offload": True},
    "offload, zbv": GPT | pipeline("zbv") | {"model.layers": 6, "recompute": "offload"},
    "zbv": GPT | pipeline("zbv") | {"model.layers": 4},
    # A forward pass has saved a part of its activations when the backward pass beside it needs most.
    "moe, two passes in turns": MOE
    | data("ddp")
    | pipeline("dualpipev")
    | {"dp": 4, "ep": 2, "model.layers": 4, "micro_batch": 1},
    "dropout": GPT | {"dropout": 0.1},
    "zero2 fp16 full": GPT | ONE_LAYER | data("zero2") | FP16 | FULL,
    "powersgd, experts": MOE | ONE_LAYER | data("ddp", compression="powersgd") | {"dp": 4, "ep": 2},
    "adasum, highest when updates are combined": FEW | data("horovod", reduction="adasum"),
    "moe ep dropless": MOE | ONE_LAYER | data("ddp") | {"ep": 2, "strategy.expert.kind": "dropless"},
    "moe tp sequence": MOE | {"tp": 2} | SEQUENCE,
    "moe, ep over tp": MOE | {"tp": 2, "ep": 2, "strategy.expert.tp": 1},
    "moe, ep over tp, full": MOE | ONE_LAYER | {"tp": 2, "ep": 2, "strategy.expert.tp": 1} | FULL,
    "moe, ep over dp x tp, sequence": MOE
    | ONE_LAYER
    | data("zero1")
    | {"tp": 2, "ep": 4, "strategy.expert.tp": 1}
    | SEQUENCE,
    "tp sequence selective bf16": GPT | {"tp": 2} | SEQUENCE | SELECTIVE | BF16,
    # Experts' gradients of activations, and shared experts that forward computes before the others.
    "moe fsdp, shared experts": MOE
    | data("fsdp")
    | {"model.layers": 2, "model.router.kind": "top_k", "model.shared_experts": 1, "model.expert_ffn": 256},
    # Highest in the update: the parts of a rank, the matrices that it owns, and what Newton-Schulz holds.
    "muon, tp": GPT
    | MUON
    | {"tp": 2, "model.hidden": 128, "model.ffn": 512, "model.seq": 8, "global_batch": 2, "micro_batch": 1},
    "fsdp, highest when the root is reduced": FEW | data("fsdp") | LARGE,
    "resnet, sets over replicas": SMALL_RESNET | data("ddp"),
    "resnet fp16, sets of a microbatch, x 1f1b": SMALL_RESNET | LOCAL | pipeline("1f1b") | FP16,
    # The first block saves the batch. The peak lies in a second forward, where sets are put together.
    "resnet offload bf16, several sets": SMALL_RESNET
    | {"recompute": "offload"}
    | BF16
    | {"micro_batch": 16, "model.norm_samples": 4},
    "bottleneck full bf16, tp": vision.BOTTLENECK | FULL | BF16 | {"micro_batch": 16, "tp": 2},
    # The gradients of a block's two branches and their sum are larger than what the first convolution has split.
    "resnet, sets of a microbatch, tp": SMALL_RESNET | {"model.norm_samples": "local", "tp": 2},
    "vgg, tp x 1f1b": vision.VGG | pipeline("1f1b") | {"model.width": 16, "model.ffn": 64, "micro_batch": 8, "tp": 2},
    "fsdp x zero bubble, reduced in each pass": GPT
    | data("fsdp", reduce_each_microbatch=True)
    | pipeline("zero_bubble"),
    "fsdp x zero bubble, few tokens, packed": FEW
    | data("fsdp")
    | pipeline("zero_bubble")
    | PACKED
    | {"global_batch": 8},
    "zero1 x tp sequence x 1f1b bf16": GPT
    | data("zero1")
    | {"tp": 2, "global_batch": 16}
    | SEQUENCE
    | pipeline("1f1b")
    | BF16,
}


# Ranks of the last row and column of the grid need not receive the last panel: they hold less than is predicted.
SUMMA_FORM = {"layout": "2d", "strategy.tensor.form": "summa"}
SUMMA = GPT | GRID | SUMMA_FORM | {"tp": 4}
# Where an axis has one rank, panels are copied; more than two are never there at once.
NARROW_SUMMA = [
    SUMMA | {"strategy.tensor.grid": "1x4"},
    LLAMA | GRID | SUMMA_FORM | {"strategy.tensor.grid": "2x1", "tp": 2},
]
# Rank 0 gets 1.24 times as many rows as its share: `stack.expert_imbalance` is 1.25.
UNEVEN = MOE | ONE_LAYER | data("ddp") | {"ep": 2, "model.expert_ffn": 256, "model.router.kind": "top_k"}
# Everything in these stands in other plans too. `.ci/run` measures them in its stage `slow`.
SELDOM = {
    "naive ddp", "mlp", "window, long", "wide heads tp", "interleaved, an embedding and a head alone", "dropout",
    "cp, long, ulysses", "2d, rotary positions and biases", "ring, several buckets", "moe, ep over tp, full",
    "vgg, tp x 1f1b", "bottleneck full bf16, tp", "resnet, sets over replicas", "parts of gemma, tp sequence",
    "moe ep dropless", "zero1 x tp sequence x 1f1b bf16", "latent tp sequence selective, queries of x",
    "module", "module lora", "module lora 1f1b", "module lora bf16, base in bf16", "norms of heads, 2d", "zero1 bf16",
    "tp", "cp, long", "interleaved", "zero bubble bf16", "gpt large vocabulary", "local sgd",
    "fsdp, highest when the root is reduced", "norms of heads with biases, tp sequence", "moe, ep over tp",
    "moe tp sequence", "tp sequence selective bf16", "fsdp x zero bubble, few tokens, packed",
    "loss in chunks bf16", "loss in chunks, 1f1b",
    "fsdp x zero bubble, reduced in each pass", "moe, two passes in turns",
    "loss in chunks, fsdp bf16", "zbv",
    "soft caps, long, cp", "latent", "norms of results, tp sequence full", "window, long, cp", "fsdp, reduced once",
    "norms of all heads and of results, tp sequence selective", "2.5d", "loss in chunks, zero bubble bf16",
    "diloco, highest when replicas meet, two buckets", "2d llama, norms of heads, gathered again", "offload, zbv",
    "2d of one row full", "powersgd, experts", "moe, ep over dp x tp, sequence", "bert", "ddp", "packed",
    "resnet offload bf16, several sets", "resnet, sets of a microbatch, tp", "moe 2d, ep over tp, full",
    "2d of one column bf16, few tokens", "2d of one row x 1f1b", "2d of one column x zero bubble selective",
    "moe 2d of one row full",
    "moe, 2d of one row x 1f1b selective bf16",
    "soft cap, large vocabulary, tp", "loss in chunks, soft cap, tp bf16", "z-loss bf16",
    "tokens ahead, large vocabulary", "two tokens ahead, tp, large vocabulary", "tokens ahead, 1f1b",
    "tokens ahead, 1f1b, offload", "fsdp, experts without copies", "hsdp, experts of two copies",
    "tokens ahead, fsdp", "tokens ahead, loss in chunks, tied bf16", "tokens ahead, moe full",
    "moe, gated shared experts, tp sequence",
}  # fmt: skip
# Of four microbatches without a pipeline, the last two only repeat the second.
PLANS = {name: _shorter(overrides) for name, overrides in PLANS.items()}
OFTEN = PLANS.keys() if matrix.FULL else PLANS.keys() - SELDOM


def peaks(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Body of a rank: of each case, (the peak of a step in bytes, as predicted).

    No garbage is collected in a step: recomputation leaves cycles, and when they are found is chance.
    """
    gc.collect()
    gc.disable()
    try:
        return [_peak(case) for case in cases]
    finally:
        gc.enable()


def _peak(overrides: dict[str, Any]) -> tuple[int, int]:
    """What is there already, as what autograd's hooks keep of earlier cases, is frozen: no tensor of this case, and not
    looked at when garbage is collected, which would take as long as two steps. A buffer that earlier cases have left
    with the group would not be seen. Of one step no batch is read ahead, which would lie in the host's memory.
    """
    gc.freeze()
    config = tiny_config({"steps": 1} | overrides)
    plan = resolve(config)
    training = build(config, plan, torch.device("cpu"))
    scaler = LossScaler(config.precision, plan.precision.scaled)
    train_step(training, 1, 0.01, scaler)  # creates the optimizer's state
    gc.collect()
    with PeakBytes() as live, _host_memory_apart(live):
        for tensor in _of_update(training.optimizer) if plan.offloads_optimizer else ():
            live.leave_out(tensor)
        live.see_all()
        train_step(training, 2, 0.01, scaler)
    predicted = prediction.memory(plan, training.mesh.rank)
    assert live.most_apart == predicted.host, (overrides, live.most_apart, predicted.host)
    del training
    gc.collect()
    return live.peak, predicted.total


def _of_update(optimizer: Optimizer) -> Iterator[Tensor]:
    """The weights, gradients and state on the host."""
    for name, tensor in optimizer._tensors.items():
        yield from (tensor, tensor.grad, *optimizer.state(name).values())


@contextmanager
def _host_memory_apart(live: PeakBytes) -> Iterator[None]:
    """Count what is offloaded as a GPU would: not what lies on the host, which is the device, too."""
    right = host_copies.host_copy

    def apart(*arguments: Any) -> Tensor:
        with _disable_current_modes():
            copy = right(*arguments)
        live.leave_out(copy)
        return copy

    with mock.patch.object(host_copies, "host_copy", apart):
        yield


AXES = ("dp", "cp", "tp", "pp")
WORLDS = {name: prod(overrides.get(axis, 1) for axis in AXES) for name, overrides in PLANS.items()}


@pytest.mark.parametrize("world, cases", [(4, [SUMMA, *NARROW_SUMMA[: matrix.FULL]]), (2, [UNEVEN, NARROW_SUMMA[1]])])
def test_the_predicted_peak_is_that_of_the_rank_that_holds_most(world, cases):
    for found in zip(*run_ranks(world, peaks, cases, timeout=240, backend="gloo"), strict=True):
        predicted, most = max(one for _, one in found), max(one for one, _ in found)
        assert predicted == pytest.approx(most, rel=BOUND), found


def peak_errors(world: int, backend: str, only: Collection[str]) -> dict[str, float]:
    names = [name for name, size in WORLDS.items() if size == world and name in only]
    found = run_ranks(world, peaks, [PLANS[name] for name in names], timeout=240, backend=backend)
    return {
        f"{name}, rank {rank}": predicted / measured - 1
        for rank, pairs in enumerate(found)
        for name, (measured, predicted) in zip(names, pairs, strict=True)
    }


@pytest.mark.parametrize(
    "plans", [pytest.param(OFTEN, id="often"), pytest.param(SELDOM, id="seldom", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("world", sorted(set(WORLDS.values())))
def test_the_predicted_peak_is_within_three_percent_of_what_was_alive(world, plans):
    errors = peak_errors(world, "gloo", plans)
    assert not {where: f"{error:+.1%}" for where, error in errors.items() if abs(error) > BOUND}


def test_in_shared_memory_no_more_is_alive_than_predicted():
    """A reduce-scatter reads from the other ranks' memory what it receives in a buffer over gloo."""
    errors = peak_errors(2, "shm", ("zero1", "zero2", "fsdp", "moe ep", "tp sequence fp8"))
    assert not {where: f"{error:+.1%}" for where, error in errors.items() if error < -BOUND}
    assert max(errors.values()) > BOUND
