"""The campaign of bad input: seeded wrong values, files and environments, each of which must be refused well.

    python -m benchmarks.bad_input --cases 2000 --seed 0

Each case is a command line, answered in this process, where no rank is started. A case that is refused ends with exit
code 2, 3 or 4 in a second of processor time, without a traceback and without a run directory; its message names what
was wrong and what to type instead, and with several wrong keys names every one. A case may be accepted, where a drawn
value happens to be legal: `--accepted` lists those.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from benchmarks.bad_input_cases import Case, draw
from benchmarks.bad_input_files import write_files
from parallelrun.cli.main import main

SECOND, HANG_S = 1.0, 60
STARTS = (
    "parallelrun.launch.entry.start._launch",
    "parallelrun.launch.entry.attach.lead",
    "parallelrun.launch.entry.attach.follow",
    "parallelrun.launch.over_ssh.ssh.run",
    "parallelrun.cli.tools.doctor.examine",
    "parallelrun.cli.tools.calibrate._calibrate",
)


class Accepted(BaseException):
    """The case would start ranks."""


def _accept(*_arguments: object, **_named: object) -> None:
    raise Accepted


def _hang(*_: object) -> None:
    raise TimeoutError(f"no answer in {HANG_S} s")


def answer(case: Case) -> tuple[int | None, str, float]:
    """Return (the exit code, None if accepted; what stderr got; processor seconds)."""
    screen, errors = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(HANG_S)
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors):
            with mock.patch.dict(os.environ, case.environ):
                code: int | None = main(list(case.words))
    except Accepted:
        code = None
    except BaseException:
        code = -1
        errors.write(traceback.format_exc())
    finally:
        signal.alarm(0)
    shown = errors.getvalue() or "\n".join(re.findall(r".*skipped: .*", screen.getvalue()))
    return code, shown, time.process_time() - began


def defects(case: Case, code: int | None, said: str, seconds: float, has_torch: bool) -> list[str]:
    """Return what is wrong with an answer."""
    found = []
    if code not in (None, 0, 2, 3, 4):
        found.append(f"exit {code}")
    if "Traceback" in said or "unexpected:" in said:
        found.append("traceback")
    if seconds > SECOND:
        found.append(f"{seconds:.1f} s")
    if code not in (2, 3, 4):
        return found
    errors = re.split(r"^error: ", said, flags=re.MULTILINE)[1:]
    if not errors and not re.search(r"usage: |skipped: ", said):
        found.append("no error: line")
    found += [f"does not name {name}" for name in case.names if name not in said]
    if errors and not any(re.search(r"did you mean: |try: ", one) for one in errors) and not case.is_file:
        found.append("no fix")
    if has_torch and not case.may_torch:
        found.append("imported torch")
    return found


def run_directories(folder: Path) -> set[Path]:
    return {found.parent for name in ("status.json", "manifest.json") for found in folder.rglob(name)}


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in STARTS:
            with contextlib.suppress(AttributeError):
                stack.enter_context(mock.patch(name, _accept))
        yield


def campaign() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="")
    parser.add_argument("--accepted", action="store_true", help="list the accepted cases, too")
    asked = parser.parse_args()
    wrong = accepted = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as root, nothing_starts():
        os.chdir(root)
        write_files(Path(root))
        for number in range(asked.seed, asked.seed + asked.cases):
            case = draw(number, asked.family)
            before = run_directories(Path(root))
            had_torch = "torch" in sys.modules
            code, said, seconds = answer(case)
            found = defects(case, code, said, seconds, "torch" in sys.modules and not had_torch)
            left = run_directories(Path(root)) - before
            if code in (2, 3, 4) and left:
                found.append(f"left {sorted(map(str, left))}")
            accepted += code in (None, 0)
            slowest = max(slowest, seconds)
            if found or (asked.accepted and code in (None, 0)):
                wrong += bool(found)
                shown = "".join(f"\n    {line}" for line in said.splitlines()[-14:]) if found else ""
                words = [word if len(word) < 120 else word[:100] + "..." for word in case.words]
                print(
                    f"{number} [{case.family}] {words} {dict(case.environ) or ''} -> {code}: {found}{shown}", flush=True
                )
    print(f"{asked.cases} cases, {accepted} accepted, {wrong} with a defect; slowest {slowest:.2f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(campaign())
