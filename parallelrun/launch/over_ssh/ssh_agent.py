"""The process that `launch/over_ssh/ssh.py` starts on each host: it starts this host's ranks, and ends with the
connection.

Over ssh, its first line of stdout is MARK and its address. The first line of its stdin is the `Order` as JSON, each
following one the name of a signal for the ranks. When stdin ends, because the launcher has ended or the connection was
lost, it exits, and the kernel kills its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping

from parallelrun.base.errors import EXIT_OK, EXIT_RANK_DIED
from parallelrun.base.stop_signals import STOP_SIGNALS
from parallelrun.launch.over_ssh.host_ranks import Order, Ranks
from parallelrun.launch.ranks.rank import end

MARK = "\x1eparallelrun: "  # a login shell may print lines before it
LOCAL = "local"  # argument: this is the host of the launcher, whose terminal the ranks share


def main(arguments: list[str]) -> int:
    """Run the ranks that the launcher orders; return the exit code of this host."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, lambda *_: None)  # the launcher forwards those that matter
    if LOCAL not in arguments:
        print(f"{MARK}{address(os.environ)}", flush=True)
    order = sys.stdin.buffer.readline()
    if not order:
        return EXIT_OK
    ranks = Ranks(Order(**json.loads(order)))
    threading.Thread(target=_forward_signals, args=(ranks,), daemon=True).start()
    return ranks.wait()


def _forward_signals(ranks: Ranks) -> None:
    for line in sys.stdin.buffer:
        ranks.send(signal.Signals[line.decode().strip()])
    os._exit(EXIT_RANK_DIED)


def address(environ: Mapping[str, str]) -> str:
    """Return this host's address as the launcher sees it, from sshd's variable."""
    return environ["SSH_CONNECTION"].split()[2]


if __name__ == "__main__":
    end(main(sys.argv[1:]))
