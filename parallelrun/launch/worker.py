"""The worker of one rank, by verb. The launcher creates the process group (world > 1) before and destroys it after."""

from __future__ import annotations

from parallelrun import definitions, registry
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK
from parallelrun.plan.structure import Plan
from parallelrun.train.build import Training, build
from parallelrun.train.data_runtime import data_runtime


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
        from parallelrun.verify import run as verify

        return verify.run(config, plan, context)
    training = build(config, plan, context.device)
    if config.verb == "bench":
        from parallelrun.train import bench

        return bench.run(training, context)
    return _train(training, context)


def _train(training: Training, context: WorkerContext) -> int:
    from parallelrun.report import run as report
    from parallelrun.train.loop import train
    from parallelrun.train.recorder import Recorder
    from parallelrun.train.reshape import reshaped

    before = None
    while True:
        try:
            outcome = train(training, context, Recorder(training, context), before)
            after = training if isinstance(outcome, int) else reshaped(training, outcome, context)
        finally:
            training.data.end_run()
            training.close()
        if isinstance(outcome, int):
            break
        training, before = after, outcome
    if context.console_owner:
        report.show(context.directory)
    return outcome
