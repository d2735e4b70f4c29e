"""What to do, as the launcher over several hosts, with a checkpoint that only their memory has when the run ends."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parallelrun.checkpoint import held
from parallelrun.checkpoint.files import sync, write_bytes
from parallelrun.checkpoint.find import FOLDER, complete_steps, open_complete, step_name
from parallelrun.checkpoint.index import INDEX_FILE
from parallelrun.cli.host_connection import CLOSED, Connections, HostConnection
from parallelrun.errors import CheckpointError
from parallelrun.wording import print_note

COPY_S = 120.0  # for the hosts to copy their files


def keep_on_disk(connections: Connections, directory: Path) -> None:
    """Save the newest checkpoint in the hosts' memory in a run's directory, if the disk has none as new. Their ranks
    have ended. If it fails, or with a second Ctrl-C, print a warning."""
    agents = [one for one in connections.by_name.values() if one.held]
    found = held.newest([one.held for one in agents])
    if found is None or found[0] <= max(complete_steps(directory), default=0):
        return
    step, index = found
    target = directory.absolute() / FOLDER / step_name(step)
    aside = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        _copy(connections, agents, step, aside)
        write_bytes(aside / INDEX_FILE, index.encode())
        open_complete(aside)
        sync(aside)
        os.rename(aside, target)
        print(f"the checkpoint in memory is kept as {target}", file=sys.stderr, flush=True)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        print_note(f"warning: the checkpoint in memory cannot be kept: {error}")


def _copy(connections: Connections, agents: Sequence[HostConnection], step: int, target: Path) -> None:
    """Let the agents copy their files, one host after the other: two may have the same file. Raises OSError."""
    for agent in agents:
        agent.send("copy", (step, os.fspath(target)))
        deadline, answer = time.monotonic() + COPY_S, None
        while answer is None and time.monotonic() < deadline and len(connections.signals) < 2:
            one, what, content = connections.next_message() or (None, "", None)
            if one is agent and what in ("copied", CLOSED):
                answer = content if what == "copied" else "its agent has ended"
        if answer != "":
            raise OSError(f"{agent.name}: {answer or 'no answer'}")
