"""Silent data corruption: are wrong bits found, the rank named, the steps undone, and what does looking cost?

`python -m benchmarks.sdc --cases 500` plants faults of seeds 0, 1, ... in real trainings of one to four ranks, and
prints a table. `python -m benchmarks.sdc --cost` alternates runs without and with `sdc.every=50`, and compares their
processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.corruption import BASE, PLANS, Case, Outcome, Result, draw, judge, run, run_all
from tests.plans import tiny_plan
from tests.pool import run_ranks

TOGETHER = 12  # cases in the same processes: to start them takes longer than a case
COSTS = {
    "ddp dp=2": ["strategy=ddp", "dp=2"],
    "fsdp dp=2": ["strategy=fsdp", "dp=2"],
    "tp=2": ["strategy=tp", "tp=2"],
    "pp=2": ["strategy=1f1b", "pp=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="the number of faults that have an effect")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cost", action="store_true", help="measure what looking costs instead")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs of each plan for --cost")
    parser.add_argument("--to", type=Path, help="append every case or pair to this file, as a line of JSON")
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {platform.node()}, Python {platform.python_version()}")
    if arguments.cost:
        measure_cost(arguments.pairs, arguments.to)
    else:
        plant(arguments.cases, arguments.first, arguments.to)


def plant(cases: int, seed: int, to: Path | None) -> None:
    """Run seeds until `cases` faults had an effect; print how many were found, named, undone, by kind and place."""
    rows: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    while (missing := cases - sum(map(len, rows.values()))) > 0:
        drawn: dict[str, list[tuple[int, Case]]] = defaultdict(list)
        for number in range(seed, seed + max(missing, TOGETHER)):
            case = draw(number, [*PLANS])
            drawn[case.plan].append((number, case))
        seed += max(missing, TOGETHER)
        for plan, of_plan in sorted(drawn.items()):
            for start in range(0, len(of_plan), TOGETHER):
                for number, case, outcomes in outcomes_of(plan, of_plan[start : start + TOGETHER]):
                    result = judge(case, clean(plan), outcomes)
                    if result.acted:
                        rows[_row(case)].append(result)
                    if to is not None:
                        note(to, number, case, result, outcomes)
    print(f"{'fault':22} {'looked for':20} {'cases':>5} {'found':>6} {'named':>6} {'ended right':>12}")
    for (kind, place, how), found in sorted(rows.items()):
        show(f"{kind}, {place}", how, found)
    show("all", "", [result for found in rows.values() for result in found])


def _row(case: Case) -> tuple[str, str, str]:
    how = "computed twice, N=1" if case.recompute else "every 2 to 4 steps"
    return case.fault.kind, case.fault.place, how


def show(fault: str, how: str, found: list[Result]) -> None:
    named, ended = sum(one.named for one in found), sum(one.ended for one in found)
    print(f"{fault:22} {how:20} {len(found):5} {sum(one.found for one in found):6} {named:6} {ended:12}")


def outcomes_of(plan: str, drawn: list[tuple[int, Case]]) -> Iterator[tuple[int, Case, list[Outcome]]]:
    """Run cases of one plan in the same processes; yield each with the outcomes of its ranks."""
    world = tiny_plan({**BASE, **PLANS[plan]}).world
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(world, run_all, [case for _, case in drawn], Path(folder), timeout=600)
    for (number, case), *ranks in zip(drawn, *found):
        yield number, case, ranks


@cache
def clean(plan: str) -> list[Outcome]:
    """The run of a plan without a fault, and without looking for one."""
    over = {**BASE, **PLANS[plan]}
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(tiny_plan(over).world, run, over, None, Path(folder))


def note(to: Path, seed: int, case: Case, result: Result, outcomes: list[Outcome]) -> None:
    """Append a case to a file."""
    row: dict[str, Any] = {"seed": seed, "plan": case.plan, "every": case.every, "recompute": case.recompute}
    row |= {**vars(case.fault), **vars(result), "planted": outcomes[case.fault.rank].planted[:5]}
    row |= {"events": outcomes[0].events, "errors": [one.error for one in outcomes]}
    with to.open("a") as file:
        file.write(json.dumps(row) + "\n")


def measure_cost(pairs: int, to: Path | None) -> None:
    """Print the median ratio of processor times, with checks to without, of alternating runs of 100 steps."""
    for name, words in COSTS.items():
        ratios, again = [], []
        for number in range(pairs):
            plain, watched, other = seconds(words, 0), seconds(words, 50), seconds(words, 0)
            ratios.append(2 * watched / (plain + other))
            again.append(other / plain)
            if to is not None:
                with to.open("a") as file:
                    file.write(json.dumps({"plan": name, "pair": number, "seconds": [plain, watched, other]}) + "\n")
        low, high = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-1 - len(ratios) // 4]
        print(
            f"{name:12} with / without {statistics.median(ratios):.4f} (middle half {low:.4f} to {high:.4f}), "
            f"without / without {statistics.median(again):.4f}, {pairs} pairs",
            flush=True,
        )


def seconds(words: list[str], every: int) -> float:
    """Return the processor time of a run of 100 steps, start included."""
    command = [sys.executable, "-m", "parallelrun", "model=gpt", *words, "steps=100", f"sdc.every={every}"]
    command += ["eval.every=0", "checkpoint.last=false"]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, f"runs={folder}"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
