"""Save under one plan, load under another: weights and optimizer state bit by bit, on real ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallelrun import checkpoint
from tests.checkpoints import build, parts_of, read_whole, same, truth, wrong_parts
from tests.plans import tiny_plan

# Uneven vocab shards (33 over 2 and 4), kv heads copied (2 over tp=4), tied embeddings across stages, empty ZeRO
# chunks (3 ranks of small dims), HSDP, more than one stage per rank.
MODEL = {"model.vocab": 33, "model.kv_heads": 2, "dataset.vocab": 33}
PLANS = {
    "one": {},
    "dp2": {"dp": 2},
    "zero1": {"dp": 4, "strategy.data.kind": "zero1"},
    "zero1_dp3": {"dp": 3, "strategy.data.kind": "zero1", "global_batch": 6},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "hsdp": {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved", "chunks": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "zero1_tp2": {"dp": 2, "tp": 2, "strategy.data.kind": "zero1"},
    "fsdp_tp2_pp2": {"dp": 2, "tp": 2, "pp": 2, "strategy.data.kind": "fsdp"},
}


def overrides(name):
    return {**MODEL, **PLANS[name]}


def save_once(folder, changes, salt):
    plan, mesh = build(changes)
    parameters, optimizer = parts_of(plan, mesh, salt)
    extra = {"step": 5, "scaler": {"scale": 0.1}, "rank": mesh.rank}
    checkpoint.save(folder, 5, parameters, optimizer, extra, plan, mesh)


def load_and_save(paths, folder, changes):
    plan, mesh = build(changes)
    wrong, extras = [], []
    for salt, path in paths:
        parameters, optimizer = parts_of(plan, mesh, None)
        extras.append(checkpoint.load(path, parameters, optimizer, plan, mesh))
        wrong += [f"{path}: {name}" for name in wrong_parts(parameters, optimizer, plan, mesh, salt)]
    checkpoint.save(folder, 6, parameters, optimizer, {}, plan, mesh)
    return wrong, extras


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each plan, each of other numbers, by plan name."""
    from tests.pool import run_ranks

    root = tmp_path_factory.mktemp("saved")
    for salt, name in enumerate(PLANS):
        run_ranks(tiny_plan(overrides(name)).world, save_once, root / name, overrides(name), salt)
    return {name: root / name / "step_5" for name in PLANS}


@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_holds_every_logical_element_once(saved, name):
    plan = tiny_plan(overrides(name))
    assert same(read_whole(saved[name]), truth(plan, salt=list(PLANS).index(name)))
    stored = sum(t.numel() for key, t in read_whole(saved[name]).items() if key.startswith("model/"))
    assert stored == plan.spec.num_parameters
    data = checkpoint.read_index(saved[name])
    state_bytes = plan.spec.num_parameters * 12 + len(plan.spec.parameters) * 4
    assert state_bytes <= data.num_bytes < state_bytes * 2 + 5000 * len(data.files)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_loads_other_plans_checkpoints(saved, name, tmp_path, run_ranks):
    """12 plans x 3 checkpoints = 36 pairs; saved again under the second plan, the numbers are still the first one's."""
    plan = tiny_plan(overrides(name))
    salts = [(list(PLANS).index(name) + ahead) % len(PLANS) for ahead in (0, 1, 5)]
    paths = [(salt, saved[list(PLANS)[salt]]) for salt in salts]
    results = run_ranks(plan.world, load_and_save, paths, tmp_path, overrides(name))
    assert [wrong for wrong, _ in results] == [[]] * plan.world
    for _, extras in results:
        assert extras == [{"step": 5, "scaler": {"scale": 0.1}, "rank": 0}] * len(salts)
    assert same(read_whole(tmp_path / "step_6"), truth(plan, salt=salts[-1]))


def owners_without_pp(layout, shape, coordinate):
    """The mistake to fear: taking pp for an axis that holds copies, so that later stages are never saved."""
    return layout.owns(shape.leaf_names, coordinate)


def save_with_wrong_owners(folder, changes):
    from parallelrun.checkpoint import store

    store.owns = owners_without_pp
    save_once(folder, changes, 0)
    return dist.get_rank()


def test_a_save_that_forgets_a_stage_is_refused(tmp_path, run_ranks):
    with pytest.raises(Exception, match="not written by any rank"):
        run_ranks(2, save_with_wrong_owners, tmp_path, overrides("pp2"))
    assert not list(tmp_path.glob("step_*"))
