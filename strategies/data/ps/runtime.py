"""ps at run time: workers compute gradients on whole weights, which servers own. Both have loops of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelrun.config.schema import Config
from parallelrun.launch.context import WorkerContext
from parallelrun.mesh.runtime import Mesh
from parallelrun.plan.structure import Plan
from parallelrun.report import run as report
from parallelrun.train.build import build

from ..local import LocalRuntime, match
from . import host, loop, verify


def shard(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Nothing: a worker computes with whole weights."""


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """A worker's gradients stay its own until they are pushed."""
    return LocalRuntime(match(parts, plan, mesh))


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """`config.verb` as this rank, worker or server; the exit code. The door of ways with loops of their own."""
    if config.verb == "verify":
        config, plan = verify.checked(config, plan)
    if plan.role(context.rank) == "server":
        return host.serve(config, plan, context)
    if config.verb == "verify":
        return verify.run(config, plan, context)
    code = loop.train(build(config, plan, context.device), context)
    if context.console_owner:
        report.show(context.directory)
    return code
