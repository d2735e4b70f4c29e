"""Save under one plan, load under another: weights and optimizer state bit by bit, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from parallelrun.checkpoint import store
from parallelrun.checkpoint.schema import read_index
from tests import checkpoints
from tests.checkpoints import build, parts_of, read_whole, same, truth, wrong_parts
from tests.matrix import FULL
from tests.plans import tiny_plan
from tests.pool import run_ranks

# Uneven vocab shards (33 over 2 and 4), kv heads copied (2 over tp=4), tied embeddings across stages, empty ZeRO
# chunks (3 ranks of small dims), HSDP, more than one stage per rank, dims split by several axes (2D, 2.5D, 3D).
MODEL: dict[str, Any] = {"model.vocab": 33, "model.kv_heads": 2, "dataset.vocab": 33}
if not FULL:
    MODEL["model.layers"] = 3  # a stage of two layers and one of one
DENSE = {
    "one": {},
    "dp2": {"dp": 2},
    "zero1": {"dp": 4, "strategy.data.kind": "zero1"},
    "zero1_dp3": {"dp": 3, "strategy.data.kind": "zero1", "global_batch": 6},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "hsdp": {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "zero1_tp2": {"dp": 2, "tp": 2, "strategy.data.kind": "zero1"},
    "fsdp_tp2_pp2": {"dp": 2, "tp": 2, "pp": 2, "strategy.data.kind": "fsdp"},
    "cp2_fsdp": {"cp": 2, "dp": 2, "strategy.data.kind": "fsdp"},
    "grid": {"layout": "2d", "tp": 4},
    "grid_zero1": {"layout": "2d", "tp": 4, "dp": 2, "strategy.data.kind": "zero1"},
    "deep": {"layout": "2.5d", "tp": 8, "depth": 2},
    "cube": {"layout": "3d", "tp": 8},
}
# A model with experts, spread over ep = 1, 2 and 4, in one level and in two, split further (whole ones, or inside of
# every one), with tp, over tp, with pp.
EXPERTS = {"model.experts": 4, "model.layers": 2}
SPREAD = {
    "experts_ep1": {"dp": 2},
    "experts_ep2": {"dp": 2, "ep": 2},
    "experts_ep4": {"dp": 4, "ep": 4, "strategy.expert.group_size": 2},
    "experts_ep2_zero1": {"dp": 4, "ep": 2, "strategy.data.kind": "zero1"},
    "experts_ep4_fsdp": {"dp": 8, "ep": 4, "strategy.data.kind": "fsdp"},
    "experts_ep2_tp2": {"dp": 2, "ep": 2, "tp": 2},
    "experts_over_tp": {"tp": 2, "ep": 2, "dp": 2, "strategy.expert.tp": 1, "strategy.data.kind": "zero1"},
    "experts_over_dp_x_tp": {"tp": 2, "ep": 4, "dp": 4, "strategy.expert.tp": 1, "strategy.data.kind": "fsdp"},
    "experts_ep2_pp2": {"dp": 2, "ep": 2, "pp": 2},
    "experts_one": {},
}
# others are like them, and more, or have their parts in pairs
RARE = ("dp2", "zero1", "fsdp", "hsdp", "pp2", "interleaved", "fsdp_tp2_pp2", "grid_zero1", "deep")
RARE_SPREAD = ("experts_ep1", "experts_ep2", "experts_over_tp")
if not FULL:
    DENSE = {name: plan for name, plan in DENSE.items() if name not in RARE}
    SPREAD = {name: plan for name, plan in SPREAD.items() if name not in RARE_SPREAD}
PLANS = {**DENSE, **SPREAD}
# besides those of `sources`: from 3D to one device, 1D and 2D, and back; from whole experts to parts of every one
BETWEEN_LAYOUTS = {"cube": ("one", "tp4", "grid"), "one": ("cube",), "tp4": ("cube", "grid"), "grid": ("cube", "tp4")}
BETWEEN_LAYOUTS |= {"experts_ep4_fsdp": ("experts_ep2_zero1",), "experts_over_dp_x_tp": ("experts_ep2_tp2",)}
BETWEEN_LAYOUTS |= {"experts_ep2_tp2": ("experts_over_dp_x_tp",)}


def overrides(name):
    return {**(MODEL if name in DENSE else EXPERTS), **PLANS[name]}


def save_once(folder, changes, salt):
    plan, mesh = build(changes)
    parameters, optimizer = parts_of(plan, mesh, salt)
    extra = {"step": 5, "scaler": {"scale": 0.1, "applied_in_a_row": 2}, "rank": mesh.rank}
    checkpoints.save(folder, 5, parameters, optimizer, extra, plan, mesh)


def save_all(root, names):
    for name in names:
        save_once(root / name, overrides(name), list(PLANS).index(name))


def load_and_save(root, folder, names):
    """Under each plan load the checkpoints of others; {name: (what is wrong, extras)}."""
    out = {}
    for name in names:
        plan, mesh = build(overrides(name))
        wrong, extras = [], []
        for source in sources(name):
            parameters, optimizer = parts_of(plan, mesh, None)
            extras.append(store.load(root / source / "step_5", store.TrainingState(parameters, optimizer, plan, mesh)))
            bad = wrong_parts(parameters, optimizer, plan, mesh, list(PLANS).index(source))
            wrong += [f"{source}: {part}" for part in bad]
        checkpoints.save(folder / name, 6, parameters, optimizer, {}, plan, mesh)
        out[name] = wrong, extras
    return out


def sources(name):
    """The plans whose checkpoints plan `name` loads: two others of its model (one on eight ranks), those of
    `BETWEEN_LAYOUTS`, and, in the full matrix only, two others in any case and its own, which other tests resume
    too."""
    names = list(DENSE if name in DENSE else SPREAD)
    distances = (0, 1, 5) if FULL else (1, 5) if tiny_plan(overrides(name)).world < 8 else (1,)
    near = [names[(names.index(name) + ahead) % len(names)] for ahead in distances]
    return [*dict.fromkeys((*near, *BETWEEN_LAYOUTS.get(name, ())))]


def by_world():
    """Plans of equal world share their ranks, which is cheaper."""
    worlds = {}
    for name in PLANS:
        worlds.setdefault(tiny_plan(overrides(name)).world, []).append(name)
    return worlds


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a checkpoint of each plan, each of other numbers: <plan>/step_5."""
    root = tmp_path_factory.mktemp("saved")
    for world, names in by_world().items():
        run_ranks(world, save_all, root, names, timeout=200)
    return root


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """(folder of what was loaded and saved again as <plan>/step_6, per plan the outcome of every rank)."""
    folder = tmp_path_factory.mktemp("loaded")
    outcomes = {}
    for world, names in by_world().items():
        results = run_ranks(world, load_and_save, saved, folder, names, timeout=200)
        outcomes |= {name: [result[name] for result in results] for name in names}
    return folder, outcomes


