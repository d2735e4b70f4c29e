"""Compressed gradients on real ranks: each way equals its own rule, nothing is lost, and models still learn."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallelrun.config.schema.run_schema import PrecisionConfig
from parallelrun.distributed import comm
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.common.compression import half_precision, powersgd
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.plans import tiny_config
from tests.pool import run_ranks
from tests.ranks import horovod_body as body


def compressed(compression: str, kind: str = "ddp", rank: int | None = None, **more: Any) -> dict[str, Any]:
    strategy = {"strategy.data.kind": kind, "strategy.data.compression": compression}
    return {"dp": 2, **strategy, **({"strategy.data.powersgd_rank": rank} if rank else {}), **more}


EXPERTS = {"ep": 2, "model.layers": 2, "model.experts": 4, "model.expert_period": 2}
EXACTLY = {"verify.tolerance": 1e-10}  # between two ranks the order of a sum is no matter
CELLS: dict[str, dict[str, Any]] = {
    "fp16, ddp": compressed("fp16", **EXACTLY),
    "fp16, ring": compressed("fp16", "ring", microbatches=2, **EXACTLY),
    "bf16, horovod": compressed("bf16", "horovod", **EXACTLY, **{"strategy.data.bucket_mb": 0.005}),
    "fp16, four ranks in an order of gloo's, experts of two copies": {**compressed("fp16", **EXPERTS), "dp": 4},
    "powersgd, ddp": compressed("powersgd", rank=2, microbatches=2),
    "powersgd, ring of 3": {**compressed("powersgd", "ring", 1), "dp": 3, "global_batch": 12},
    "powersgd, many buckets, experts of two copies": {
        **compressed("powersgd", "horovod", 2, **EXPERTS, **{"strategy.data.bucket_mb": 0.02, "verify.steps": 2}),
        "dp": 4,
    },
    "fp16, experts without copies over cp": compressed("fp16", cp=2, **{**EXPERTS, "ep": 4}),
    "powersgd, norms summed over the sequence": compressed(
        "powersgd", rank=2, tp=2, **{"strategy.tensor.sequence_parallel": True}
    ),
    "powersgd, a tied weight in two stages": compressed("powersgd", "horovod", 2, pp=2),
    "fp16 over cp": compressed("fp16", cp=2, **EXACTLY),
    "powersgd over cp": compressed("powersgd", rank=2, cp=2, microbatches=2),
    "fp16, groups of two in a ring": {
        **compressed("fp16", "ring"),
        "strategy.data.algorithm": "hierarchical",
        "dp": 4,
    },
    "powersgd of one replica over cp": {**compressed("powersgd", rank=2, cp=2), "dp": 1},
    "powersgd in a 2d layout": compressed("powersgd", rank=2, tp=2, layout="2d", grid="2x1"),
}
if FULL:
    CELLS["powersgd in a tensor plan"] = compressed("powersgd", rank=2, tp=2)
    CELLS["powersgd in a 2d layout of four"] = compressed("powersgd", rank=2, tp=4, layout="2d")
    CELLS["fp16, groups of two in a ring, over cp"] = {**CELLS["fp16, groups of two in a ring"], "cp": 2}


@pytest.mark.parametrize("cell", shared(CELLS))
def test_a_compressed_plan_equals_its_rule_and_sends_what_it_says(cell):
    assert_equal(parity(CELLS[cell]))


def error_forgotten(training: Training) -> None:
    right = powersgd.Stack.finish

    def wrong(self: powersgd.Stack, loss_scale: float) -> None:
        right(self, loss_scale)
        self.error.zero_()

    powersgd.Stack.finish = wrong


def cold_start(training: Training) -> None:
    right = powersgd.Stack.finish

    def wrong(self: powersgd.Stack, loss_scale: float) -> None:
        right(self, loss_scale)
        self.right = self.first

    powersgd.Stack.finish = wrong


def context_summed_last(training: Training) -> None:
    """Each rank of a sequence rounds its own gradients, and the rounded sums are added."""
    dp, cp = training.mesh.group("dp"), training.mesh.group("cp")

    def send(buffer: torch.Tensor) -> SimpleNamespace:
        start_sum = partial(training.data.start_sum, group=dp)
        rounded = half_precision.HalfSum(buffer, start_sum, torch.float16).start()
        rounded.wait()
        comm.all_reduce(buffer, cp, "gradients")
        return SimpleNamespace(wait=lambda: None)

    for bucket in training.data._buckets:
        bucket._send = partial(send, bucket.buffer)


def experts_summed_over_dp(training: Training) -> None:
    """Rounded gradients of experts are added to those of other experts."""
    buffers = training.data.flat_gradients["expert_dp"]
    for bucket in training.data._buckets:
        if any(bucket.buffer is buffer for buffer in buffers):
            start_sum = partial(training.data.start_sum, group=training.mesh.group("dp"))
            bucket._send = half_precision.HalfSum(bucket.buffer, start_sum, torch.float16).start


def not_rounded(training: Training) -> None:
    for bucket in training.data._buckets:
        bucket._send = lambda buffer=bucket.buffer: training.data.start_sum(buffer, training.mesh.group("dp"))


BUGS = {
    "the error is forgotten": (CELLS["powersgd, ddp"], error_forgotten),
    "every step begins anew": (CELLS["powersgd, ddp"], cold_start),
    "experts are summed over dp": (
        CELLS["fp16, four ranks in an order of gloo's, experts of two copies"],
        experts_summed_over_dp,
    ),
    "cp is summed last": (CELLS["fp16 over cp"], context_summed_last),
    "nothing is rounded": (CELLS["fp16, ddp"], not_rounded),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug):
    overrides, fault = BUGS[bug]
    assert not parity(overrides, fault=fault)["passed"]


@pytest.mark.parametrize("rank", [1, 3])
def test_what_was_sent_and_what_remains_are_all_gradients(rank):
    """Error feedback: over any number of steps, sum(sent) + sum(errors) = sum(gradients)."""
    results = run_ranks(3, body.feedback, 4, rank)
    for number, sent in enumerate(results[0][1]):
        gradients = sum(given[number] for given, *_ in results)
        errors = sum(result[2][number].view_as(sent) for result in results)
        torch.testing.assert_close(sent + errors, gradients, rtol=1e-10, atol=1e-11)
        assert errors.norm() > 0.1 * gradients.norm(), "something is left out, or the test shows nothing"
    for number in range(len(results[0][3])):
        assert all(torch.equal(result[3][number], results[0][3][number]) for result in results)


def losses_of(is_scaled: bool, skipped: int = 0) -> list[float]:
    """Body of a rank: the losses of four steps of PowerSGD. is_scaled: under a loss scale that changes after each;
    skipped: a step that is first computed with a gradient that is not finite."""
    config = tiny_config({**compressed("powersgd", rank=2), "precision.name": "fp64", "sdc.every": 1})
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(PrecisionConfig(loss_scale=8.0, scale_window=1), scaled=is_scaled)

    def overflow(training: Training) -> None:
        training.parameters[0].tensor.grad.fill_(torch.inf)

    losses = []
    for step in range(1, 5):
        if step == skipped:
            scaler.update(train_step(training, step, 0.05, scaler, observe=overflow).applied)
        result = train_step(training, step, 0.05, scaler)
        scaler.update(result.applied)
        losses.append(result.loss)
    return losses


def test_errors_are_kept_without_the_loss_scale_and_without_steps_that_were_skipped() -> None:
    usual = run_ranks(2, losses_of, False)
    assert run_ranks(2, losses_of, True) == usual == run_ranks(2, losses_of, True, 3)
