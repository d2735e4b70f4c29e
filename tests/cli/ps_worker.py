"""The real worker and server. They write their pid and current step to files, for the tests that kill them."""

from __future__ import annotations

import os
from dataclasses import replace

from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.launch import worker
from parallelrun.plan.structure import Plan
from tests.cli.workers import note


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run `parallelrun.launch.worker.run` and note its pid and steps."""
    note(context, "started", os.getpid())

    def heartbeat(step: int, phase: str) -> None:
        if phase in ("step", "serve"):
            note(context, "at", step)
        context.heartbeat(step, phase)

    return worker.run(config, plan, replace(context, heartbeat=heartbeat))
