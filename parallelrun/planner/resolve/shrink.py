"""The smallest plan with the structure of a large one, so that `verify shrink=true` can prove it on this machine.

Every axis keeps at least two ranks, and everything that makes plans differ stays: the strategies with their settings,
stages of uneven length, tied weights on two stages, key and value heads on several ranks, a vocabulary that does not
divide, experts and their capacity. Sizes become as small as these allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.model_schema import DatasetConfig, ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import num_data_ranks
from parallelrun.planner.resolve.freeze import filled
from parallelrun.planner.resolve.resolve_config import resolve

MOST_RANKS = 16
_GROUPS = "group_size"  # keys of this name count ranks of an inner group
_HEAD_SIZE, _HEADS_A_RANK, _MOST_MICRO_BATCH, _WINDOW = 4, 2, 8, 3


@dataclass(frozen=True)
class Shrunk:
    """config, plan: of the small model, the former with the keys of all strategies. sizes: `hidden 25600 -> 64`, ...;
    lost: features that did not fit.
    """

    config: Config
    plan: Plan
    sizes: tuple[str, ...]
    lost: tuple[str, ...]


def shrunk(config: Config, plan: Plan) -> Shrunk:
    """Return the smallest plan on at most `MOST_RANKS` ranks with the structure of `plan`, or most of it.

    Raises ConfigError for a model that is not made of transformer layers.
    """
    if plan.spec.kind != "tokens" or not plan.spec.heads:
        message = f"model={config.model.preset}: only models of transformer layers are made smaller"
        raise ConfigError(Problem(message, "shrink", "shrink=false"))
    wanted = features(plan)
    best: tuple[int, int, Config, Plan] | None = None
    for candidate in _candidates(filled(config, plan), plan):
        try:
            small_plan = resolve(candidate)
        except ConfigError:
            continue
        missing = len(_missing(wanted, features(small_plan)))
        if best is None or (missing, small_plan.world) < best[:2]:
            best = missing, small_plan.world, candidate, small_plan
        if missing == 0:
            break
    if best is None:
        message = f"no legal plan on at most {MOST_RANKS} ranks has the strategies of this one"
        raise ConfigError(Problem(message, "shrink", "shrink=false"))
    _, _, small, small_plan = best
    lost = _missing(wanted, features(small_plan))
    return Shrunk(completed(small), small_plan, tuple(_sizes(plan, small_plan)), tuple(lost))


def features(plan: Plan) -> dict[str, object]:
    """Return the properties that distinguish a plan's step from another's, by readable names; no sizes."""
    spec, mesh = plan.spec, plan.mesh
    axes = sorted({name for name in mesh.sizes if mesh.size(name) > 1})
    lengths = {sum(spec.block(name).is_recomputed for name in stage.blocks) for stage in plan.stages}
    moe = [block for block in spec.blocks if any(layer.layer_role == "expert" for layer in block.layers)]
    router = spec.router
    windows = {block.attention.window for block in spec.blocks if block.attention.window is not None}
    return {
        **{f"axis {name}": name in axes for name in axes},
        "data replicas that hold the same experts": plan.num_data_ranks > num_data_ranks(plan),
        "data": (plan.data.kind, plan.servers > 0),
        "tensor": (plan.tensor.kind, plan.tensor.sequence_parallel, plan.tensor.overlap, plan.tensor.save_gathered),
        "pipeline": plan.pipeline.kind,
        "several stages on a rank": len(plan.stages) > mesh.size("pp"),
        "stages of uneven length": len(lengths) > 1,
        "a weight tied over two stages": bool(plan.tied_copies),
        "a tied weight": bool(spec.tied),
        "fewer key and value heads than query heads": spec.kv_heads < spec.heads,
        "key and value heads on several ranks": plan.tensor.kv_copies > 1,
        "heads of another width than hidden / heads": bool(spec.head_dim) and spec.qk_features != spec.hidden,
        "a window of keys": any(window < spec.seq for window in windows),
        "layers with and without a window": len(windows) > 1 or (bool(windows) and spec.window is None),
        "sinks": any(block.attention.sinks for block in spec.blocks),
        "latent attention, of queries too": (spec.latent is not None, bool(spec.latent and spec.latent.q_rank)),
        "a vocabulary that does not divide": spec.vocab % mesh.size("tp") > 0,
        "context": (plan.context.kind, plan.context.order) if plan.context else None,
        "experts": (plan.expert.kind if plan.expert else None, bool(moe), router.limited if router else None),
        "tokens that use some groups of experts": router is not None and router.topk_group < router.n_group,
        "several experts on a rank": bool(moe) and spec.experts > mesh.size("ep"),
        "layers without experts": bool(moe) and len(moe) < spec.num_layers,
        "several microbatches": plan.batch.microbatches > 1,
        "more microbatches than stages": plan.batch.microbatches > mesh.size("pp"),
        "recomputation": plan.recompute,
        "dropout": plan.dropout > 0,
    }


def _missing(wanted: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    return [name for name, value in wanted.items() if actual.get(name, False) != value]


def _candidates(config: Config, plan: Plan) -> Iterator[Config]:
    """Configurations from the smallest on. config: with everything filled in."""
    tp, cp = _least(plan, "tp"), _least(plan, "cp")
    pp = min(2, plan.mesh.size("pp"))
    beyond = num_data_ranks(plan) > plan.mesh.size("cp") > 1  # experts over more than the ranks of a sequence
    ep = 2 * cp if beyond else min(2, num_data_ranks(plan))
    dp = max(_least(plan, "dp"), ep * min(2, plan.num_data_ranks // num_data_ranks(plan)) // cp)
    virtual = min(2, len(plan.stages) // plan.mesh.size("pp"))
    most_pp = 4 if pp > 1 else 1
    degrees = [
        (dp * more, cp, width, length, ep * (width if plan.ep_spans_tp else 1))
        for more, width, length in product((1, 2), (tp, 2 * tp), (pp, most_pp))
        if dp * more * cp * width * length + min(2, plan.servers) <= MOST_RANKS and (tp > 1 or width == 1)
    ]
    degrees += [(1, cp, tp, pp, 1), (1, cp, tp, 1, 1)]  # where even the least does not fit
    uneven = bool(features(plan)["stages of uneven length"])
    for replicas, parts, width, length, experts in dict.fromkeys(degrees):
        stages = length * virtual
        for num_layers, micro_batch in product(range(max(2, stages), 3 * stages + 3), (1, 2, 4, _MOST_MICRO_BATCH)):
            if uneven or num_layers % stages == 0:
                yield _config(config, plan, (replicas, parts, width, length, experts), num_layers, virtual, micro_batch)


def _least(plan: Plan, axis: str) -> int:
    """Two ranks for each mesh dim of an axis that has more than one."""
    return prod(min(2, plan.mesh.size(name)) for name in plan.mesh.mesh_dims_of(axis))


def _config(
    config: Config, plan: Plan, degrees: tuple[int, int, int, int, int], num_layers: int, virtual: int, micro_batch: int
) -> Config:
    dp, cp, tp, pp, ep = degrees
    microbatches = min(plan.batch.microbatches, pp + pp * (plan.batch.microbatches > plan.mesh.size("pp")))
    strategy = replace(
        config.strategy,
        data=_of_two(config.strategy.data),
        tensor=_of_two(config.strategy.tensor),
        expert=_of_two(config.strategy.expert),
        context=_of_two(config.strategy.context),
        pipeline=replace(config.strategy.pipeline, split=[]),
    )
    several = len(plan.stages) > plan.mesh.size("pp")
    return replace(
        config,
        model=_model(config.model, plan, (cp, tp, ep), num_layers),
        dataset=DatasetConfig(name="synthetic", samples=64),
        strategy=replace(
            strategy, pipeline=replace(strategy.pipeline, virtual_stages=virtual if several else None)
        ),
        cluster=ClusterConfig(),
        world=None, gpus=None, dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, servers=min(2, plan.servers) or None,
        global_batch=dp * micro_batch * microbatches, local_batch=None, micro_batch=None,
        microbatches=microbatches, resume=None, shrink=False,
    )  # fmt: skip


def _of_two(section: Any) -> Any:
    """The section of a strategy with two ranks where a key counts some: `grid=8x8` is 2x2."""
    changes: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if value is None or not (item.metadata.get("of_degrees") or item.name == _GROUPS):
            continue
        if isinstance(value, int):
            changes[item.name] = min(2, value)
        else:
            changes[item.name] = "x".join(str(min(2, int(part))) for part in value.split("x"))
    return replace(section, **changes)


def _model(model: ModelConfig, plan: Plan, degrees: tuple[int, int, int], num_layers: int) -> ModelConfig:
    """A small model with the options of `model`. degrees: cp, tp, ep."""
    cp, tp, ep = degrees
    spec, heads = plan.spec, _HEADS_A_RANK * tp
    hidden = heads * _HEAD_SIZE
    kv_heads = None if spec.kv_heads == spec.heads else max(1, tp // 2) if plan.tensor.kv_copies > 1 else tp
    vocab = 16 * tp + (1 if spec.vocab % plan.mesh.size("tp") else 0)
    experts = ep * min(2, spec.experts // plan.mesh.size("ep")) if spec.experts else 0
    limited = model.router.topk_group < model.router.n_group
    if limited:
        experts = max(experts, 4)  # of which a token uses one group of two
    router = replace(
        model.router,
        top_k=min(model.router.top_k, experts // 2 if limited else experts or 1),
        group_samples=min(2, model.router.group_samples),
        n_group=2 if limited else 1,
        topk_group=1,
    )
    return replace(
        model,
        layers=num_layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab, mask_token=None,
        head_dim=_HEAD_SIZE + 2 if model.head_dim is not None and spec.qk_features != spec.hidden else None,
        window=_WINDOW if model.window is not None and model.window < model.seq else None,
        global_period=model.global_period and 2,
        **_latent_sizes(model, hidden),
        seq=4 * max(2, tp) * cp, ffn=None if model.ffn is None else 2 * hidden, experts=experts,
        expert_ffn=None if model.expert_ffn is None else hidden, dense_layers=min(1, model.dense_layers),
        shared_experts=min(1, model.shared_experts), router=router, rope_original_seq=min(8, model.rope_original_seq),
        init_std=max(model.init_std, 0.1), from_hf=None,
    )  # fmt: skip


def _latent_sizes(model: ModelConfig, hidden: int) -> dict[str, Any]:
    """Small sizes of latent attention, all of them different; none for plain attention."""
    if model.kv_lora_rank is None:
        return {}
    return {
        "q_lora_rank": None if model.q_lora_rank is None else hidden // 2,
        "kv_lora_rank": hidden // 2 + 1,
        "qk_nope_head_dim": _HEAD_SIZE,
        "qk_rope_head_dim": 2,
        "v_head_dim": _HEAD_SIZE + 1,
    }


def _sizes(large: Plan, small: Plan) -> Iterator[str]:
    """Yield a text `name before -> after` for each size that became smaller."""
    degrees = zip(large.degrees.items(), small.degrees.values())
    yield from (f"{axis} {before} -> {after}" for (axis, before), after in degrees if before != after)
    for name in ("num_layers", "hidden", "heads", "kv_heads", "vocab", "seq", "experts"):
        before, after = getattr(large.spec, name), getattr(small.spec, name)
        if before != after:
            yield f"{name.removeprefix('num_')} {before} -> {after}"
    yield f"global batch {large.batch.global_batch} -> {small.batch.global_batch}"
