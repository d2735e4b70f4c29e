"""The processes of one host: its ranks, and the agent that starts them on each host to which `launch/over_ssh/ssh.py`
connects.

The agent's first line of stdout is MARK and the address of its host. The first line of its stdin has the arguments of
`start_ranks` as JSON, each following one the name of a signal for the ranks. When stdin ends, because the launcher has
ended or the connection was lost, it exits, and the kernel kills its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from parallelrun.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, EXIT_RANK_DIED, EXIT_TERMINATED
from parallelrun.base.stop_signals import STOP_SIGNALS
from parallelrun.launch.host import os_process
from parallelrun.launch.host.environment import without_launchers
from parallelrun.launch.ranks.rank import end, leave_with_parent

MARK = "\x1eparallelrun: "  # a login shell may print lines before it
GRACE_S = 10.0  # after a rank has failed: time for the others to notice and report it
INTERRUPT_S = 5.0  # after Ctrl-C: time to unwind
TICK_S = 0.05
Children = dict[int, subprocess.Popen[bytes]]  # ranks of this host, and by their first rank the agents of others


class Rank(subprocess.Popen[bytes]):
    """A rank, `parallelrun <words>`, which ends with this process. Its session is its own: Ctrl-C reaches the launcher
    only."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]):
        super().__init__(
            [sys.executable, "-m", "parallelrun", *words],
            stdin=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
            preexec_fn=partial(leave_with_parent, os.getpid()),
        )

    def poll(self) -> int | None:
        """Return the exit code, None while it runs. When it has ended, all processes that it has started are killed."""
        if self.returncode is None:
            self.returncode = os_process.reap(self.pid)
        return self.returncode

    def kill(self) -> None:
        """Kill it, and all processes that it has started."""
        os.killpg(self.pid, signal.SIGKILL)


def start_ranks(words: Sequence[str], first_rank: int, num_ranks: int, environ: Mapping[str, str]) -> Children:
    """Start `num_ranks` ranks on this host, and return them by their number.

    environ: the variables of all ranks: the launcher's, and those of torchrun that do not depend on the host.
    """
    paths = [path for source in (environ, os.environ) for path in source.get("PATH", "").split(os.pathsep) if path]
    own = {"PATH": os.pathsep.join(dict.fromkeys(paths)), "LOCAL_WORLD_SIZE": str(num_ranks)}
    shared = {**without_launchers(os.environ), **environ, **own}
    return {
        first_rank + number: Rank(words, {**shared, "RANK": str(first_rank + number), "LOCAL_RANK": str(number)})
        for number in range(num_ranks)
    }


def supervise(children: Children, signals: Sequence[int], grace_s: float = GRACE_S) -> int:
    """Forward signals to the children until all have ended, or must be killed. Return the run's exit code: the
    signal's, else that of rank 0, which knows the cause, else that of the first that has failed.

    The first SIGTERM ends the ranks after a step and a save. They are killed grace_s after the first failure,
    INTERRUPT_S after Ctrl-C, and at a second signal. children: those that have ended are removed. signals: gets
    those that arrive.
    """
    codes: dict[int, int] = {}  # in the order in which they ended, without those that are killed here
    deadline, num_forwarded = float("inf"), 0
    while children and time.monotonic() < deadline:
        for number in signals[num_forwarded:]:
            num_forwarded += 1
            patience_s = 0.0 if num_forwarded > 1 else INTERRUPT_S if number == signal.SIGINT else float("inf")
            deadline = min(deadline, time.monotonic() + patience_s)
            for child in children.values():
                child.send_signal(number)
        for rank, child in list(children.items()):
            if (code := child.poll()) is not None:
                del children[rank]
                codes[rank] = EXIT_RANK_DIED if code < 0 else code
                deadline = min(deadline, time.monotonic() + grace_s) if code != EXIT_OK else deadline
        time.sleep(TICK_S)
    for child in children.values():
        child.kill()
    if signal.SIGINT in signals:
        return EXIT_INTERRUPTED
    if len(signals) > 1:
        return EXIT_TERMINATED
    ordered = (codes.get(0, EXIT_OK), *codes.values())
    return next((code for code in ordered if code not in (EXIT_OK, EXIT_PREEMPTED)), max(ordered))


def main() -> int:
    """Run the ranks that the launcher orders; return the exit code of this host."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, lambda *_: None)  # the launcher forwards those that matter
    address = os.environ["SSH_CONNECTION"].split()[2]  # of this host, as the launcher sees it
    print(f"{MARK}{address}", flush=True)
    order = sys.stdin.buffer.readline()
    if not order:
        return EXIT_OK
    ranks = start_ranks(**json.loads(order))
    signals: list[int] = []
    threading.Thread(target=_receive, args=(signals,), daemon=True).start()
    return supervise(ranks, signals)


def _receive(signals: list[int]) -> None:
    for line in sys.stdin.buffer:
        signals.append(signal.Signals[line.decode().strip()])
    os._exit(EXIT_RANK_DIED)


if __name__ == "__main__":
    end(main())