@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_holds_every_logical_element_once(saved, name):
    plan, path = tiny_plan(overrides(name)), saved / name / "step_5"
    whole = read_whole(path)
    assert same(whole, truth(plan, salt=list(PLANS).index(name)))
    stored = sum(tensor.numel() for key, tensor in whole.items() if key.startswith("model/"))
    assert stored == plan.spec.num_parameters
    index = read_index(path)
    numbers = plan.spec.num_parameters * 12 + len(plan.spec.parameters) * 4
    headers = sum(int.from_bytes((path / file).read_bytes()[:8], "little") + 8 for file in index.files)
    assert index.num_bytes == numbers + headers  # nothing twice, nothing beside


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_loads_other_plans_checkpoints(loaded, name):
    """Bit by bit, optimizer state included; saved again under this plan, the numbers are still the other one's."""
    folder, outcomes = loaded
    for wrong, extras in outcomes[name]:
        assert wrong == []
        assert extras == [{"step": 5, "scaler": {"scale": 0.1, "applied_in_a_row": 2}, "rank": 0}] * len(sources(name))
    salt = list(PLANS).index(sources(name)[-1])
    assert same(read_whole(folder / name / "step_6"), truth(tiny_plan(overrides(name)), salt))


def owners_without_pp(layout, shape, coordinate):
    """The mistake to fear: taking pp for an axis that holds copies, so that later stages are never saved."""
    return all(coordinate.get(axis, 0) == 0 for axis in shape.mesh_dim_names if axis not in layout.axes)


def save_with_wrong_owners(folder, changes):
    store.owns = owners_without_pp
    save_once(folder, changes, 0)
    return dist.get_rank()


def test_a_save_that_forgets_a_stage_is_refused(tmp_path):
    with pytest.raises(Exception, match="not written by any rank"):
        run_ranks(2, save_with_wrong_owners, tmp_path, {**MODEL, "pp": 2})
    assert not list(tmp_path.glob("step_*"))
