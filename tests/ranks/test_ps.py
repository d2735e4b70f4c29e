"""The parameter server on real ranks: sync, async, SSP and backup workers.

Sync is proved against one device. The others are proved by their apply log, twice: by the strategy's own replay, bit
for bit, and by plain arithmetic written here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallelrun.base.errors import VerificationError
from parallelrun.data.order import Sampler
from parallelrun.planner.predict.prediction import matches_prediction
from parallelrun.strategies.data.ps import apply_log
from parallelrun.strategies.data.ps.reference import LogReplay
from parallelrun.training.loop.build import build
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.schedules import learning_rate
from parallelrun.training.verify.checked import single_device
from parallelrun.training.verify.replay import weights_of
from tests import checkpoints
from tests.matrix import FULL, TWO_STEPS
from tests.pool import RanksFailed
from tests.ranks.ps_body import document, drops, metrics, ps_config, ps_plan, run, updates
from tests.vision import RESNET

TWO_SERVERS = {"strategy.data.servers": 2}
ASYNC = {"strategy.data.consistency": "async"}
SSP = {"strategy.data.consistency": "ssp"}
BACKUP = {"strategy.data.backup_workers": 1}
EXPERTS = {"model.experts": 4, "model.router.aux_coefficient": 0.5}
BIASED = {"model.experts": 4, "model.router.kind": "top_k", "model.router.bias_rate": 0.05}
CLIPPED = {"dp": 2, "global_batch": 8, "optimizer.clip": 0.05, "model.layers": 2, **TWO_SERVERS}
BERT = {"model.name": "bert"}  # ignored targets: workers, and the ranks of one, have different numbers of valid ones
# Workers of several ranks.
TP = {**CLIPPED, **BERT, "tp": 2, "strategy.tensor.sequence_parallel": True}
TP_PP = {**CLIPPED, **BERT, "tp": 2, "pp": 2}
ZERO_BUBBLE = {**CLIPPED, "pp": 2, "microbatches": 2, "strategy.pipeline.kind": "zero_bubble"}
CP, ONE_CP, GRID = {**CLIPPED, **BERT, "cp": 2}, {**CLIPPED, "dp": 1, "cp": 2}, {**CLIPPED, "tp": 4, "layout": "2d"}
EP = {**CLIPPED, **EXPERTS, "dp": 4, "ep": 2}
EP_IN_CP, EP_OVER_CP = {**EP, "dp": 2, "cp": 2}, {**EP, "dp": 2, "cp": 2, "ep": 4}
EP_OVER_TP = {**EP, "dp": 2, "tp": 2, "strategy.expert.tp": 1}
PACKED_EXPERTS = {"dataset.pack": True, **EXPERTS, "model.seq": 16}
SGD64 = {"optimizer.name": "sgd", "precision.name": "fp64", "optimizer.schedule": "constant"}


def delays(*seconds: float) -> dict:
    return {"strategy.data.delays": list(seconds)}


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of the run's last checkpoint, unsharded, by name."""
    last = max((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    stored = checkpoints.read_whole(last).items()
    return {key.removeprefix("model/"): value for key, value in stored if key.startswith("model/")}


def by_plain_arithmetic(directory: Path, overrides: dict) -> dict[str, torch.Tensor]:
    """Replay the apply log of one server with plain tensors, plain SGD and the mean of unsharded gradients."""
    config, plan = ps_config(overrides), ps_plan(overrides)
    alone, alone_plan = single_device(config, plan)
    training = build(alone, replace(alone_plan, batch=plan.batch), torch.device("cpu"))
    split = training.dataset.train
    sampler = Sampler(len(split), plan.batch.global_batch, config.seed)
    names = [p.name for p in training.parameters]
    history = [[p.tensor.detach().clone() for p in training.parameters]]

    def gradient(push: apply_log.Push) -> list[torch.Tensor]:
        for parameter, value in zip(training.parameters, history[push.pulled]):
            parameter.tensor.data.copy_(value)
            parameter.tensor.grad = None
        batch = Reader(split, sampler, training.plan, training.mesh, push.worker).batch(push.clock)
        training.runner.train(batch, 1 / (batch.targets >= 0).sum().item())
        return clipped([p.tensor.grad for p in training.parameters]) if len(row.pushes) == 1 else [
            p.tensor.grad.clone() for p in training.parameters
        ]  # fmt: skip

    def clipped(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        return [g * min(1.0, config.optimizer.clip / (float(norm) + 1e-6)) for g in gradients]

    for row in updates(directory):
        parts = [gradient(push) for push in row.pushes]
        mean = [torch.stack(of_one).mean(0) for of_one in zip(*parts)]
        mean = clipped(mean) if len(parts) > 1 else mean
        lr = learning_rate(config.optimizer, row.clock, config.steps)
        decay = [config.optimizer.weight_decay if value.dim() >= 2 else 0.0 for value in history[-1]]
        history.append([w - lr * (g + d * w) for w, g, d in zip(history[-1], mean, decay)])
    return dict(zip(names, history[-1]))


def assert_same(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], bound: float) -> None:
    worst = {name: float((ours[name] - value).abs().max()) for name, value in reference.items()}
    assert max(worst.values()) <= bound, max(worst.items(), key=lambda item: item[1])


# sync


@pytest.mark.parametrize(
    "overrides",
    [
        {**TWO_SERVERS, "dp": 2, "micro_batch": 2},
        {**SSP, "strategy.data.staleness": 0},
        TP_PP,
        {**PACKED_EXPERTS, "dp": 2, "ep": 2, "global_batch": 8},
        {**EP, **BIASED},
        *[{}, TWO_SERVERS, {**EXPERTS, "dp": 2, "micro_batch": 2}, {**BERT, "dp": 2}, PACKED_EXPERTS] * FULL,
        *[TP, ZERO_BUBBLE, CP, ONE_CP, GRID, EP, EP_IN_CP, EP_OVER_CP, EP_OVER_TP] * FULL,
    ],
    ids=[
        "microbatches",
        "ssp 0",
        "tp, pp, ignored targets",
        "ep, packed",
        "ep, bias",
        *["one server", "two servers", "experts", "ignored targets", "packed, experts"] * FULL,
        *["tp", "zero bubble", "cp", "one", "2d", "ep", "ep in cp", "ep over cp", "ep over tp"] * FULL,
    ],
)
def test_synchronous_training_equals_one_device(tmp_path, overrides) -> None:
    run(tmp_path, {**overrides}, "verify")
    found = document(tmp_path, "verify.json")
    assert found["passed"] and found["against"] == "one device", found["max_error"]
    assert found["max_error"]["params"] <= 1e-12
    assert all(set(row.staleness) == {0} for row in updates(tmp_path))


@pytest.mark.parametrize(
    ("change", "overrides"),
    [
        ("add_instead_of_mean", {}),
        ("pull_the_shard_of_another_rank", {**TP, **TWO_STEPS}),
        ("push_norms_from_every_rank", {**TP, **TWO_STEPS}),
    ],
)
def test_verify_catches_planted_bugs(tmp_path, change, overrides) -> None:
    run(tmp_path, overrides, "verify", change)
    assert not document(tmp_path, "verify.json")["passed"]


def test_updates_that_are_counted_per_rank_are_noticed(tmp_path) -> None:
    with pytest.raises(RanksFailed, match="pushed clock 1 after 1"):
        run(tmp_path, {**ONE_CP, **ASYNC, "strategy.data.servers": 1}, "verify", "count_every_rank_as_a_worker")


@pytest.mark.parametrize(
    "overrides",
    [
        TP,
        {**CP, **ASYNC},
        {**SSP, "strategy.data.staleness": 1},
        {**TWO_SERVERS, **BACKUP, "steps": 4},  # a late worker may skip a step, and two are needed
        *[TWO_SERVERS, {**TWO_SERVERS, **ASYNC}, PACKED_EXPERTS, TP_PP, GRID, {**EP_OVER_CP, **BIASED}] * FULL,
        *[{**cell, **ASYNC} for cell in (TP_PP, ZERO_BUBBLE, EP, EP_IN_CP, EP_OVER_TP)] * FULL,
    ],
    ids=str,
)
def test_the_measured_traffic_equals_the_prediction(tmp_path, overrides) -> None:
    run(tmp_path, {"steps": 4 if FULL else 2, **overrides})
    rows = document(tmp_path, "comm.json")["rows"]
    assert {row["rank"] for row in rows} == set(range(ps_plan(overrides).world))
    assert not [row for row in rows if not matches_prediction(row)]
    assert document(tmp_path, "summary.json")["communication_as_predicted"]


# async


def test_async_applies_every_push_on_arrival_and_its_log_replays_the_run(tmp_path) -> None:
    settings = {"steps": 8, "checkpoint.last": True, **SGD64, **ASYNC}
    run(tmp_path, settings)
    rows, servers = updates(tmp_path), document(tmp_path, "servers.json")
    assert [row.version for row in rows] == list(range(1, 25))
    assert sorted((row.pushes[0].worker, row.clock) for row in rows) == [(w, c) for w in range(3) for c in range(1, 9)]
    staleness = servers["staleness_of_worker"].values()
    assert sum(sum(counts.values()) for counts in staleness) == 24 == servers["updates"]
    assert_same(final_weights(tmp_path), by_plain_arithmetic(tmp_path, settings), 1e-12)
    replay = LogReplay(ps_config(settings), ps_plan(settings), torch.device("cpu"))
    replay.run(apply_log.read_log(tmp_path))
    final, replayed = final_weights(tmp_path), weights_of(replay.load_final())
    assert all(torch.equal(value, replayed[name]) for name, value in final.items())
    complete = apply_log.read_log(tmp_path)
    with pytest.raises(VerificationError, match="update 7 of server 0 follows update 5"):
        LogReplay(ps_config(settings), ps_plan(settings), torch.device("cpu")).run(complete[:5] + complete[6:])
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert all(line["staleness"] == row.staleness[0] for line, row in zip(lines, rows))
    assert [line["worker"] for line in lines] == [row.pushes[0].worker for row in rows]
    assert lines[-1]["samples"] == 8 * 12 and "val_loss" in lines[-1]
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("optimizer", ["adagrad", *["adamw"] * FULL])
def test_one_async_worker_is_plain_sgd(tmp_path, optimizer) -> None:
    settings = {"dp": 1, "checkpoint.last": True, "steps": 4, **ASYNC, "optimizer.name": optimizer}
    run(tmp_path, settings)
    assert all(row.staleness == (0,) for row in updates(tmp_path))
    config, plan = single_device(ps_config(settings), ps_plan(settings))
    training = build(config, plan, torch.device("cpu"))
    from parallelrun.training.loop.schedules import LossScaler
    from parallelrun.training.loop.step import train_step

    scaler = LossScaler(config.precision, scaled=False)
    for step in range(1, 5):
        train_step(training, step, learning_rate(config.optimizer, step, 4), scaler)
    assert_same(final_weights(tmp_path), {p.name: p.tensor.detach() for p in training.parameters}, 1e-6)


def test_equal_workers_have_the_expected_staleness_and_a_delayed_one_has_more(tmp_path) -> None:
    equal = {"steps": 16, **ASYNC, **delays(0.04, 0.04, 0.04)}
    run(tmp_path / "equal", equal)
    assert document(tmp_path / "equal", "servers.json")["staleness_mean"] == pytest.approx(2.0, abs=0.35)
    run(tmp_path / "delayed", {**equal, **delays(0.02, 0.02, 0.1)})
    of_worker = document(tmp_path / "delayed", "servers.json")["staleness_of_worker"]
    most = {worker: max(map(int, histogram)) for worker, histogram in of_worker.items()}
    assert most["2"] > max(most["0"], most["1"])  # the mean says less: it ends alone, when the others are through


@pytest.mark.parametrize(
    "overrides",
    [
        {**RESNET, **ASYNC, **TWO_SERVERS, "dp": 2, "model.norm_samples": "local"},
        {**BACKUP, **delays(0, 0, 0.1)},
        *[{**SSP, "strategy.data.staleness": 1}] * FULL,
    ],
    ids=["async", "backup", *["ssp"] * FULL],
)
def test_verify_replays_the_apply_log_bit_for_bit(tmp_path, overrides) -> None:
    run(tmp_path, {**overrides}, "verify")
    found = document(tmp_path, "verify.json")
    assert found["passed"] and found["bit_for_bit"], found["max_error"]
    assert set(found["max_error"].values()) == {0.0}


@pytest.mark.parametrize(
    "overrides",
    [
        {**CP, **ASYNC},
        {**EP, **SSP, "strategy.data.staleness": 1},
        *[{**TP_PP, **ASYNC}, {**ZERO_BUBBLE, **SSP}, {**GRID, **ASYNC}, {**EP_IN_CP, **ASYNC}] * FULL,
        *[{**EP_OVER_TP, **ASYNC}, {**ONE_CP, **ASYNC}, {**TP, **BACKUP, "dp": 3, "global_batch": 12}] * FULL,
    ],
    ids=str,
)
def test_a_worker_of_several_ranks_is_one_worker(tmp_path, overrides) -> None:
    """Each of its pushes is one update with one version of the weights, whatever the number of its ranks."""
    run(tmp_path, overrides, "verify")
    found, plan = document(tmp_path, "verify.json"), ps_plan(overrides)
    assert found["passed"] and not found["copies_that_disagree"], found["max_error"]
    for server in range(plan.servers):
        pushes = [push for row in updates(tmp_path, server) for push in row.pushes]
        assert {push.worker for push in pushes} <= set(range(plan.num_replicas))
        assert len({(push.worker, push.clock) for push in pushes}) == len(pushes)
        if "backup_workers" not in str(overrides):
            assert len(pushes) == 3 * plan.num_replicas and plan.num_replicas < plan.num_workers
            assert max(max(row.staleness) for row in updates(tmp_path, server)) < len(pushes)


def test_verify_catches_a_worker_that_uses_other_weights_than_it_reports(tmp_path) -> None:
    run(tmp_path, {**ASYNC}, "verify", "worker_1_keeps_its_weights")
    assert not document(tmp_path, "verify.json")["passed"]


# ssp


@pytest.mark.parametrize("staleness", [1, *[3] * FULL])
def test_the_clock_gap_is_within_the_bound(tmp_path, staleness) -> None:
    settings = {"steps": 12, **SSP, "strategy.data.staleness": staleness, **delays(0, 0, 0.06)}
    run(tmp_path, settings)
    servers = document(tmp_path, "servers.json")
    assert 1 < servers["clock_gap_max"] <= staleness + 1  # without a bound the delayed worker falls back by more
    assert servers["blocked_s_of_worker"]["0"] > servers["blocked_s_of_worker"]["2"]


def test_a_single_stall_is_hidden_and_a_slow_worker_is_not(tmp_path) -> None:
    """The other workers wait only for a stall that is longer than the slack of the staleness bound."""
    settings = {"steps": 16, **SSP, "strategy.data.staleness": 12, **delays(0.02, 0.02, 0.02)}  # 12 steps: over 0.4 s
    run(tmp_path / "once", settings, change="worker_2_stalls_once")
    run(tmp_path / "always", {**settings, "strategy.data.staleness": 3}, change="worker_2_is_slow")
    once = document(tmp_path / "once", "servers.json")["blocked_s_of_worker"]
    always = document(tmp_path / "always", "servers.json")["blocked_s_of_worker"]
    assert max(once["0"], once["1"]) < 0.2  # of a stall of 0.4 s
    assert min(always["0"], always["1"]) > 0.2  # 16 steps of 45 ms more, less what the bound hides


def test_a_worker_that_ends_early_holds_nobody_back(tmp_path) -> None:
    settings = {"steps": 12, "checkpoint.last": False, **SSP, "strategy.data.staleness": 1}  # all save together
    run(tmp_path, settings, change="worker_2_ends_early")
    clocks = [(row.pushes[0].worker, row.clock) for row in updates(tmp_path)]
    assert max(clock for worker, clock in clocks if worker == 2) == 3
    assert {max(clock for worker, clock in clocks if worker == w) for w in (0, 1)} == {12}


# backup workers


def test_a_step_takes_the_first_gradients_and_drops_the_late_worker_by_name(tmp_path) -> None:
    settings = {"steps": 8, "checkpoint.last": True, **SGD64, **BACKUP, **delays(0, 0, 0.15)}
    run(tmp_path, settings)
    rows, servers = updates(tmp_path), document(tmp_path, "servers.json")
    assert [row.version for row in rows] == list(range(1, 9))
    assert all(len(row.pushes) == 2 for row in rows)
    assert rows[-1].time_s - rows[0].time_s < 7 * 0.15  # the pace of the fastest two, not of the delayed one
    assert servers["dropped_gradients"] == len(drops(tmp_path)) > 0
    assert set(servers["dropped_of_worker"]) == {"2"}
    assert_same(final_weights(tmp_path), by_plain_arithmetic(tmp_path, settings), 1e-12)


# fp16


@pytest.mark.parametrize("overrides", [TWO_SERVERS, *[ASYNC] * FULL], ids=["sync", *["async"] * FULL])
def test_in_fp16_what_overflows_is_skipped_until_the_scale_fits(tmp_path, overrides) -> None:
    run(tmp_path, {"precision.name": "fp16", "precision.loss_scale": 2.0**24, "steps": 14, **overrides})
    rows = updates(tmp_path)
    for worker in range(3):
        mine = [row.applied for row in rows if worker in {push.worker for push in row.pushes}]
        assert len(mine) == 14 and not any(mine[:3]) and sum(mine) >= 2
    assert max(row.norm for row in rows if row.applied) < 10, "unscaled"
    assert document(tmp_path, "summary.json")["state"] == "done"


# checkpoints


@pytest.mark.parametrize(
    "overrides",
    [TP_PP, {"dp": 1, "pp": 2, **RESNET, **ASYNC, "model.norm_samples": "local"}],
    ids=["sync", "async, running statistics of two stages"],
)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, overrides) -> None:
    settings = {"steps": 4, "checkpoint.every": 2, "checkpoint.keep": 5, **overrides}
    run(tmp_path / "whole", settings, change="slow_copies")
    run(tmp_path / "rest", {**settings, "resume": str(tmp_path / "whole" / "checkpoints" / "step_2")})
    whole, rest = final_weights(tmp_path / "whole"), final_weights(tmp_path / "rest")
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    assert all(value.any() for name, value in whole.items() if name.endswith("running_mean"))
    assert [line["step"] for line in metrics(tmp_path / "rest")][-1] == (4 if overrides is TP_PP else 2)


def test_a_failed_save_beside_serving_is_told_and_the_run_goes_on(tmp_path) -> None:
    run(tmp_path, {"steps": 6, "checkpoint.every": 2, "checkpoint.keep": 5, **TWO_SERVERS}, change="no_room_for_step_4")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_2", "step_6"}
    summary = document(tmp_path, "summary.json")
    assert (summary["failed_saves"], summary["failed_save_step"], summary["saves"]) == (1, 4, 2)
    assert summary["save_pause_median_s"] > 0 and summary["save_write_median_s"] > 0


def test_each_async_worker_resumes_at_its_own_clock(tmp_path) -> None:
    settings = {"steps": 6, "checkpoint.every": 3, "checkpoint.keep": 5, **ASYNC, **delays(0, 0, 0.02)}
    run(tmp_path / "whole", settings)
    run(tmp_path / "rest", {**settings, "resume": str(tmp_path / "whole" / "checkpoints" / "step_3")})
    pushed = sorted((row.pushes[0].worker, row.clock) for row in updates(tmp_path / "rest"))
    assert pushed == [(worker, clock) for worker in range(3) for clock in (4, 5, 6)]


def test_checkpoints_go_from_servers_to_one_device_and_back(tmp_path) -> None:
    from parallelrun.checkpoint import store
    from parallelrun.training.loop.schedules import LossScaler
    from parallelrun.training.loop.step import train_step

    settings = {"steps": 2, "checkpoint.last": True, **TWO_SERVERS}
    run(tmp_path / "servers", settings)
    config, plan = single_device(ps_config({**settings, "steps": 4}), ps_plan(settings))
    training = build(config, plan, torch.device("cpu"))
    path = tmp_path / "servers" / "checkpoints" / "step_2"
    extra = store.load(path, training.state)
    saved = final_weights(tmp_path / "servers")
    assert all(torch.equal(p.tensor, saved[p.name]) for p in training.held)
    assert training.optimizer.state(training.parameters[0].name)["exp_avg"].abs().sum() > 0
    scaler = LossScaler(config.precision, scaled=False)
    for step in (3, 4):
        train_step(training, step, learning_rate(config.optimizer, step, 4), scaler)
    aside = tmp_path / "alone" / "checkpoints"
    checkpoints.save(aside, 2, training.held, training.optimizer, {**extra, "step": 2}, plan, training.mesh)
    run(tmp_path / "back", {**settings, "steps": 3, "resume": str(aside / "step_2"), "dp": 1, "tp": 2})
    run(tmp_path / "straight", {**settings, "steps": 4, "resume": str(path)})
    straight = final_weights(tmp_path / "straight")
    assert_same({p.name: p.tensor.detach() for p in training.parameters}, straight, 2e-6)
    assert updates(tmp_path / "back")[0].clock == 3
