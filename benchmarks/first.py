"""The first impression: how long a user waits for the first commands, in wall time and in CPU seconds of all processes.

    python -m benchmarks.first                  # every command, the median of 3
    python -m benchmarks.first --case plan,error --repeats 9

main: the first command of the README. ranks: 32 ranks. plan: of 3,072 ranks. error: a degree that does not divide.
completion: what TAB asks. Each is a fresh process, as a user starts it, with compiled modules on disk.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.pairs import read_arguments, write

BARS = {"main": 18.0, "ranks": 12.0, "plan": 0.5, "error": 0.35, "completion": 0.2}
COMMANDS = {
    "main": "model=gpt strategy=ptdp tp=2 pp=2",
    "ranks": "model=gpt strategy=ptdp tp=8 pp=4 steps=5",
    "plan": "plan model=gpt3_175b strategy=ptdp tp=8 pp=64 dp=6 cluster=a100_80gb",
    "error": "model=gpt strategy=ptdp tp=3",
    "completion": "-sc query=bash",
}
EXIT_CODES = {"error": 2}
TYPED = "parallelrun model=gpt str"


def _run(case: str, folder: str) -> tuple[float, float]:
    """Return wall and CPU seconds of one command."""
    environment = {**os.environ, "COMP_LINE": TYPED, "COMP_POINT": str(len(TYPED))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "parallelrun", *COMMANDS[case].split()]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == EXIT_CODES.get(case, 0), f"{case}: {done.stderr[-2000:]}"
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    arguments = read_arguments(__doc__, "first", COMMANDS, repeats="3")
    rows: list[dict[str, Any]] = []
    print(f"{'case':12}{'wall s':>8}{'CPU s':>8}{'bar':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.case.split(","):
            if BARS[case] < 1:
                _run(case, folder)  # writes what is compiled
            walls, cpus = zip(*(_run(case, folder) for _ in range(int(arguments.repeats))))
            wall, cpu = statistics.median(walls), statistics.median(cpus)
            bar = BARS[case]
            rows.append({"case": case, "wall_s": walls, "cpu_s": cpus, "bar": bar, "holds": wall <= bar})
            verdict = "holds" if wall <= bar else "DOES NOT HOLD"
            print(f"{case:12}{wall:8.2f}{cpu:8.2f}{bar:7.2f}  {verdict}", flush=True)
    if arguments.name:
        command = f"python -m benchmarks.first --case {arguments.case}"
        print("written to", write(arguments.name, {"command": command}, rows))


if __name__ == "__main__":
    main()
