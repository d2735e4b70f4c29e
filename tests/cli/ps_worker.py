"""The real worker and server, leaving notes for the tests that kill them: its pid, and how far it is."""

from __future__ import annotations

import os
from dataclasses import replace

from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.launch import worker
from parallelrun.plan.structure import Plan
from tests.cli.workers import note


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """`parallelrun.launch.worker.run`, watched."""
    note(context, "started", os.getpid())

    def heartbeat(step: int, phase: str) -> None:
        if phase in ("step", "serve"):
            note(context, "at", step)
        context.heartbeat(step, phase)

    return worker.run(config, plan, replace(context, heartbeat=heartbeat))
