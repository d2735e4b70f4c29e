"""resolve: what is filled in, what is refused, and what the user is told."""

from __future__ import annotations

import dataclasses
import re

import pytest

from parallelrun.base.errors import EXIT_CONFIG, ConfigError
from parallelrun.config.keys import Key, known_keys
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.facts.advice import warnings
from parallelrun.planner.facts.plan_facts import facts
from parallelrun.planner.resolve import rules
from parallelrun.planner.resolve.resolve_config import resolve
from tests.matrix import every
from tests.plans import tiny_config, tiny_plan


def problems_of(overrides=None, /, given=frozenset(), world=None, gpus=None, **more):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides, **more), given=given, world=world, gpus=gpus)
    assert caught.value.exit_code == EXIT_CONFIG
    return caught.value.problems


def only_problem(overrides=None, /, **more):
    problems = problems_of(overrides, **more)
    assert len(problems) == 1, problems
    return problems[0]


INTERLEAVED = {"schedule": "interleaved"}
REFUSED = [  # overrides, and what the problem says: `what -> suggestion;`
    (
        {"dp": 2, "tp": 2, "pp": 1, "world": 8},
        ("pp 1 x dp 2 x tp 2 = 4 ranks", "world 8", "divisors of 8: 1, 2, 4, 8", "-> pp=2 or dp=4 or tp=4 or world=4;"),
    ),
    ({"dp": None, "tp": 2, "pp": 3, "world": 8}, ("8 = 1 x 6 + 2", "world=6 or world=12")),
    ({"tp": 4, "model.ffn": 30}, ("model.ffn=30", "model.ffn=28 or model.ffn=32")),
    ({"model.vocab": 20, "dataset.vocab": 32}, ("-> model.vocab=32;",)),
    ({"tp": 4, "model.seq": 10, "strategy.tensor.sequence_parallel": True}, ("model.seq=8", "model.seq=12")),
    ({"model.hidden": 18}, ("model.hidden=18",)),
    ({"pp": 8}, ("pp 8 = 8 stages", "4 layers", "-> pp=4 or model.layers=8;")),
    ({"pp": 4, **INTERLEAVED, "virtual_stages": 2}, ("pp 4 x virtual_stages 2 = 8 stages", "pp=2")),
    ({"pp": 4, "microbatches": 2}, ("microbatches=2", "microbatches=4", "gpipe")),
    ({"pp": 2, **INTERLEAVED, "global_batch": 15, "microbatches": 5}, ("rounds",)),
    ({"dp": 3, "global_batch": 8}, ("global_batch=6 or global_batch=9",)),
    (
        {"dp": 2, "global_batch": 8, "micro_batch": 3},
        ("2 x 3 = 6", "micro_batch=2 or micro_batch=4 or global_batch=6 or global_batch=12"),
    ),
    ({"dp": 5, "global_batch": None}, ("global_batch=48 is not divisible by dp=5",)),
    ({"local_batch": 2, "global_batch": 8}, ("contradiction: ",)),
    ({"micro_batch": 2, "microbatches": 2}, ("contradiction: ",)),
    # unknown names are answered with the nearest
    ({"pp": 2, "schedule": "interleave"}, ("-> schedule=interleaved",)),
    ({"tp": 4, "layout": "4d"}, ("2d",)),
    ({"model.name": "gtp"}, ("-> model=gpt",)),
    ({"dataset.name": "syntetic"}, ("-> dataset=synthetic",)),
    ({"device": "cud"}, ("-> device=cuda",)),
    ({"precision.name": "bf61"}, ("-> precision=bf16",)),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_with_its_reason_and_a_fix(overrides, parts):
    problem = only_problem(overrides)
    text = f"{problem.kind}: {problem.what} -> {problem.suggestion};"
    assert [part for part in parts if part not in text] == [], text


# Degrees and the world


def test_the_plan_is_frozen_and_made_of_the_config_alone():
    plan = tiny_plan(dp=2, tp=2, pp=2)
    assert plan == tiny_plan(dp=2, tp=2, pp=2)
    assert plan.degrees == {"pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 1} and plan.world == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.world = 9


def test_resolve_does_not_change_the_config():
    config = tiny_config(pp=2, schedule="gpipe", dp=None, world=4)
    before = dataclasses.asdict(config)
    resolve(config)
    assert dataclasses.asdict(config) == before


@pytest.mark.parametrize(
    ("own", "given", "filled"),
    [
        ("dp", {"tp": 2, "pp": 1}, "dp=4 (filled: world 8, pp 1, tp 2)"),
        ("tp", {"dp": 4, "pp": 1}, "tp=2"),
        ("pp", {}, "pp=4"),
    ],
)
def test_the_preset_s_own_axis_takes_what_is_left_of_the_world(own, given, filled):
    degrees = {"dp": None, "tp": None, "pp": None, **given}
    plan = tiny_plan({**degrees, "strategy.own_axis": own, "world": 8 if given else 4})
    assert any(sentence.startswith(filled) for sentence in plan.filled), plan.filled


def test_with_neither_degrees_nor_world_the_demonstrating_plan_is_used_and_said():
    plan = tiny_plan({"dp": None, "tp": None, "pp": None, "strategy.demo": {"tp": 2, "pp": 2}})
    assert plan.degrees == {"pp": 2, "dp": 1, "cp": 1, "tp": 2, "ep": 1}
    assert "smallest plan" in plan.filled[0]


def test_a_preset_shows_its_own_axis_beside_the_degrees_given_which_make_the_world():
    assert tiny_plan({"dp": None, "tp": 2, "pp": None, "strategy.demo": {"dp": 2}}).degrees["dp"] == 2
    plan = tiny_plan({"dp": None, "tp": 4, "pp": 4, "strategy.demo": {"tp": 2, "pp": 2}})
    assert plan.world == 16 and plan.degrees["dp"] == 1


def test_gpus_fill_the_own_axis_and_idle_ones_are_said():
    plan = resolve(tiny_config(dp=None, tp=4), gpus=8)
    assert (plan.device, plan.degrees["dp"]) == ("cuda", 2)
    plan = resolve(tiny_config(dp=None, pp=3), gpus=8)
    assert plan.degrees["dp"] == 2 and "2 of 8 GPUs stay idle" in plan.warnings[0]
    assert resolve(tiny_config(dp=None, tp=4, device="cpu"), gpus=8).degrees["dp"] == 1


def test_a_launcher_s_world_counts_and_must_agree_with_the_config():
    assert resolve(tiny_config(dp=None, tp=2), world=4).degrees["dp"] == 2
    problem = problems_of({"world": 2}, world=4)[0]
    assert problem.kind == "contradiction" and "launcher has started 4" in problem.what


@pytest.mark.parametrize("key", ["dp", "tp", "pp", "ep", "world"])
@pytest.mark.parametrize("value", [0, -4, True, 2.0, "auto", 10**20])
def test_row_3_a_degree_is_a_whole_number_in_range(key, value):
    problem = problems_of({key: value})[0]
    assert problem.where == key and "from 1 to 1048576" in problem.what


SINGLE = {"strategy.name": "single", "strategy.own_axis": "none"}


def test_single_is_one_device():
    assert tiny_plan({**SINGLE, "dp": None}).world == 1
    problem = only_problem({**SINGLE, "dp": 2})
    assert problem.where == "dp" and problem.kind == "contradiction"
    assert problems_of({**SINGLE}, world=4)[0].where == "world"


# Tensor sizes


def test_row_10_heads_and_kv_heads():
    problem = problems_of({"tp": 3, "model.ffn": 48})[0]
    assert "model.heads=4" in problem.what and "tp=3" in problem.what and "tp=2 or tp=4" in problem.suggestion
    problem = problems_of({"tp": 4, "model.heads": 12, "model.hidden": 48, "model.kv_heads": 6})[0]
    assert "kv_heads" in problem.what
    plan = tiny_plan({"tp": 4, "model.kv_heads": 2})
    assert plan.tensor.kv_copies == 2 and plan.mesh.size("tp") == 4
    assert tiny_plan({"tp": 4, "model.vocab": 33}).spec.vocab == 33, "tp need not divide the vocabulary"


def test_further_refusals():
    assert "the most that can be planned" in problems_of({"dp": 2**15, "pp": 2**6})[0].what
    assert only_problem({"microbatches": 0}).where == "microbatches"
    assert only_problem({"layout": "2D "}).suggestion
    problem = problems_of({"pp": 1, **INTERLEAVED})[0]
    assert problem.kind == "unread" and "pp=2" in problem.suggestion


# Pipeline


def test_schedule_beats_the_preset_and_contradicts_an_explicit_kind():
    assert tiny_plan({"pp": 2, "schedule": "gpipe"}).pipeline.kind == "gpipe"
    given = frozenset({"strategy.pipeline.kind", "schedule"})
    problem = problems_of({"pp": 2, "schedule": "gpipe", "strategy.pipeline.kind": "1f1b"}, given=given)[0]
    assert problem.kind == "contradiction"


def test_every_layout_names_a_tensor_way():
    smallest = (("1d", 2), ("2d", 4), ("2.5d", 8), ("3d", 8))
    kinds = {layout: tiny_plan(tp=tp, layout=layout).tensor.kind for layout, tp in smallest}
    assert kinds == {"1d": "megatron", "2d": "2d", "2.5d": "2.5d", "3d": "3d"}


# Keys that nobody reads


@pytest.mark.parametrize(
    "overrides",
    [
        {"staleness": 2},
        {"servers": 1},
        {"consistency": "ssp"},
        {"backup_workers": 1},
        {"grid": "2x2"},
        {"depth": 2},
        {"pp": 2, "virtual_stages": 2},
        {"pp": 2, "schedule": "gpipe", "virtual_stages": 2},
        {"schedule": "gpipe"},
    ],
)
def test_a_key_that_the_chosen_ways_do_not_read(overrides):
    problem = problems_of(overrides)[0]
    assert problem.kind == "unread"
    plan = resolve(tiny_config(overrides), sweep=True)
    assert any("read by none" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("strategy.data.shard", {"strategy.data.shard": 2, "dp": 4}),
        ("strategy.data.bucket_mb", {"strategy.data.kind": "fsdp", "dp": 2}),
        ("strategy.pipeline.partition", {}),
        ("optimizer.momentum", {"optimizer.momentum": 0.9}),
        ("optimizer.betas", {"optimizer.name": "sgd"}),
    ],
)
def test_a_nested_key_is_unread_only_if_the_user_gave_it(key, overrides):
    assert tiny_plan(overrides)
    assert problems_of(overrides, given=frozenset({key}))[0].kind == "unread"


# Batch


def test_the_default_global_batch_is_48_in_one_microbatch_without_a_pipeline():
    batch = tiny_plan(global_batch=None, dp=2).batch
    assert (batch.global_batch, batch.micro_batch, batch.microbatches) == (48, 24, 1)


def test_48_samples_that_are_too_few_for_the_plan_are_raised_and_it_is_said():
    plan = tiny_plan({"global_batch": None, "dp": 6, "pp": 16, "model.layers": 16})
    assert plan.batch.global_batch == 6 * 16 and plan.batch.microbatches == 16
    assert any("too few for the plan" in sentence for sentence in plan.filled)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"pp": 2},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 2, "tp": 2, "cp": 2},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"strategy.name": "ps", "strategy.data.kind": "ps", "strategy.data.servers": 2},
    ],
    ids=str,
)
def test_local_batch_is_of_a_replica_whatever_its_ranks(others):
    for dp in (1, 2, 4):
        plan = tiny_plan({"local_batch": 8, "dp": dp, **others})
        batch = plan.batch
        assert (batch.global_batch, batch.replica_batch) == (8 * dp, 8)
        assert batch.micro_batch * batch.microbatches == 8
        assert f"global_batch={8 * dp} (filled: local_batch 8 x dp {dp})" in plan.filled


