"""The process that carries out one run for the Python API: `python -m parallelrun.api.launcher`.

The order comes as JSON on stdin: {config, given, argv, overrides, directory, parent, answer}. The answer goes as JSON
to the descriptor `answer`: {exit_code, directory}, and {error, problems} if nothing could be started.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallelrun.base import stop_signals
from parallelrun.base.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_TERMINATED, ParallelrunError, Problem


def main() -> None:
    """Carry out the order. This process ends with the one that gave it."""
    order = json.load(sys.stdin)
    from parallelrun.launch.ranks.rank import leave_with_parent

    leave_with_parent(order["parent"])
    created: list[Path] = []
    answer: dict[str, Any] = {}
    try:
        with stop_signals.raising():
            answer["exit_code"] = _start(order, created)
    except KeyboardInterrupt:
        answer["exit_code"] = EXIT_INTERRUPTED
    except stop_signals.Terminated:
        answer["exit_code"] = EXIT_TERMINATED
    except ParallelrunError as error:
        problems = [asdict(problem) for problem in error.problems]
        answer = {"exit_code": error.exit_code, "error": type(error).__name__, "problems": problems}
    except Exception as error:
        traceback.print_exc()
        problem = Problem(f"unexpected: {type(error).__name__}: {error}")
        answer = {"exit_code": EXIT_RUN_FAILED, "problems": [asdict(problem)]}
    answer["directory"] = os.fspath(created[0]) if created else None
    with open(order["answer"], "w", encoding="utf-8") as file:
        json.dump(answer, file)


def _start(order: dict[str, Any], created: list[Path]) -> int:
    from parallelrun.launch.entry.start import start
    from parallelrun.launch.host.environment import visible_gpus
    from parallelrun.planner.resolve.freeze import load_frozen
    from parallelrun.planner.resolve.resolve_config import resolve

    config = load_frozen(order["config"])
    plan = resolve(config, given=frozenset(order["given"]), gpus=visible_gpus())
    root = Path(order["directory"]) if order["directory"] else None
    return start(config, plan, order["argv"], order["overrides"], root, created=created.append)


if __name__ == "__main__":
    main()
