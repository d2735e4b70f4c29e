"""What the fault campaign has found: a line of JSON for each run as it ends, and the tables. Torch-free."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.fault_cases import Case
    from benchmarks.fault_injection import Fault

CHECKS = ("survived", "same bits", "no orphan", "no lost sample")
HEADER = ("planted", "survived", "right rank named", "same bits", "no process left", "every sample once")


def append(file: Path, case: Case) -> None:
    """Add the line of a run that has ended. Several shards may write to one file."""
    line = json.dumps(asdict(case)) + "\n"
    with file.open("ab", buffering=0) as stream:
        stream.write(line.encode())


def known(file: Path, planned: Sequence[Case]) -> dict[int, Case]:
    """Return those of the planned runs that have a line, with what was found, by number. Other lines are ignored."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):  # a torn line
            row = json.loads(line)
            number = row["number"]
            if number < len(planned) and row["faults"] == [asdict(one) for one in planned[number].faults]:
                culprits = {int(one): right for one, right in row["culprits"].items()}
                case = type(planned[number])(**{**row, "culprits": culprits, "faults": planned[number].faults})
                found[number] = case
    return dict(sorted(found.items()))


def document(done: Sequence[Case], seed: int, timeout_s: float) -> dict[str, Any]:
    """Return the results with what is needed to judge them."""
    restart_s = sorted(seconds for case in done for seconds in case.restart_s)
    loads = sorted(case.load for case in done)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
        "timeout_s": timeout_s,
        "cores": len(os.sched_getaffinity(0)),
        "load": {"median": median(loads), "highest": loads[-1]} if loads else None,
        "runs": len(done),
        "right_runs": sum(case.is_right for case in done),
        "unplanned": sum(len(case.unplanned) for case in done),
        "hangs": sum("hangs" in told for case in done for told in case.unplanned),
        "wall_s": sum(case.wall_s for case in done),
        "restarts": len(restart_s),
        "restart_s": {"median": median(restart_s), "longest": restart_s[-1]} if restart_s else None,
        "kinds": table(done, lambda _, fault: fault.kind),
        "strategies": table(done, lambda case, _: case.strategy),
    }


def table(done: Sequence[Case], of: Callable[[Case, Fault], str]) -> list[dict[str, Any]]:
    """A row for each value of `of`: how many faults were planted, and for how many each check of their run holds."""
    totals: dict[str, Counter[str]] = {}
    for case in done:
        for number, fault in enumerate(case.faults):
            row = totals.setdefault(of(case, fault), Counter())
            row["planted"] += 1
            row.update(check for check in CHECKS if case.results.get(check))
            if number in case.culprits:
                row["named"] += 1
                row["culprit"] += case.culprits[number]
    names = ("planted", *CHECKS, "named", "culprit")
    return [{"of": of, **{name: row[name] for name in names}} for of, row in sorted(totals.items())]


def show(found: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    parts = []
    for title, key in (("fault", "kinds"), ("strategy", "strategies")):
        lines = [f"| {title} | {' | '.join(HEADER)} |", "|" + "---|" * (len(HEADER) + 1)]
        for row in [*found[key], _total(found[key])]:
            named = f"{row['culprit']} of {row['named']}" if row["named"] else "-"
            counts = [row["planted"], row["survived"], named, *(row[check] for check in CHECKS[1:])]
            lines.append(f"| {row['of']} | {' | '.join(map(str, counts))} |")
        parts.append("\n".join(lines))
    load, restart = found["load"], found["restart_s"]
    about = f"{found['right_runs']} of {found['runs']} runs are right in everything; {found['wall_s'] / 60:.0f} minutes"
    about += f" on {found['cores']} cores ({found['date'][:10]}, seed {found['seed']}"
    about += f"; load average {load['median']:.0f}, at most {load['highest']:.0f})." if load else ")."
    if found["unplanned"]:
        about += (
            f" {found['unplanned']} more attempts failed without a fault, {found['hangs']} of them because a rank was"
        )
        about += f" silent for the {found['timeout_s']:g} s after which the campaign's ranks hang."
    if restart:
        about += f" {found['restarts']} restarts: from failure to next step {restart['median']:.1f} s at the median,"
        about += f" {restart['longest']:.1f} s at most."
    return "\n\n".join([about, *parts])


def _total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"of": "all", **{name: sum(row[name] for row in rows) for name in rows[0] if name != "of"}} if rows else {}
