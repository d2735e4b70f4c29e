"""Compositions drawn by a seed: a model, a strategy for every axis, and settings of the run, legal together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.plan import Plan
from tests.plans import tiny_plan
from tests.vision import ALEXNET, BOTTLENECK, RESNET, VGG

Overrides = dict[str, Any]
MOST_RANKS, OFTEN = 8, 4  # ranks of one composition in six, and of the others
NET = Path(__file__).parents[1] / "tests" / "unit" / "user_net.py"


def _data(kind: str, **more: Any) -> Overrides:
    return {"strategy.data.kind": kind, **{f"strategy.data.{key}": value for key, value in more.items()}}


def _layout(tp: int, layout: str, **more: Any) -> Overrides:
    return {"tp": tp, "layout": layout, **{f"strategy.tensor.{key}": value for key, value in more.items()}}


def _experts(kind: str, **more: Any) -> Overrides:
    router = {f"model.router.{key}": value for key, value in {"kind": kind, **more}.items()}
    return {"model.experts": 4, "model.expert_ffn": 96, **router}


LLAMA: Overrides = {
    "model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.bias": False,
    "model.tied_embeddings": False,
}  # fmt: skip
LATENT = LLAMA | {
    "model.kv_lora_rank": 24, "model.q_lora_rank": 40, "model.qk_nope_head_dim": 16, "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 20,
}  # fmt: skip
DEEPSEEK = LATENT | {
    "model.experts": 8, "model.expert_ffn": 32, "model.expert_period": 1, "model.dense_layers": 1,
    "model.shared_experts": 1, "model.router.top_k": 3, "model.router.score": "sigmoid", "model.router.scaling": 2.5,
    "model.router.bias_rate": 0.01, "model.router.n_group": 4, "model.router.topk_group": 2, "model.own_router": True,
}  # fmt: skip
BERT: Overrides = {"model.name": "bert", "model.preset": "bert"}
DENSE: dict[str, Overrides] = {
    "gpt": {},
    "gpt, untied, no biases": {"model.tied_embeddings": False, "model.bias": False},
    "gpt, head bias": {"model.head_bias": True, "model.label_smoothing": 0.1},
    "llama": LLAMA,
    "llama, 2 kv heads": LLAMA | {"model.kv_heads": 2},
    "llama, tied, 1 kv head": LLAMA | {"model.kv_heads": 1, "model.tied_embeddings": True},
    "gpt, exact gelu, rope": {"model.activation": "gelu_exact", "model.position": "rope", "model.kv_heads": 2},
    "latent": LATENT,
    "latent, queries of x": LATENT | {"model.q_lora_rank": None, "model.bias": True},
    "bert": BERT,
    "bert, head bias": BERT | {"model.head_bias": True, "model.activation": "relu"},
    "mlp": {"model.name": "mlp", "model.preset": "mlp"},
}
EXPERTS: dict[str, Overrides] = {
    "gshard": _experts("gshard", capacity_factor=1.25, group_samples=2),
    "gshard, random second": _experts("gshard", capacity_factor=1.5, second_expert="random", drop_policy="probability"),
    "switch": _experts("switch", capacity_factor=1.25, jitter=0.1) | {"model.expert_period": 1},
    "expert choice": _experts("expert_choice"),
    "top k": _experts("top_k", z_coefficient=0.001) | {"model.shared_experts": 1},
    "llama, top k, every layer": LLAMA | _experts("top_k", renormalise="after") | {"model.expert_period": 1},
    "bert, gshard": BERT | _experts("gshard", capacity_factor=2.0),
    "deepseek": DEEPSEEK,
    "deepseek, no groups": DEEPSEEK | {"model.router.n_group": 1, "model.router.topk_group": 1},
}
IMAGES: dict[str, Overrides] = {
    "resnet": RESNET,
    "resnet, local norms": RESNET | {"model.norm_samples": "local"},
    "resnet, norms of 4": RESNET | {"model.norm_samples": "4"},
    "bottleneck": BOTTLENECK | {"dataset.flip": True},
    "alexnet": ALEXNET,
    "vgg": VGG | {"dataset.crop": 1},
}
OWN: dict[str, Overrides] = {
    "module": {
        "model.name": "module", "model.preset": "module", "model.source": f"{NET}:build",
        "model.roles": {"*.[qkv]": "column_parallel", "*.out": "row_parallel", "*.fc1": "column_parallel",
                        "*.fc2": "row_parallel"},
        "model.blocks": ["embed", "layers.*", "head"], "model.vocab": None, "model.arguments": {"depth": 3},
    },
}  # fmt: skip
MODELS = DENSE | EXPERTS | IMAGES | OWN

DATA: Sequence[Overrides] = (
    *3 * (_data("ddp"),), *2 * (_data("zero1"),), *2 * (_data("zero2"),), *3 * (_data("fsdp"),),
    _data("ddp", bucket_mb=0.05), _data("zero1", bucket_mb=0.05), _data("ddp", compression="fp16"),
    _data("ddp", compression="powersgd"), _data("fsdp", shard=2), _data("fsdp", reshard_after_forward=True),
    _data("fsdp", reshard_after_forward=False), _data("fsdp", reduce_each_microbatch=False), _data("ring"),
    _data("ring", algorithm="halving_doubling"), _data("ring", algorithm="tree"),
    _data("ring", algorithm="hierarchical", group_size=2), _data("ring", compression="fp16", bucket_mb=0.05),
    _data("horovod"), _data("horovod", algorithm="ring"), _data("horovod", reduction="adasum"),
    _data("horovod", compression="powersgd", powersgd_rank=2), _data("horovod", process_sets=[[0, 1]]),
    _data("local_sgd", sync_every=2), _data("diloco", sync_every=2), _data("diloco", outer_nesterov=False),
    _data("ps"), _data("ps", servers=2, shard_min_kb=0.1), _data("ps", consistency="async"),
)  # fmt: skip
SEQUENCE: Overrides = {"strategy.tensor.sequence_parallel": True}
TENSOR: Sequence[Overrides] = (
    *2 * ({"tp": 2},), {"tp": 2} | SEQUENCE, {"tp": 2, "strategy.tensor.overlap": False}, {"tp": 4},
    {"tp": 4} | SEQUENCE, _layout(4, "2d"), _layout(4, "2d", save_gathered=False), _layout(2, "2d", grid="1x2"),
    _layout(2, "2d", grid="2x1"), _layout(4, "2d", form="summa"), _layout(4, "2d", form="stationary_w"),
    _layout(4, "2d", form="stationary_y"), _layout(8, "2.5d", depth=2), _layout(4, "2.5d", depth=1),
    _layout(2, "2.5d", depth=2, grid="1x1"), _layout(8, "3d"), _layout(8, "3d", save_gathered=False),
)  # fmt: skip
PIPELINE: Sequence[Overrides] = (
    {"schedule": "naive", "microbatches": 1}, {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "1f1b"},
    {"schedule": "1f1b", "strategy.pipeline.partition": "uniform"}, {"schedule": "interleaved"},
    {"schedule": "interleaved", "virtual_stages": 3}, {"schedule": "zero_bubble"},
    {"schedule": "zero_bubble", "virtual_stages": 1}, {"schedule": "zbv"},
    {"schedule": "1f1b", "strategy.pipeline.split": ["layers.1"]},
)  # fmt: skip
EXPERT: Sequence[Overrides] = (
    {"ep": 2}, {"ep": 2}, {"ep": 4}, {"ep": 2, "strategy.expert.chunks": 2}, {"ep": 4, "strategy.expert.group_size": 2},
    {"ep": 2, "strategy.expert.overlap": False}, {"ep": 2, "strategy.expert.kind": "dropless"},
    {"ep": 2, "strategy.expert.kind": "capacity"},
)  # fmt: skip
CONTEXT: Sequence[Overrides] = (
    {"cp": 2}, {"cp": 2, "strategy.context.order": "contiguous"}, {"cp": 2, "strategy.context.order": "striped"},
    {"cp": 2, "strategy.context.kind": "allgather"}, {"cp": 2, "strategy.context.kind": "ulysses"},
    {"cp": 4, "strategy.context.kind": "usp", "strategy.context.ulysses": 2}, {"cp": 4},
)  # fmt: skip
# Settings of the run: how often one is drawn, and from what.
SETTINGS: Sequence[tuple[float, Sequence[Overrides]]] = (
    (1.0, [{"global_batch": size} for size in (8, 8, 8, 12, 16)]),
    (0.6, [{"micro_batch": 1}, {"micro_batch": 2}, {"micro_batch": 4}, {"microbatches": 2}, {"microbatches": 3}]),
    (0.3, [{"recompute": "full"}, {"recompute": "selective"}]),
    (0.5, [{"precision.name": name} for name in ("bf16", "bf16", "fp16", "fp64")]),
    (0.5, [{"optimizer.name": "sgd"}, {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
           {"optimizer.name": "adagrad"}, {"optimizer.name": "adamw", "optimizer.weight_decay": 0.0}]),
    (0.3, [{"optimizer.clip": 0.0}, {"optimizer.clip": 0.05}, {"optimizer.lr_scale": 0.5}]),
    (0.25, [{"dropout": 0.1}, {"dropout": 0.1, "model.attention_dropout": 0.2}]),
    (0.15, [{"dataset.pack": True}]),
    (0.01, [{"compile": True}]),
    (1.0, [{"model.layers": count} for count in (2, 2, 3, 4)]),
    (0.3, [{"model.seq": 64}, {"model.heads": 8}, {"model.hidden": 32}, {"model.vocab": 192, "dataset.vocab": 192},
           {"model.vocab": 131, "dataset.vocab": 131}]),
)  # fmt: skip
BASE: Overrides = {
    "model.layers": 4, "model.hidden": 64, "model.heads": 4, "model.seq": 32, "model.vocab": 128, "dataset.vocab": 128,
    "dataset.samples": 128, "optimizer.name": "adamw", "optimizer.clip": 1.0, "dp": 1, "tp": 1, "pp": 1, "cp": 1,
    "ep": 1, "steps": 4,
}  # fmt: skip


def draw(seed: int) -> tuple[Overrides, Plan]:
    """Return the composition of a seed and its plan: the first of the seed's choices that `resolve` accepts."""
    random = Random(seed)
    most = random.choice((MOST_RANKS, *5 * (OFTEN,)))
    while True:
        overrides = _choose(random)
        if not 1 < prod(overrides[axis] for axis in ("dp", "cp", "tp", "pp")) <= most:
            continue
        with suppress(ConfigError):
            return overrides, tiny_plan(overrides)


def _choose(random: Random) -> Overrides:
    """Return choices that need not suit each other."""
    families: Sequence[Mapping[str, Overrides]] = (DENSE, DENSE, DENSE, EXPERTS, EXPERTS, IMAGES, OWN)
    family = random.choice(families)
    found = {**BASE, "seed": random.randrange(10**6)}
    for often, choices in SETTINGS:
        if random.random() < often:
            found |= random.choice(choices)
    found |= random.choice(list(family.values()))
    found |= {"dp": random.choice((1, 1, 2, 2, 3, 4))}
    if found["dp"] > 1:
        found |= random.choice(DATA)
    if random.random() < 0.5:
        found |= random.choice(TENSOR)
    if random.random() < 0.5:
        found |= {"pp": random.choice((2, 2, 2, 3, 4)), **random.choice(PIPELINE)}
    if family is EXPERTS and random.random() < 0.7:
        found |= random.choice(EXPERT)
    if random.random() < 0.25:
        found |= random.choice(CONTEXT)
    return found
