"""`restarts=N` under our own launcher: a run that fails goes on from its last checkpoint, in the same directory.

Every attempt is one supervision (`supervisor.supervise`): all ranks of the failed one are killed, and new ones are
forked from this process, which has imported torch already. `restart_policy` decides; `attempts.json` records.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from parallelrun.base.errors import EXIT_OK
from parallelrun.base.records import write_json, write_text
from parallelrun.base.wording import counted, print_note
from parallelrun.checkpoint.find import STEP, complete_steps, latest
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.failures import failure, restart_policy
from parallelrun.launch.failures.outcome import Outcome
from parallelrun.launch.failures.restart_policy import Decision
from parallelrun.launch.host.job import Job
from parallelrun.launch.ranks import supervisor
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve import elastic
from parallelrun.planner.resolve.freeze import freeze
from parallelrun.report.records import attempts
from parallelrun.report.records.attempts import Attempt
from parallelrun.report.records.read import METRICS
from parallelrun.report.records.rows import last_row

_INSTEAD = {
    "srun": "Slurm queues the job again after preemption or the loss of a node (parallelrun slurm ... prints it)",
}
DAMAGED = "damaged_"  # before the name of a checkpoint that could not be loaded


def notes(config: Config, only_once: str = "") -> list[str]:
    """Return what the user should know about restarts before the run begins.

    only_once: the launcher that has started the ranks, if it does not start them again.
    """
    limit = config.restarts
    if limit and only_once:
        others = _INSTEAD.get(only_once, "torchrun --max-restarts N starts ranks of several hosts again")
        return [f"restarts={limit} is for our own launcher on one host: {others}; resume=auto goes on in a new job"]
    if not limit or config.checkpoint.every:
        return []
    return [f"restarts={limit} without checkpoint.every: after a failure the run begins again with its first step"]


def supervise(job: Job, requested: Config, signals: list[int]) -> Outcome:
    """Run the job's ranks to their end, again after failures. None of their processes outlives this call.

    requested: the user's configuration, from which an elastic run resolves a smaller plan. signals: those that have
    arrived; the caller adds those that arrive between attempts. The outcome is that of the last attempt.
    """
    history = [attempt_of(job, 1)]
    while True:
        attempts.write(job.directory, history)
        outcome = supervisor.supervise(job, signals)
        history[-1] = ended(attempts.read(job.directory) or history, outcome, job.directory)
        attempts.write(job.directory, history)
        if outcome.exit_code == EXIT_OK or signals:
            return outcome
        decision = restart_policy.decide(history, job.config.restarts)
        if not decision.restart:
            return stopped(outcome, decision, job.config.restarts)
        plan, job = job.plan, prepared(job, requested, history, decision)
        announce(outcome, plan, history, job, job.config.restarts + 1)


def attempt_of(job: Job, number: int) -> Attempt:
    """Return the record of an attempt that begins now."""
    resume = job.config.resume
    match = STEP.fullmatch(Path(resume).name) if resume else None
    step = int(match[1]) if match else 0
    return Attempt(number, job.plan.world, job.plan.degrees, resumed_step=step, checkpoint=resume, step=step)


def ended(history: Sequence[Attempt], outcome: Outcome, directory: Path) -> Attempt:
    """Return the last attempt of `history` with how it ended."""
    last, cause, row = history[-1], outcome.cause, last_row(directory / METRICS)
    return replace(
        last,
        ended=time.time(),
        step=max(last.resumed_step, int(row.get("clock", row.get("step", 0)))),
        saved=max(complete_steps(directory), default=0),
        exit_code=outcome.exit_code,
        error=cause.what if cause else outcome.note,
        rank=cause.rank if cause else None,
        host=cause.host if cause else "",
        raised=bool(cause and cause.traceback and cause.order == failure.CAUSE and cause.phase != "start"),
        memory=bool(cause and cause.memory),
    )


def stopped(outcome: Outcome, decision: Decision, max_restarts: int) -> Outcome:
    """Return the outcome of a run that is not restarted. One that may not restart at all says nothing of it."""
    if not max_restarts:
        return outcome
    return replace(outcome, exit_code=decision.exit_code or outcome.exit_code, why_not=decision.why)


def prepared(job: Job, requested: Config | None, history: list[Attempt], decision: Decision) -> Job:
    """Return the job of the next attempt; append its record to `history`, and rewind the run's rows to its checkpoint.

    requested: None if the plan of `job` is already for the ranks that are left. The attempt's configuration is in
    `attempts/<n>/`, with the plan if that has changed.
    """
    last = history[-1]
    if decision.bad_checkpoint and last.checkpoint:
        _set_aside(Path(last.checkpoint))
    checkpoint = latest(job.directory)
    # a run that has resumed another one never begins from nothing, even if that one's checkpoint could not be linked
    resume = os.fspath(checkpoint) if checkpoint else history[0].checkpoint
    config, plan = replace(job.config, resume=resume), job.plan
    if decision.without is not None and requested is not None and requested.elastic:
        config, plan = shrunk(requested, config, plan, plan.world - 1) or (config, plan)
    after = replace(job, config=config, plan=plan, attempt=last.number + 1)
    beginning = attempt_of(after, after.attempt)
    lost_s = attempts.rewind(job.directory, beginning.resumed_step, last.number)
    history[-1] = replace(last, repeated_s=lost_s)
    history.append(beginning)
    describe(after, changed=(plan.world, plan.degrees) != (last.world, last.degrees))
    return after


def shrunk(
    requested: Config, saved: Config, plan: Plan, maximum: int, exact: bool = False
) -> tuple[Config, Plan] | None:
    """Return the configuration and plan for at most `maximum` ranks (exact: for exactly `maximum`). Return None after a
    warning if no plan fits."""
    fitting = elastic.fitting(requested, saved, plan, maximum, exact)
    if fitting is None:
        minimum = elastic.least_world(requested)
        print_note(f"warning: elastic=true: no plan fits {maximum} ranks or fewer (min_world={minimum})")
        return None
    before, now = (" ".join(f"{axis}={size}" for axis, size in shape.degrees.items()) for shape in (plan, fitting[1]))
    batch = fitting[1].batch
    print(
        f"elastic: the plan changes from {plan.world} ranks ({before}) to {fitting[1].world} ({now}); "
        f"global_batch={batch.global_batch} stays: {batch.microbatches} x {batch.micro_batch} samples per dp rank",
        file=sys.stderr,
    )
    return fitting


def describe(job: Job, changed: bool) -> None:
    """Write the frozen configuration of an attempt, and its plan if that has changed."""
    from parallelrun.planner.facts.document import document

    file = attempts.config_file(job.directory, job.attempt)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(file, freeze(job.config, job.plan))
    if changed:
        write_json(file.parent / "plan.json", document(job.plan, job.config))


def _set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint that could not be loaded, so that no run resumes from it."""
    with suppress(OSError):
        os.rename(checkpoint, checkpoint.with_name(DAMAGED + checkpoint.name))
    print_note(f"warning: {checkpoint} is damaged: an older checkpoint is used")


def announce(outcome: Outcome, plan: Plan, history: Sequence[Attempt], job: Job, limit: int) -> None:
    """Print why the last attempt, of `plan`, ended, and where the next one, `job`, begins. limit: of attempts."""
    before, now = history[-2], history[-1]
    lines = failure.headline(outcome.cause, plan) if outcome.cause else []
    start = f"the checkpoint of step {now.resumed_step}" if now.checkpoint else "step 0: nothing was saved"
    again = f"; {counted(before.step - now.resumed_step, 'step')} again" if before.step > now.resumed_step else ""
    why = "" if outcome.cause else f" ({before.error})"
    lines.append(
        f"attempt {before.number} of {limit} has failed{why}; attempt {now.number} goes on from {start}{again}"
    )
    screen = sys.stderr
    with suppress(OSError):
        print(("\n" if screen.isatty() else "") + "\n".join(lines), file=screen, flush=True)