def test_a_larger_local_batch_that_is_advised_gives_the_microbatches_that_it_says():
    given = {"local_batch": 4, "dp": 2, "pp": 4, "schedule": "gpipe", "microbatches": 4}
    config = tiny_config(given)
    (advised,) = [one for one in warnings(resolve(config), config, facts(resolve(config), config)) if "local" in one]
    words = dict(re.findall(r"(local_batch|microbatches)=(\d+)", advised))
    batch = tiny_plan({**given, **{key: int(value) for key, value in words.items()}}).batch
    assert (batch.replica_batch, batch.micro_batch) == (int(words["local_batch"]), 1), advised
    assert batch.microbatches == int(words["microbatches"])


# Ranges


def values_outside(key: Key) -> list[object]:
    """Values outside each bound of a key. Every whole number has an upper bound."""
    if key.kind not in ("int", "float") and not key.choices:
        return []
    if key.choices:
        return ["nosuch"]
    most = rules.LARGEST if key.kind == "int" and key.most is None else key.most
    steps = (key.least, -1), (key.above, 0), (most, 1), (key.below, 0)
    numbers = [bound + step for bound, step in steps if bound is not None]
    return [*map(int, numbers)] if key.kind == "int" else [*numbers, *([float("nan")] if numbers else [])]


