"""`parallelrun reshape`: a run goes on under another plan, in the same processes, with its next sample.

Rank 0 finds the request. All ranks agree on the step after which the plan changes, as they agree on a stop; build the
model, mesh and optimizer of the new plan; and move weights and optimizer state between each other, without a disk.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint import store
from parallelrun.checkpoint.move import move
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import comm
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.records import reshapes
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.checkpointing import Checkpoints
from parallelrun.training.loop.schedules import LossScaler


@dataclass(frozen=True)
class NextPlan:
    """A plan under which the training goes on after `step`, and what it takes along beside the tensors.

    name, text: of the request, and the frozen configuration in it.
    """

    name: str
    text: str
    config: Config
    plan: Plan
    step: int
    scaler: LossScaler
    checkpoints: Checkpoints


def agree(training: Training, context: WorkerContext, wants_stop: bool) -> tuple[bool, dict[str, Any] | None]:
    """Return why all ranks end their loop: whether to stop, or the request for a plan (`reshapes.take`). Collective.

    A stop is more urgent than a request.
    """
    request = reshapes.take(context.directory) if context.rank == 0 and not wants_stop else None
    everyone = comm.gather_json({"stops": wants_stop, "request": request}, training.mesh)
    stops, request = any(answer["stops"] for answer in everyone), everyone[0]["request"]
    if stops and request is not None and context.rank == 0:
        reshapes.answer(context.directory, {"name": request["name"], "error": "the run is stopping"})
    return stops, None if stops else request


def next_plan(
    request: dict[str, Any], training: Training, context: WorkerContext, step: int, checkpoints: Checkpoints
) -> NextPlan | None:
    """Return the plan that a request asks for; None, and an answer, if it is not possible. All ranks find the same."""
    try:
        config = load_frozen(request["config"])
        plan = resolve(config)
        cause = f"the plan has {plan.world} ranks, the run {training.plan.world}"
        if plan.world == training.plan.world and not plan.servers and not training.plan.servers:
            return NextPlan(request["name"], request["config"], config, plan, step, checkpoints.scaler, checkpoints)
    except ConfigError as error:
        cause = str(error)
    if context.rank == 0:
        reshapes.answer(context.directory, {"name": request["name"], "step": step, "error": cause})
    return None


def reshaped(before: Training, change: NextPlan, context: WorkerContext) -> Training:
    """Return the training under the new plan, with the weights and the optimizer state of `before`. Collective."""
    began = time.perf_counter()
    context.heartbeat(change.step, "reshape")
    after, num_bytes = moved(before, change.config, change.plan)
    if context.rank == 0:
        degrees = {"before": before.plan.degrees, "after": change.plan.degrees}
        cost = {"seconds": time.perf_counter() - began, "moved_bytes": num_bytes}
        reshapes.answer(context.directory, {"name": change.name, "step": change.step, **degrees, **cost}, change.text)
        words = [" ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) for sizes in degrees.values()]
        print(f"step {change.step}: the plan changes from {words[0] or 'one device'} to {words[1] or 'one device'}")
    return after


def moved(before: Training, config: Config, plan: Plan) -> tuple[Training, int]:
    """Return the training of a plan with the state of `before`, and the bytes that moved between ranks. Collective."""
    parts = store.parts_of(before.state)
    after = build(config, plan, before.mesh.device)
    kinds = sorted(before.data.kept)
    num_bytes = move(parts, kinds, after.state)
    after.data.finish_update()
    after.data.after_load(kinds)
    return after, num_bytes
