"""`parallelrun verify` of a parameter server: in step against one device, otherwise against its apply log replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallelrun.comm.json_exchange import gather_json
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_MISMATCH, EXIT_OK
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan
from parallelrun.precision import TABLE
from parallelrun.records import write_json
from parallelrun.report import verify as report
from parallelrun.train.build import Training, build
from parallelrun.train.step import evaluate
from parallelrun.verify.run import checked_config, judge, reference_trace
from parallelrun.verify.trace import Trace

from . import log
from .links import Links
from .rerun import Rerun
from .worker import Worker, evaluate_alone


def checked(config: Config, plan: Plan) -> tuple[Config, Plan]:
    """What is really run: verify's precision, optimizer and number of steps; servers do the same."""
    config = checked_config(config)
    config = replace(config, steps=config.verify.steps)
    return config, replace(plan, precision=TABLE[config.precision.name], optimizer=config.optimizer.name)


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """A worker's part; worker 0 compares, writes verify.json and shows the table. Exit 4 if unequal."""
    training = build(config, plan, context.device)
    in_step = plan.equivalence.kind != "replay"
    trace = record(training, context, in_step)
    verdict: dict[str, Any] = {}
    if context.rank == 0:
        context.heartbeat(config.steps, "reference")
        if in_step:
            document = judge(trace, reference_trace(config, plan, context.device), config, plan)
        else:
            document = judge(trace, replayed(config, plan, context), config, plan)
            document["against"] = "its own apply log, replayed in one process"
            document["bit_for_bit"] = all(error == 0 for error in document["max_error"].values())
            if plan.device == "cpu" and not config.compile:  # else kernels may add in another order
                document["passed"] = document["passed"] and (document["bit_for_bit"] or document["reports_only"])
        write_json(context.directory / "verify.json", document)
        report.show(document, context.console_owner)
        verdict = {"passed": document["passed"]}
    return EXIT_OK if gather_json(verdict, training.mesh)[0]["passed"] else EXIT_MISMATCH


def record(training: Training, context: WorkerContext, in_step: bool) -> Trace:
    """Train `config.steps` steps. The trace is filled on worker 0: by step, or by update where each push is one."""
    links = Links(training.plan, training.data.parameters, training.data.frozen)
    worker, trace = Worker(training, context, links), Trace()
    trace.initial = weights(training.held)
    clock = worker.begin()
    if in_step:  # otherwise others may have pushed already: the servers' first weights are not to be had
        trace.initial = weights(training.held)
    while clock < training.config.steps:
        context.heartbeat(clock + 1, "step")
        stride = worker.step(clock + 1, False)
        clock = stride.clock
        trace.losses.append(stride.reply.loss)
        trace.grad_norms.append(stride.reply.norm)
    worker.end(clock)
    if worker.is_chief:
        trace.final = weights(training.held)
        if not in_step:
            rows = [row for row in log.read(context.directory) if isinstance(row, log.Applied) and row.server == 0]
            trace.losses, trace.grad_norms = [row.loss for row in rows], [row.norm for row in rows]
        trace.gradients = [
            {**_zeros(training.data.frozen), **links.read_gradient(version)}
            for version in range(1, len(trace.losses) + 1)
        ]
        if not in_step:
            trace.val_loss = worker.evaluate().loss
    if in_step:
        trace.val_loss = evaluate(training)
    links.leave()
    return trace


def replayed(config: Config, plan: Plan, context: WorkerContext) -> Trace:
    """What the apply log of this run gives when it is replayed."""
    rerun = Rerun(config, plan, context.device, keep_gradients=True)
    trace = Trace(initial=weights(rerun.training.held))
    rerun.run(log.read(context.directory))
    training = rerun.load_final()
    trace.losses, trace.grad_norms = rerun.losses, rerun.norms
    trace.gradients = [{**_zeros(training.data.frozen), **found} for found in rerun.gradients()]
    trace.final = weights(training.held)
    trace.val_loss = evaluate_alone(
        training, plan.num_workers, lambda number: context.heartbeat(number, "evaluate")
    ).loss
    return trace


def weights(held: list[LocalParameter]) -> dict[str, Tensor]:
    """Copies on the CPU, by name."""
    return {parameter.name: parameter.tensor.detach().to("cpu", copy=True) for parameter in held}


def _zeros(frozen: list[LocalParameter]) -> dict[str, Tensor]:
    return {parameter.name: torch.zeros_like(parameter.tensor, device="cpu") for parameter in frozen}
