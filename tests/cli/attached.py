"""What another launcher starts in the attach tests, rank by rank: `torchrun ... -m tests.cli.attached <json>`.

The way of `parallelrun` itself (rank 0 composes, the others follow), with the tiny plan and a worker of
`tests.cli.workers`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace


def main(text: str) -> int:
    from parallelrun.cli import errors
    from parallelrun.launch.entry import attach
    from parallelrun.launch.entry.start import start
    from parallelrun.launch.host import directory, environment
    from parallelrun.launch.store import rendezvous
    from tests.plans import tiny_config, tiny_plan

    wanted = json.loads(text)
    attached = environment.detect(os.environ)
    assert attached is not None, "this test program is started by a launcher"
    if wanted.get("absent") == attached.rank:
        return 0
    rendezvous.JOIN_S = wanted.get("patience", rendezvous.JOIN_S)
    if wanted.get("foreign code") == attached.rank:
        directory.code_fingerprint = lambda: "f" * 64
    words = wanted.get("words", {}).get(str(attached.rank), ["steps=5"])
    try:
        if attached.rank:
            return attach.follow(words)
        try:
            config = replace(
                tiny_config(wanted["overrides"]), runs=wanted["runs"], timeout_s=wanted.get("timeout_s", 60)
            )
            plan = tiny_plan(wanted["overrides"])
            overrides = [f"{key}={value}" for key, value in wanted["overrides"].items()]
            return start(config, plan, words, overrides, worker=wanted.get("worker", "tests.cli.workers:train"))
        except Exception as error:
            attach.abandon(attached, getattr(error, "exit_code", 1))
            raise
    except Exception as error:
        return errors.report(error, False)
    finally:
        if wanted.get("signalled at its end"):
            receive_stop_signals()


def receive_stop_signals() -> None:
    """Get every stop signal while the interpreter exits, which has then restored the default of handled signals."""
    from parallelrun.base.stop_signals import STOP_SIGNALS

    for number in STOP_SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
