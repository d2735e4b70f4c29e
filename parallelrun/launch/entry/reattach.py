"""Runs whose ranks torchrun starts again (`--max-restarts`, or other nodes).

torchrun ends all ranks and starts new ones; how often is its own business. Rank 0 of the new ones finds the run that
the same torchrun has started before, and goes on with its plan, or with one for the ranks that came back.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from parallelrun.base.errors import EXIT_RANK_DIED, ParallelrunError, Problem
from parallelrun.base.records import write_json
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.failures import failure, restart_policy
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.outcome import Outcome
from parallelrun.launch.failures.restart_policy import Decision
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.job import Job
from parallelrun.launch.host.os_process import start_time
from parallelrun.launch.ranks import restarts
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.records import attempts, find
from parallelrun.report.records.attempts import Attempt
from parallelrun.report.records.read import read_object

FILE = "launcher.json"
_UNNAMED = ("", "none")  # torchrun's run ids that jobs share
_SEARCHED = 50  # newest runs
_UNTOLD = "ended by its launcher, and no rank has told why: a rank was killed, or a host was lost"


def remember(job: Job) -> None:
    """Note which torchrun has started a run, and its first attempt, if it may start the run again."""
    if most_restarts(os.environ):
        write_json(job.directory / FILE, _identity(os.environ))
        attempts.write(job.directory, [restarts.attempt_of(job, 1)])


def most_restarts(environ: Mapping[str, str]) -> int:
    """Return how often torchrun may restart the ranks; 0 under other launchers."""
    text = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return int(text) if text.isdigit() else 0


def _identity(environ: Mapping[str, str]) -> dict[str, str]:
    """The job's name, and this host's torchrun: the parent of all ranks that it starts."""
    agent = os.getppid()
    name = environ.get("TORCHELASTIC_RUN_ID", "")
    return {"run_id": name, "agent": f"{socket.gethostname()} {agent} {start_time(agent)}"}


def earlier(runs: Path) -> Path | None:
    """Return the directory of the run that this torchrun has started before; None if this is its first start."""
    if not most_restarts(os.environ):
        return None
    own = _identity(os.environ)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and own["run_id"] not in _UNNAMED
    for directory in find.all_runs(runs)[:_SEARCHED]:
        identity = read_object(directory / FILE)
        if identity.get("agent") == own["agent"] or (restarted and identity.get("run_id") == own["run_id"]):
            return directory if read_object(directory / find.STATUS).get("state") != "done" else None
    return None


def planned(requested: Config, world: int) -> tuple[Config, Plan] | None:
    """Return the configuration and plan with which a restarted run goes on; None if that is for `resolve` to say.

    The plan is that of the last attempt. For another number of ranks it is resolved again: `elastic=true` changes the
    degrees that were asked for.
    """
    directory = earlier(Path(requested.runs).expanduser())
    history = attempts.read(directory) if directory else []
    if directory is None or not history:
        return None
    saved = load_frozen(attempts.config_file(directory, history[-1].number).read_text())
    plan = resolve(saved)
    if plan.world == world:
        return saved, plan
    return restarts.shrunk(requested, saved, plan, world, exact=True) if requested.elastic else None


def continued(job: Job, directory: Path) -> Job:
    """Return the job of the next attempt of the run in `directory`, from its last checkpoint.

    Raises ParallelrunError with the code of the last attempt, or that of no progress, if it must not be restarted.
    """
    limit = most_restarts(os.environ)
    outcome, history, decision = _judged(directory)
    if not decision.restart:
        last = history[-1]
        reason = f"not restarted: {decision.why} (attempt {last.number}: {last.error}); {directory}"
        raise ParallelrunError(Problem(reason), exit_code=decision.exit_code or outcome.exit_code)
    after = restarts.prepared(replace(job, directory=directory), None, history, decision)
    attempts.write(directory, history)
    restarts.announce(replace(outcome, cause=None), job.plan, history, after, limit + 1)  # ranks have told the cause
    return after


def _judged(directory: Path) -> tuple[Outcome, list[Attempt], Decision]:
    """Return how the last attempt of a run ended, all attempts, and what follows; record it. Its ranks have ended."""
    history = attempts.read(directory)
    outcome = _outcome(directory, history[-1])
    if history[-1].ended is None:
        history[-1] = restarts.ended(history, outcome, directory)
        attempts.write(directory, history)
    decision = restart_policy.decide(history, len(history))  # torchrun counts restarts itself
    if not decision.restart:
        last = history[-1]
        code = decision.exit_code or outcome.exit_code
        Status(directory, last.step).ended(code, f"{last.error}; {decision.why}", last.rank)
    return outcome, history, decision


def _outcome(directory: Path, last: Attempt) -> Outcome:
    """Return how the last attempt ended, from what its ranks have written before torchrun has ended them."""
    status = read_object(directory / find.STATUS)
    written = [own for rank in range(last.world) if (own := failure.read_failure(directory, rank))]
    cause = failure.root_cause(written) if written else None
    code, rank = status.get("exit_code"), status.get("failed_rank")
    if isinstance(code, int) and code:
        if cause is None or cause.rank != rank:
            error = str(status.get("error") or _UNTOLD)
            hosts = read_object(directory / find.MANIFEST).get("hosts", [])
            host = hosts[0] if len(hosts) == 1 else ""
            cause = Failure(rank, error, code, host=host) if isinstance(rank, int) else None
        return Outcome(code, cause, str(status.get("error") or ""))
    return Outcome(cause.exit_code if cause else EXIT_RANK_DIED, cause, _UNTOLD)
