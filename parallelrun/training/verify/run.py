"""`parallelrun verify`: compares a plan with its reference, by the equivalence that the plan declares."""

from __future__ import annotations

from typing import Any

import torch

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_MISMATCH, EXIT_OK
from parallelrun.base.records import write_json
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.comm import gather_json
from parallelrun.planner.contract.plan import Plan
from parallelrun.report.runs import verify as report
from parallelrun.training.loop.build import Training, build
from parallelrun.training.verify.checked import checked_config, checked_plan, single_device
from parallelrun.training.verify.measure import BOUNDS, compare
from parallelrun.training.verify.replay import record_replay
from parallelrun.training.verify.trace import RecordedDecisions, Trace, decisions_are_held, record


def plan_trace(config: Config, plan: Plan, training: Training) -> Trace:
    """Record the plan's trace. Collective; see `record`."""
    return record(training, config.verify.steps, RecordedDecisions() if decisions_are_held(config, plan) else None)


def reference_trace(config: Config, plan: Plan, device: torch.device, ours: Trace | None = None) -> Trace:
    """Record the reference in this process, without process groups: one device, or a replay of the data strategy.

    ours: the plan's trace, whose routing decisions the reference uses if `decisions_are_held`.
    """
    decisions = RecordedDecisions(ours.router_scores) if ours is not None and decisions_are_held(config, plan) else None
    if plan.equivalence.kind == "replay":
        return record_replay(config, plan, device, decisions)
    single, single_plan = single_device(config, plan)
    return record(build(single, single_plan, device), config.verify.steps, decisions)


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Train under the plan and as the reference, compare, write verify.json, show a table; return 4 if unequal."""
    config = checked_config(config)
    plan = checked_plan(config, plan)
    context.heartbeat(0, "build")
    training = build(config, plan, context.device)
    trace = plan_trace(config, plan, training)
    document: dict[str, Any] = {}
    if context.rank == 0:
        context.heartbeat(config.verify.steps, "reference")
        document = judge(trace, reference_trace(config, plan, context.device, trace), config, plan)
    return conclude(document, training, context)


def judge(trace: Trace, reference: Trace, config: Config, plan: Plan) -> dict[str, Any]:
    """Return the document of verify.json: the comparison, its bound, and the worst error of each kind."""
    tolerance = config.verify.tolerance or max(BOUNDS[config.precision.name], plan.equivalence.bound or 0.0)
    errors = compare(trace, reference, plan.equivalence.floor)
    reports_only = config.verify.optimizer == "same"
    passed = all(worst.error <= tolerance for worst in errors.values()) and not trace.disagreeing
    return {
        "schema": 1,
        "passed": passed or reports_only,
        "equivalence": plan.equivalence.kind,
        "equivalence_detail": plan.equivalence.detail,
        "against": "its own rule in one process" if plan.equivalence.kind == "replay" else "one device",
        "steps": config.verify.steps,
        "precision": config.precision.name,
        "optimizer": config.optimizer.name,
        "reports_only": reports_only,
        "tolerance": tolerance,
        "degrees": plan.degrees,
        "preset": plan.preset,
        "max_error": {kind: worst.error for kind, worst in errors.items()},
        "worst": {kind: worst.where for kind, worst in errors.items()},
        "routing_held": bool(reference.router_scores),
        "copies_that_disagree": trace.disagreeing,
        "parameters_compared": len(plan.spec.parameters),
        "losses": trace.losses,
        "reference_losses": reference.losses,
    }


def conclude(document: dict[str, Any], training: Training, context: WorkerContext) -> int:
    """Write and show rank 0's verify.json; return the exit code that follows from it, on every rank. Collective."""
    if context.rank == 0:
        write_json(context.directory / "verify.json", document)
        if context.console_owner:
            report.show(document)
    passed = gather_json({"passed": document.get("passed")}, training.mesh)[0]["passed"]
    return EXIT_OK if passed else EXIT_MISMATCH
