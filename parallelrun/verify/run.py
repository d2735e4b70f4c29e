"""`parallelrun verify`: the same training as on one device, proved by the plan's declared equivalence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from parallelrun.comm.json_exchange import gather_json
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_MISMATCH, EXIT_OK
from parallelrun.plan.structure import Plan
from parallelrun.precision import TABLE
from parallelrun.records import write_json
from parallelrun.report import verify as report
from parallelrun.train.build import Training, build
from parallelrun.verify.decisions import RecordedDecisions, are_held
from parallelrun.verify.measure import BOUNDS, compare
from parallelrun.verify.replay import record_replay
from parallelrun.verify.single_device import single_device as single_device
from parallelrun.verify.trace import Trace, record


def checked_config(config: Config) -> Config:
    """The config that is really compared: verify's precision, and SGD without momentum unless `same` is asked for.

    Its learning rate is large, so that in fp32 too the updates stand above the rounding of the weights.
    """
    optimizer = config.optimizer
    if config.verify.optimizer != "same":
        optimizer = replace(optimizer, name="sgd", lr=1.0, momentum=0.0, schedule="constant", warmup=0)
    precision = replace(config.precision, name=config.verify.precision)
    return replace(config, optimizer=optimizer, precision=precision, resume=None)


def checked_plan(config: Config, plan: Plan) -> Plan:
    """The plan of the checked config; everything that is rare happens within the checked steps."""
    data = plan.data.checked(config.verify.steps)
    plan = replace(plan, precision=TABLE[config.precision.name], optimizer=config.optimizer.name, data=data)
    promised = plan.data.equivalence(plan)
    return replace(plan, equivalence=promised) if promised.kind == plan.equivalence.kind else plan


def plan_trace(config: Config, plan: Plan, training: Training) -> Trace:
    """Run the plan. Collective; see `record`."""
    return record(training, config.verify.steps, RecordedDecisions() if are_held(config, plan) else None)


def reference_trace(config: Config, plan: Plan, device: torch.device, ours: Trace | None = None) -> Trace:
    """Run the reference in this process, outside every process group: one device, or the way's own algorithm.

    ours: the plan's trace, of which the reference takes the routing decisions where they are held (`are_held`).
    """
    decisions = RecordedDecisions(ours.router_scores) if ours is not None and are_held(config, plan) else None
    if plan.equivalence.kind == "replay":
        return record_replay(config, plan, device, decisions)
    alone, alone_plan = single_device(config, plan)
    return record(build(alone, alone_plan, device), config.verify.steps, decisions)


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Train under the plan and on one device, compare, write verify.json, show the table; exit 4 if unequal."""
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
    """verify.json: what was compared, by which bound, and the worst of each kind. A pure function of the traces."""
    tolerance = config.verify.tolerance or max(BOUNDS[config.precision.name], plan.equivalence.bound or 0.0)
    errors = compare(trace, reference)
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
    """Write and show rank 0's verify.json; return its verdict as the exit code of every rank. Collective."""
    if context.rank == 0:
        write_json(context.directory / "verify.json", document)
        report.show(document, context.console_owner)
    passed = gather_json({"passed": document.get("passed")}, training.mesh)[0]["passed"]
    return EXIT_OK if passed else EXIT_MISMATCH
