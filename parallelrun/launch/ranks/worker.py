"""The worker of one rank, by verb. The launcher creates the process group (world > 1) before and destroys it after."""

from __future__ import annotations

from parallelrun.base import registry
from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_OK
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model import definitions
from parallelrun.training.loop.build import Training, build, whole_network
from parallelrun.training.loop.data_runtime import data_runtime


def prepare(config: Config, plan: Plan) -> Network | None:
    """Return the unsharded network on meta, built once before the ranks are forked. Each rank keeps its own stages.

    None if they do not use it, or if it is the user's code, which might do more than build.
    """
    if config.verb == "verify" or definitions.model(config).is_lesson or config.model.source:
        return None
    return whole_network(config, plan)


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run `config.verb` as this rank. Return the exit code. Raises ParallelrunError with a message for the user."""
    context.heartbeat(0, "build")
    if definitions.model(config).is_lesson:
        network = registry.load("models", config.model.name, "network")
        network.run(config, plan, context.device, context.console_owner)
        return EXIT_OK
    code = data_runtime(plan).run_rank(config, plan, context)
    if code is not None:  # a data strategy with loops of its own
        return code
    if config.verb == "verify":
        from parallelrun.training.verify import run as verify

        return verify.run(config, plan, context)
    training = build(config, plan, context.device, context.prepared)
    if config.verb == "bench":
        from parallelrun.training.loop import bench

        return bench.run(training, context)
    return _train(training, context)


def _train(training: Training, context: WorkerContext) -> int:
    from parallelrun.report.runs import final_panel as report
    from parallelrun.training.loop.training_loop import train
    from parallelrun.training.metrics.recorder import Recorder

    try:
        code = train(training, context, Recorder(training, context))
    finally:
        training.close()
    if context.console_owner:
        report.show(context.directory)
    return code
