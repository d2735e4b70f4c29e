"""What one rank does, by verb. The process group is up (world > 1) before, and taken down after, by the launcher."""

from __future__ import annotations

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK
from parallelrun.plan.structure import Plan


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run `config.verb` as this rank; return the exit code. Raises ParallelrunError subclasses for the user."""
    context.heartbeat(0, "build")
    if config.model.name == "matmul":
        return _lesson(config, plan, context)
    own = getattr(registry.load("strategies", f"data.{plan.data.kind}", "runtime"), "run", None)
    if own is not None:  # a way whose ranks do not all do the same has loops of its own
        return own(config, plan, context)
    if config.verb == "verify":
        from parallelrun.verify import run as verify

        return verify.run(config, plan, context)
    from parallelrun.train.build import build

    training = build(config, plan, context.device)
    if config.verb == "bench":
        from parallelrun.train import bench

        return bench.run(training, context)
    return _train(training, context)


def _train(training, context: WorkerContext) -> int:
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
    """The matmul lesson: every rank multiplies its blocks; rank 0 shows who held and sent what."""
    from parallelrun.mesh import build_mesh
    from parallelrun.models.matmul import lesson

    lesson.run(plan, build_mesh(plan, context.device), context.console_owner, config.strategy.tensor.form)
    return EXIT_OK