BOUNDS = [(key, value) for key, schema in known_keys().items() for value in values_outside(schema)]
OTHERS = [("optimizer.lr", float("inf")), ("optimizer.betas", [0.9, 1.0]), ("optimizer.betas", [0.9])]


def test_a_value_outside_the_bounds_of_its_key_is_refused_with_a_legal_one():
    assert len(BOUNDS) > 250
    for key, value in every(3, BOUNDS) + OTHERS:
        problem = next(one for one in problems_of({key: value}) if one.where in (key, key.removesuffix(".name")))
        assert problem.suggestion, (key, value)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "", "a" * 300, "x\0y", ".hidden", "a b"])
def test_row_34_a_run_name_that_could_leave_the_runs_directory(name):
    problem = only_problem({"name": name})
    assert problem.where == "name"
    assert tiny_plan(name=problem.suggestion.removeprefix("name="))


def test_the_schema_s_own_defaults_are_a_legal_plan():
    plan = resolve(Config())
    assert plan.world == 1 and plan.batch.global_batch == 48


def test_the_demonstrating_plan_is_shortened_for_a_model_that_cannot_be_cut():
    overrides = {"dp": None, "tp": None, "pp": None, "model.layers": 1, "strategy.demo": {"tp": 2, "pp": 2}}
    plan = tiny_plan(overrides)
    assert plan.degrees == {"pp": 1, "dp": 1, "cp": 1, "tp": 2, "ep": 1} and "at pp=1" in plan.filled[0]
    shown = {**overrides, "strategy.own_axis": "pp", "strategy.demo": {"tp": 2, "pp": 4}}  # of embedding, layer, head
    assert only_problem(shown).where == "pp", "a pipeline without stages shows nothing"
