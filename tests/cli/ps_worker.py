"""The real worker and server. They write their pid and current step to files, for the tests that kill them."""

from __future__ import annotations

import os
from dataclasses import replace

from parallelrun.base.context import WorkerContext
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.ranks import worker
from parallelrun.planner.contract.plan import Plan
from tests.cli.workers import note


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run `parallelrun.launch.ranks.worker.run` and note its pid and steps."""
    note(context, "started", os.getpid())

    def heartbeat(step: int, phase: str) -> None:
        if phase in ("step", "serve"):
            note(context, "at", step)
        context.heartbeat(step, phase)

    return worker.run(config, plan, replace(context, heartbeat=heartbeat))
