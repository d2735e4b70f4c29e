"""Properties of thousands of random plans of up to 16,384 ranks, legal and illegal."""

from __future__ import annotations

from collections import Counter
from math import prod

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.parameters import held_parameters, owns
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.rank_classes import rank_classes
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.ps.plan import sharding
from tests.matrix import examples
from tests.plans import pairs, tiny_config

POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128])
SCHEDULES = ["1f1b", "gpipe", "naive", "interleaved", "zero_bubble", "zbv", "dualpipev"]
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@st.composite
def mostly_legal(draw) -> dict:
    """Overrides of the tiny config that mostly make a legal plan."""
    pp, tp = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16, 64])), draw(st.sampled_from([1, 2, 4, 8, 16]))
    dp = draw(st.integers(1, max(1, min(64, 16384 // (pp * tp)))))
    kind = draw(st.sampled_from(SCHEDULES)) if pp > 1 else None
    virtual_stages = 2 if kind in ("interleaved", "zbv", "dualpipev") else 1
    m = {"naive": 1}.get(kind, pp * draw(st.integers(1, 3)))
    kv_heads = draw(st.sampled_from([None, 2, 4, 16]))
    data = draw(st.sampled_from(["ddp", "ring", "zero1", "zero2", "fsdp", "local_sgd", "diloco"]))
    divisors = [n for n in range(2, dp + 1) if dp % n == 0]
    experts = draw(st.sampled_from([0, 0, 4, 6, 16]))
    eps = [n for n in (1, *divisors) if experts and experts % n == 0]
    return {
        "model.experts": experts,
        "model.expert_period": draw(st.sampled_from([1, 2])) if pp * virtual_stages > 1 else 1,
        "model.router.kind": draw(st.sampled_from(["top_k", "gshard", "expert_choice"])),
        "model.router.capacity_factor": draw(st.sampled_from([None, 1.25])),
        "model.router.bias_rate": draw(st.sampled_from([0.0, 0.001])),
        "ep": draw(st.sampled_from([None, *eps])),
        "pp": pp,
        "tp": tp,
        "dp": dp,
        "schedule": kind,
        "model.layers": pp * virtual_stages + draw(st.integers(0, 5)),
        "model.hidden": 32,
        "model.heads": 16,
        "model.kv_heads": kv_heads,
        "model.seq": 16,
        "model.vocab": draw(st.integers(32, 70)),
        "model.tied_embeddings": draw(st.booleans()),
        "strategy.tensor.sequence_parallel": draw(st.booleans()),
        "strategy.data.kind": data,
        "strategy.data.shard": draw(st.sampled_from([None, *divisors])) if data == "fsdp" else None,
        "global_batch": dp * m * draw(st.integers(1, 2)),
        "microbatches": m,
    }


@st.composite
def anything(draw) -> dict:
    """Overrides without a thought for what is legal."""
    degree = st.one_of(st.none(), st.integers(-1, 20), POWERS)
    overrides = {
        "pp": draw(degree),
        "tp": draw(degree),
        "dp": draw(degree),
        "world": draw(st.one_of(st.none(), POWERS)),
        "schedule": draw(st.sampled_from([None, *SCHEDULES, "1b1f"])),
        "virtual_stages": draw(st.sampled_from([None, None, 1, 2, 3, 0])),
        "global_batch": draw(st.one_of(st.none(), st.integers(0, 130))),
        "micro_batch": draw(st.one_of(st.none(), st.none(), st.integers(0, 9))),
        "microbatches": draw(st.one_of(st.none(), st.none(), st.integers(0, 40))),
        "model.layers": draw(st.integers(0, 17)),
        "model.hidden": draw(st.sampled_from([16, 24, 32, 0])),
        "model.heads": draw(st.sampled_from([4, 8, 6, 3])),
        "model.kv_heads": draw(st.sampled_from([None, 2, 3, 4])),
        "model.ffn": draw(st.sampled_from([None, 30, 64])),
        "strategy.tensor.sequence_parallel": draw(st.booleans()),
        "strategy.data.kind": draw(
            st.sampled_from(["ddp", "ring", "horovod", "zero1", "fsdp", "diloco", "zero9", "ps"])
        ),
        "strategy.data.compression": draw(st.sampled_from(["none", "none", "none", "fp16", "bf16", "powersgd"])),
        "servers": draw(st.sampled_from([None, None, None, 1, 2, 0, 50])),
        "consistency": draw(st.sampled_from([None, None, "sync", "async", "ssp", "eventual"])),
        "staleness": draw(st.sampled_from([None, None, None, 0, 2, -1])),
        "backup_workers": draw(st.sampled_from([None, None, None, 0, 1, 7])),
        "cluster.ps": draw(st.sampled_from([None, None, None, None, ["a:1"], ["b"]])),
        "cluster.worker": draw(st.sampled_from([None, None, None, None, ["c:1", "d:1"], ["a:1"]])),
        "strategy.data.shard": draw(st.sampled_from([None, None, 0, 2, 3, 4])),
        "strategy.data.algorithm": draw(st.sampled_from([None, "native", "hierarchical", "tree", "star"])),
        "strategy.data.group_size": draw(st.sampled_from([None, None, 0, 2, 3])),
        "strategy.own_axis": draw(st.sampled_from(["dp", "tp", "pp"])),
        "strategy.demo": draw(st.sampled_from([{}, {"dp": 2}, {"tp": 2, "pp": 2}])),
        "strategy.name": draw(st.sampled_from(["ptdp", "ptdp", "single"])),
        "strategy.pipeline.partition": draw(st.sampled_from(["cost", "cost", "uniform"])),
        "optimizer.lr": draw(st.sampled_from([0.1, 0.1, float("nan"), -1.0])),
        "ep": draw(st.sampled_from([None, None, None, 1, 2, 4, 0])),
        "model.experts": draw(st.sampled_from([0, 0, 4, 8, 3, -1])),
        "model.shared_experts": draw(st.sampled_from([0, 0, 1, -1])),
        "model.router.kind": draw(st.sampled_from(["top_k", "gshard", "switch", "expert_choice", "best"])),
        "model.router.top_k": draw(st.sampled_from([2, 2, 1, 9, 0])),
        "model.router.capacity_factor": draw(st.sampled_from([None, None, 1.25, 0.0])),
        "model.router.group_samples": draw(st.sampled_from([1, 1, 2, 3, 0])),
        "strategy.expert.kind": draw(st.sampled_from([None, None, "capacity", "dropless", "fast"])),
        "strategy.expert.fills": draw(st.sampled_from([False, False, True])),
        "strategy.expert.chunks": draw(st.sampled_from([1, 1, 2, 0])),
        "strategy.expert.group_size": draw(st.sampled_from([None, None, 1, 2, 3])),
        "layout": draw(st.sampled_from([None, None, "1d", "2d", "2.5d", "3d", "4d"])),
        "grid": draw(st.sampled_from([None, None, None, "2x2", "1x3", "3by2"])),
        "depth": draw(st.sampled_from([None, None, None, 1, 2, 0])),
        "strategy.tensor.form": draw(st.sampled_from(["auto", "auto", "summa", "stationary_z"])),
        "local_batch": draw(st.sampled_from([None, None, None, 3, 0])),
        "recompute": draw(st.sampled_from(["none", "full", "some"])),
        "device": draw(st.sampled_from(["auto", "cpu", "cuda", "tpu"])),
    }
    return overrides


@settings(max_examples=examples(1100), **COMMON)
@given(mostly_legal())
def test_ranks_stages_and_batch_of_random_plans(overrides):
    try:
        plan = resolve(tiny_config(overrides))
    except ConfigError as error:
        assert all(problem.what and problem.where and problem.suggestion for problem in error.problems)
        return
    assert plan.world == plan.mesh.num_ranks <= 16384
    check_ranks(plan)
    check_stages(plan)
    batch = plan.batch
    assert batch.global_batch == plan.mesh.size("dp") * batch.micro_batch * batch.microbatches


def check_ranks(plan: Plan) -> None:
    """Each rank once per axis, groups of one size that share all other coordinates, coordinate <-> rank one to one."""
    shape = plan.mesh
    step = max(1, shape.num_ranks // 8)
    for rank in [*range(0, shape.num_ranks, step), shape.num_ranks - 1]:
        coordinate = shape.coordinate(rank)
        assert shape.rank(**{axis: coordinate[axis] for axis in shape.mesh_dim_names}) == rank
        assert shape.rank(pp=coordinate["pp"], dp=coordinate["dp"], tp=coordinate["tp"]) == rank
        for axis in ("pp", "dp", "tp", "ep", "expert_dp"):
            group = shape.group_of(rank, axis)
            assert rank in group and len(set(group)) == len(group) == shape.size(axis)
            assert group.index(rank) == coordinate.get(axis, 0)
    if shape.num_ranks <= 64:
        several = ("pp", "tp"), ("dp", "tp"), ("pp", "dp", "tp")
        for axes in (("pp",), ("dp",), ("tp",), ("ep",), ("expert_dp",), *several):
            groups = list(shape.groups(*axes))
            assert sorted(rank for group in groups for rank in group) == list(range(shape.num_ranks))
            assert all(shape.group_of(rank, *axes) == group for group in groups for rank in group)


def check_stages(plan: Plan) -> None:
    """Every block in exactly one stage, in order; every coordinate runs `virtual_stages` stages, none of them empty."""
    assert [name for stage in plan.stages for name in stage.blocks] == [block.name for block in plan.spec.blocks]
    assert all(stage.blocks for stage in plan.stages)
    assert [stage.index for stage in plan.stages] == list(range(len(plan.stages)))
    runs = Counter(stage.pp_rank for stage in plan.stages)
    assert runs == {pp_rank: plan.pipeline.virtual_stages for pp_rank in range(plan.mesh.size("pp"))}


@settings(max_examples=examples(150), **COMMON)
@given(mostly_legal())
def test_layouts_cover_every_parameter_once_per_copy_with_one_owner(overrides):
    try:
        plan = resolve(tiny_config({**overrides, "model.layers": max(1, overrides["model.layers"])}))
    except ConfigError:
        return
    shape = plan.mesh
    inner = [axis for axis in shape.mesh_dim_names if axis != "pp"]
    places = [shape.coordinate(rank) for rank in range(prod(shape.size(axis) for axis in inner))]
    if len(places) > 64:
        return
    seen: Counter[str] = Counter()
    checked = set()
    for pp_rank in range(shape.size("pp")):
        for held in held_parameters(plan, pp_rank):
            seen[held.spec.name] += not held.shared
            for layout in {
                plan.data.weight_layout(held.spec, held.layout, plan),
                plan.data.state_layout(held.spec, held.layout, plan),
                plan.data.gradient_layout(held.spec, held.layout, plan),
            }:
                if (held.spec.shape, layout) in checked:
                    continue
                checked.add((held.spec.shape, layout))
                cover(held.spec.shape, layout, shape, places)
    assert seen == {name: 1 for name in plan.spec.parameters}


def cover(shape, layout, mesh, places) -> None:
    """The parts of all places tile the tensor: each distinct part `copies` times, with one owner."""
    parts: Counter = Counter()
    owners: Counter = Counter()
    empty_owners = 0
    for place in places:
        part = layout.ranges(shape, mesh.sizes, place)
        parts[part] += 1
        owners[part] += owns(layout, mesh, place)
    split = prod(mesh.size(axis) for axis in layout.axes)
    copies = len(places) // split
    sizes = {part: prod(stop - start for start, stop in part) for part in parts}
    assert sum(sizes.values()) == prod(shape), "distinct parts tile the tensor"
    for part, size in sizes.items():
        if size:
            assert parts[part] == copies and owners[part] == 1
        empty_owners += size == 0
    assert sum(parts.values()) == copies * split


@settings(max_examples=examples(500), **COMMON)
@given(anything())
def test_whatever_is_asked_either_makes_a_plan_or_a_config_error(overrides):
    config = tiny_config(overrides)
    try:
        plan = resolve(config)
    except ConfigError as error:
        assert error.problems
        assert len(set(error.problems)) == len(error.problems)
        for problem in error.problems:
            assert problem.kind in ("arithmetic", "undefined", "not_built", "contradiction", "unread", "usage")
            assert problem.what and problem.where and problem.suggestion
        return
    assert plan.world == plan.mesh.num_ranks + plan.servers
    assert (plan.servers > 0) == (plan.data.kind == "ps")
    check_stages(plan)


@st.composite
def served(draw) -> dict:
    """Overrides of a parameter server, with at most one thing wrong."""
    workers, servers = draw(st.integers(1, 12)), draw(st.sampled_from([None, 1, 2, 3, 9]))
    wrong = draw(st.sampled_from(["", "", "world", "servers", "backup_workers", "delays"]))
    consistency = draw(st.sampled_from([None, "sync", "async", "ssp"]))
    return {
        "strategy.name": "ps",
        "strategy.data.kind": "ps",
        "servers": 1000 if wrong == "servers" else servers,
        "dp": workers,
        "tp": draw(st.sampled_from([None, 2])),
        "pp": None,
        "world": draw(st.integers(1, 20)) if wrong == "world" else None,
        "consistency": consistency,
        "staleness": draw(st.sampled_from([None, 0, 3])) if consistency in (None, "ssp") else None,
        "backup_workers": draw(st.integers(1, 20)) if wrong == "backup_workers" and consistency == "sync" else None,
        "strategy.data.delays": [0.1] * draw(st.integers(1, 20)) if wrong == "delays" else [],
        "strategy.data.shard_min_kb": draw(st.sampled_from([0.0, 1.0, 256.0])),
        "local_batch": draw(st.integers(1, 3)),
    }


@settings(max_examples=examples(120), **COMMON)
@given(served())
def test_a_parameter_server_s_suggestions_are_legal_and_its_servers_own_something(overrides):
    try:
        plan = resolve(tiny_config(overrides))
    except ConfigError as error:
        for suggested, text in pairs(error.problems[0].suggestion) if len(error.problems) == 1 else ():
            if suggested != "strategy":
                value = float(text) if "_kb" in suggested else int(text)
                resolve(tiny_config({**overrides, suggested: value}))
        return
    assert plan.world == plan.mesh.size("dp") * plan.mesh.size("tp") + plan.servers
    assert [plan.role(rank) for rank in range(plan.world)] == ["worker"] * plan.num_workers + ["server"] * plan.servers
    assert min(sharding(plan).num_bytes) > 0
    assert sum(count for _, count in rank_classes(plan)) == plan.world


@settings(max_examples=examples(250), **COMMON)
@given(
    overrides=mostly_legal(),
    key=st.sampled_from(
        ["pp", "tp", "dp", "ep", "global_batch", "microbatches", "model.layers", "model.ffn", "model.heads"]
        + ["model.experts", "model.router.top_k", "model.router.group_samples"]
    ),
    value=st.integers(1, 40),
)
def test_the_values_suggested_for_one_wrong_key_are_themselves_legal(overrides, key, value):
    wrong = {**overrides, key: value}
    try:
        resolve(tiny_config(wrong))
        return
    except ConfigError as error:
        if len(error.problems) != 1:
            return
        (problem,) = error.problems
    for suggested, text in pairs(problem.suggestion):
        if suggested not in ("strategy", "model"):
            value = int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)
            resolve(tiny_config({**wrong, suggested: value}))
