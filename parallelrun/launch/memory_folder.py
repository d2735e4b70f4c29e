"""A private folder in the memory of the host, for checkpoints that outlive the ranks of an attempt.

It is on tmpfs, so that what finds, checks and reads checkpoints on a disk does so here too. Nothing of it outlives the
launcher: a guard process removes it if the launcher is killed, and the next launcher of the user if both were killed.
Over several hosts, the agent of each has such a folder (`cli/host_agent.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from parallelrun.checkpoint.resume import keep_on_disk
from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.launch.environment import Attached, memory_of_hosts
from parallelrun.launch.guard import guarded
from parallelrun.launch.processes import start_time
from parallelrun.plan import prediction
from parallelrun.plan.structure import Plan
from parallelrun.report.figures import bytes_text
from parallelrun.wording import print_note

PARENT = Path("/dev/shm")
KEPT = 2  # checkpoints: the newest, and the one that is being written
_KEY = "checkpoint.memory_every"
_NAME = re.compile(r"parallelrun-(\d+)-([0-9]+)-.*")  # pid and start time of the launcher


def check(config: Config, plan: Plan, attached: Attached | None) -> list[str]:
    """Return notes on checkpoints in memory. Raises ConfigError or EnvironmentProblem if they are impossible."""
    if not config.checkpoint.memory_every:
        return []
    if plan.servers:
        what = "the servers of strategy.data.kind=ps save their own state, and only to the disk"
        raise ConfigError(Problem(what, _KEY, f"{_KEY}=0", kind="unread"))
    memory, _ = memory_of_hosts(os.environ)
    if attached is not None and memory is None:
        what = (
            "checkpoints in memory are kept by parallelrun's own launcher (-H for several hosts), which outlives the "
        )
        what += "ranks; these were started by another one"
        raise EnvironmentProblem(Problem(what, _KEY, f"{_KEY}=0"))
    if not os.access(PARENT, os.W_OK):
        raise EnvironmentProblem(Problem(f"{PARENT}, the memory in which checkpoints are kept, is absent", _KEY))
    need, free = KEPT * prediction.checkpoint_bytes(plan), shutil.disk_usage(PARENT).free
    if need <= free:
        return []
    return [f"{_KEY} needs {bytes_text(need)} in {PARENT}, and {bytes_text(free)} are free"]


def keep(memory: Path | None, run_directory: Path) -> None:
    """Save on the disk what a run that has failed has only in memory. If that fails, too, print a warning."""
    try:
        if memory is not None and (saved := keep_on_disk(run_directory, memory)) is not None:
            print(f"the checkpoint in memory is kept as {saved}", file=sys.stderr)
    except OSError as error:
        print_note(f"warning: the checkpoint in memory cannot be kept: {error}")


@contextlib.contextmanager
def memory_folder(wanted: bool) -> Iterator[Path | None]:
    """Provide the folder while a run lasts, if it keeps checkpoints in memory. Call it before threads are started."""
    if not wanted:
        yield None
        return
    _remove_abandoned()
    owner = f"parallelrun-{os.getpid()}-{start_time(os.getpid())}-"
    folder = Path(tempfile.mkdtemp(prefix=owner, dir=PARENT))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    with guarded(remove):
        try:
            yield folder
        finally:
            remove()


def _remove_abandoned() -> None:
    """Remove the folders of this user's launchers that have ended with their guards."""
    with contextlib.suppress(OSError):
        for path in PARENT.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.stat().st_uid == os.getuid() and start_time(int(match[1])) != match[2]:
                shutil.rmtree(path, ignore_errors=True)
