"""ps at run time: workers compute gradients on whole weights, which servers own. Both have loops of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import Plan
from parallelrun.records import write_json
from parallelrun.report import run as report
from parallelrun.report.bench import show as show_bench
from parallelrun.train import bench
from parallelrun.train.build import Training, build
from parallelrun.train.recorder import peak_bytes

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
    if config.verb == "bench":
        steps = config.bench.warmup + config.bench.steps
        config = replace(config, steps=steps, eval=replace(config.eval, every=0))
    if plan.role(context.rank) == "server":
        return host.serve(config, plan, context)
    if config.verb == "verify":
        return verify.run(config, plan, context)
    training = build(config, plan, context.device)
    if config.verb == "bench":
        return _bench(training, context)
    code = loop.train(training, context)
    if context.console_owner:
        report.show(context.directory)
    return code


def _bench(training: Training, context: WorkerContext) -> int:
    """Time the steps of worker 0, as `train.bench` does; where workers are not in step each has a pace of its own."""
    times: list[float] = []
    code = loop.train(training, context, times)
    if context.rank == 0:
        document = bench.summarise(times[training.config.bench.warmup :], training)
        document["peak_memory_bytes"] = peak_bytes(context.device)
        write_json(context.directory / "bench.json", document)
        show_bench(document, context.console_owner)
    return code
