"""Exact resume of real trainings: on the same plan bit by bit, on another plan the same numbers."""

from __future__ import annotations

import pytest
import torch

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_PREEMPTED, CheckpointError
from parallelrun.config.schema.run_schema import PrecisionConfig
from parallelrun.planner.predict.prediction import checkpoint_bytes
from parallelrun.training.loop import checkpointing
from parallelrun.training.loop import training_loop as loop
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from parallelrun.training.metrics.recorder import Recorder
from tests.checkpoints import read_whole, same
from tests.matrix import FULL, shared
from tests.plans import tiny_config, tiny_plan
from tests.vision import RESNET

STEPS, SAVED = 4, 3
BASE = {"model.layers": 2, "model.vocab": 33, "dataset.vocab": 33, "dropout": 0.1, "steps": STEPS}
ONE = {}
ZERO1 = {"dp": 2, "strategy.data.kind": "zero1"}
ROUNDED = {**ZERO1, "precision.name": "bf16"}  # weights are rounded in the modules, but saved as they are stored
MUON = {"optimizer.name": "muon", "optimizer.momentum": 0.9, "optimizer.eps": 1e-2}
ZERO2 = {"dp": 2, "strategy.data.kind": "zero2", "microbatches": 2}
LOCAL_SGD = {"dp": 2, "tp": 2, "strategy.data.kind": "local_sgd", "strategy.data.sync_every": 2}  # 3: between two syncs
DILOCO = {"dp": 2, "pp": 2, "strategy.data.kind": "diloco", "strategy.data.sync_every": 2}
FSDP = {"dp": 2, "tp": 2, "strategy.data.kind": "fsdp"}
PIPELINE = {"pp": 2, "tp": 2}
EXPERTS = {"model.experts": 6, "model.expert_period": 2, "model.router.bias_rate": 0.05, "model.router.jitter": 0.01}
# three experts a rank for two copies, so that each is split inside
SPREAD = {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "fsdp"}
# errors of four senders, of experts of two
POWERSGD = {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.compression": "powersgd", "strategy.data.powersgd_rank": 2}
# two replicas, each of two ranks with different experts
REPLICAS = {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "local_sgd", "strategy.data.sync_every": 2}
CONTEXT = {"cp": 2, **({"dp": 2, "strategy.data.kind": "fsdp"} if FULL else {})}
ULYSSES = {"cp": 2, "tp": 2 if FULL else 1, "strategy.context.kind": "ulysses"}
IMAGES = {**RESNET, "dp": 2, "dropout": 0.0}  # running statistics change without a gradient


def train(folder, overrides, resume, last=STEPS):
    """Train to step `last` from the start or from `resume`, saving after it and after step 3; the losses by step."""
    changes = {**BASE, "steps": last, **overrides, "resume": str(resume) if resume else None}
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    scaler = LossScaler(PrecisionConfig(), scaled=False)
    start = checkpointing.load(training, scaler).get("step", 0)
    losses = {}
    for step in range(start + 1, last + 1):
        losses[step] = train_step(training, step, 0.01, scaler).loss
        if step in (SAVED, last):
            checkpointing.save(training, scaler, step, folder)
    return losses


def world(overrides):
    return tiny_plan({**BASE, **overrides}).world


RESUMED = {
    "zero1_fp8_offload": {**ROUNDED, "precision.name": "fp8", "optimizer.offload": True}, "zero2": ZERO2,
    "fsdp_tp2_muon_offload": {**FSDP, **MUON, "optimizer.offload": True}, "tp2_pp2": PIPELINE,
    "zero1_tp2_rounded_at_random": {**ROUNDED, "tp": 2, "optimizer.rounding": "stochastic"},
    "local_sgd_ep2": REPLICAS, "powersgd_ep2": POWERSGD, "diloco_pp2": DILOCO, "batch_norm": IMAGES, "experts": SPREAD,
}  # fmt: skip  # other tests of this file resume "one" and context parallelism, packed
if not FULL:  # their parts are in the others, and in the other tests of this file
    del RESUMED["zero2"], RESUMED["tp2_pp2"], RESUMED["experts"], RESUMED["local_sgd_ep2"]


@pytest.mark.parametrize("plan", shared(RESUMED.values()), ids=RESUMED)
def test_a_run_cut_in_two_ends_bit_by_bit_where_the_whole_one_does(plan, tmp_path, run_ranks):
    whole = run_ranks(world(plan), train, tmp_path / "whole", plan, None)[0]
    half = tmp_path / "whole" / "checkpoints" / f"step_{SAVED}"
    rest = run_ranks(world(plan), train, tmp_path / "rest", plan, half)[0]
    assert rest == {step: loss for step, loss in whole.items() if step > SAVED}
    ends = [read_whole(tmp_path / name / "checkpoints" / f"step_{STEPS}") for name in ("whole", "rest")]
    sizes = [tensor.nbytes for tensor in ends[0].values() if tensor.dim()]  # without the counts of steps
    assert sum(sizes) == checkpoint_bytes(tiny_plan({**BASE, **plan}))
    assert same(*ends) and any(key.startswith("optimizer/exp_avg/") for key in ends[0])


def stop_at_once(folder, changes):
    """The loop of a run that is asked to stop before its first step; (exit code, steps that it has saved)."""
    changes = {**BASE, "checkpoint.last": False, "optimizer.schedule": "constant", **changes}
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    context = WorkerContext(
        0, 1, 0, torch.device("cpu"), folder, lambda *_: None, lambda: True, lambda step: None, console_owner=False
    )
    code = loop.train(training, context, Recorder(training, context))
    return code, sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_stop_in_the_first_step_is_saved_also_after_a_resume(tmp_path, run_ranks):
    """And what it saves is the step of the uninterrupted run."""
    run_ranks(1, train, tmp_path / "whole", {**ONE, "steps": SAVED + 1}, None)
    source = tmp_path / "whole" / "checkpoints" / f"step_{SAVED}"
    for name, resume, saved in (("fresh", None, 1), ("resumed", str(source), SAVED + 1)):
        folder = tmp_path / name
        folder.mkdir()
        assert run_ranks(1, stop_at_once, folder, {"resume": resume})[0] == (EXIT_PREEMPTED, [f"step_{saved}"])
    losses = run_ranks(1, train, tmp_path / "whole", ONE, None, STEPS + 1)[0]
    stopped = tmp_path / "resumed" / "checkpoints" / f"step_{STEPS}"
    assert run_ranks(1, train, tmp_path / "rest", ONE, stopped, STEPS + 1)[0] == {STEPS + 1: losses[STEPS + 1]}


@pytest.mark.parametrize(
    "model, first, others",
    [
        ({}, ONE, (PIPELINE, ZERO1, FSDP)),
        (MUON, ZERO1, (PIPELINE, FSDP) if FULL else (FSDP,)),
        *([({"optimizer.name": "adagrad", "optimizer.eps": 1e-2}, ZERO1, (PIPELINE, FSDP))] * FULL),
        ({"dataset.pack": True, "model.seq": 16}, CONTEXT, (ONE, ULYSSES)),
        ({**RESNET, "dropout": 0.0}, {"tp": 2}, ({"tp": 4}, ZERO1) if FULL else ({"tp": 4},)),
        (EXPERTS, {"dp": 2, "ep": 2}, ({**ZERO2, "dp": 4, "ep": 2, "microbatches": 1}, SPREAD, ONE)),
    ],
    ids=["dense", "muon", *["adagrad"] * FULL, "packed, cp", "channels", "experts"],
)
def test_going_on_under_another_plan_gives_the_same_losses(model, first, others, tmp_path, run_ranks):
    """fp64, so that only a wrong weight, state, sample or dropout mask could make a difference."""
    exact = {"precision.name": "fp64", "optimizer.name": "sgd", "optimizer.momentum": 0.9, **model}
    whole = run_ranks(world({**exact, **first}), train, tmp_path / "one", {**exact, **first}, None)[0]
    source = tmp_path / "one" / "checkpoints" / f"step_{SAVED}"
    for number, plan in enumerate(others):
        folder = tmp_path / str(number)
        rest = run_ranks(world({**exact, **plan}), train, folder, {**exact, **plan}, source)[0]
        assert list(rest) == [4]
        assert all(abs(loss - whole[step]) <= 1e-10 * whole[step] for step, loss in rest.items()), (plan, rest, whole)
        loaded = read_whole(folder / "checkpoints" / f"step_{STEPS}")
        wanted = read_whole(tmp_path / "one" / "checkpoints" / f"step_{STEPS}")
        assert all(torch.allclose(loaded[key], wanted[key], rtol=1e-9, atol=1e-11) for key in wanted)


@pytest.mark.parametrize("plan", [DILOCO, *[LOCAL_SGD] * FULL], ids=["diloco", *["local_sgd"] * FULL])
def test_between_two_synchronisations_other_plans_load_the_mean_of_the_replicas(plan, tmp_path, run_ranks):
    """And what each replica holds, its optimizer's state with it, lies beside the mean."""
    run_ranks(world(plan), train, tmp_path / "apart", plan, None)
    saved = read_whole(tmp_path / "apart" / "checkpoints" / f"step_{SAVED}")
    plain = [key for key in saved if key.startswith(("model/", "optimizer/"))]
    assert len(plain) > 20
    for key in plain:
        own = [saved[f"replica/{replica}of2/{key}"] for replica in range(2)]
        assert torch.allclose(saved[key], (own[0] + own[1]) / 2, rtol=1e-6, atol=1e-9), key
    assert any(not torch.equal(saved[f"replica/0of2/{key}"], saved[f"replica/1of2/{key}"]) for key in plain)
    source = tmp_path / "apart" / "checkpoints" / f"step_{SAVED}"
    for number, other in enumerate((ONE, {**plan, "dp": 1, "tp": 1, "pp": 1}, {**LOCAL_SGD, "dp": 4, "tp": 1})):
        rest = run_ranks(world(other), train, tmp_path / str(number), other, source)[0]
        assert list(rest) == [4] and max(rest.values()) < 4.0


def test_diloco_goes_on_from_the_checkpoint_of_another_way(tmp_path, run_ranks):
    """Its outer state begins with the loaded weights: at outer rate 1/2 a round ends half way to the mean."""
    exact = {"precision.name": "fp64", "optimizer.name": "sgd", "dp": 2, "strategy.data.sync_every": STEPS}
    half_way = {"outer_lr": 0.5, "outer_momentum": 0.0, "outer_nesterov": False}
    run_ranks(2, train, tmp_path / "ddp", {**exact, "strategy.data.kind": "ddp"}, None)
    source = tmp_path / "ddp" / "checkpoints" / f"step_{SAVED}"
    ends = []
    for kind, outer in (("local_sgd", {}), ("diloco", half_way)):
        outer = {f"strategy.data.{key}": value for key, value in outer.items()}
        run_ranks(2, train, tmp_path / kind, {**exact, "strategy.data.kind": kind, **outer}, source)
        ends.append(read_whole(tmp_path / kind / "checkpoints" / f"step_{STEPS}"))
    averaged, moved = ends
    for key, begun in read_whole(source).items():
        assert torch.allclose(moved[key], (begun + averaged[key]) / 2, rtol=1e-9, atol=1e-12), key


def scale_that_goes_on(folder):
    """Save with a loss scale of fp16 that has changed; the state that a resumed run begins with."""
    training = build(tiny_config(BASE), tiny_plan(BASE), torch.device("cpu"))
    scaler = LossScaler(PrecisionConfig(loss_scale=64.0), scaled=True)
    for applied in (False, True, True):
        scaler.update(applied)
    checkpointing.save(training, scaler, 2, folder)
    resumed = {**BASE, "resume": str(folder / "checkpoints" / "step_2")}
    training = build(tiny_config(resumed), tiny_plan(resumed), torch.device("cpu"))
    after = LossScaler(PrecisionConfig(), scaled=True)
    checkpointing.load(training, after)
    return scaler.state(), after.state()


def test_the_loss_scale_goes_on(tmp_path, run_ranks):
    ((before, after),) = run_ranks(1, scale_that_goes_on, tmp_path)
    assert before == after == {"scale": 32.0, "applied_in_a_row": 2}


def load_other_data(folder, changes):
    """Load a checkpoint in a rank whose data have changed since the launcher compared them."""
    training = build(tiny_config(BASE), tiny_plan(BASE), torch.device("cpu"))
    checkpointing.save(training, LossScaler(PrecisionConfig(), scaled=False), 2, folder)
    changes = {**BASE, **changes, "resume": str(folder / "checkpoints" / "step_2")}
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    try:
        return checkpointing.load(training, LossScaler(PrecisionConfig(), scaled=False))["step"]
    except CheckpointError as error:
        return error.exit_code, error.problems[0].where


@pytest.mark.parametrize(
    "changes, ended",
    [({}, 2), ({"seed": 99}, (3, "seed")), ({"seed": 99, "checkpoint.change_data": True}, 2), ({"steps": 99}, 2)],
)
def test_a_rank_refuses_other_data_with_a_code_that_blames_no_checkpoint(tmp_path, run_ranks, changes, ended):
    """After exit code 4 a restart would set the checkpoint aside."""
    assert run_ranks(1, load_other_data, tmp_path, changes) == [ended]
