"""The program, which gets a signal inside a hook of one of its forks: Python drops what a handler raises there."""

from __future__ import annotations

import json
import os
from itertools import count
from typing import Any

from tests.cli.launcher import program_in


def main(call: dict[str, Any]) -> int:
    """Carry out `call`, as `tests.cli.launcher.run_to_end` describes it; PARALLELRUN_TEST says which signal comes."""
    wish = json.loads(os.environ["PARALLELRUN_TEST"])
    launcher, forks = os.getpid(), count(1)

    def signalled() -> None:
        if os.getpid() == launcher and next(forks) == wish["fork"]:
            for number in wish["signals"]:
                os.kill(launcher, number)

    os.register_at_fork(**{wish["hook"]: signalled})
    return program_in(call)
