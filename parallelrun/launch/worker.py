"""The worker of one rank, by verb. The launcher creates the process group (world > 1) before and destroys it after."""

from __future__ import annotations

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK
from parallelrun.plan.structure import Plan
from parallelrun.train.build import Training, build


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run `config.verb` as this rank. Return the exit code. Raises ParallelrunError with a message for the user."""
    context.heartbeat(0, "build")
    if plan.spec.is_lesson:
        return _lesson(config, plan, context)
    own_run = getattr(registry.load("strategies", f"data.{plan.data.kind}", "runtime"), "run", None)
    if own_run is not None:  # a data strategy whose ranks have different roles, with loops of its own
        return int(own_run(config, plan, context))
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

    try:
        code = train(training, context, Recorder(training, context))
    finally:
        training.data.end_run()
        training.close()
    if context.console_owner:
        report.show(context.directory)
    return code


def _lesson(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run the model's lesson: every rank computes its blocks, and rank 0 prints what each rank held and sent."""
    from parallelrun.mesh import build_mesh

    lesson = registry.load("models", config.model.name, "lesson")
    lesson.run(plan, build_mesh(plan, context.device), context.console_owner, config.strategy.tensor.form)
    return EXIT_OK
