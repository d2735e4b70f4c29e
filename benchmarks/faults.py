"""The fault campaign: seeded faults in small trainings, which must survive them with the bits of an undisturbed run.

    python -m benchmarks.faults --faults 300 --seed 0

Every run has several faults, one after the other, and as many restarts. Its ranks are forked from a launcher that is
itself forked from this process, which has imported torch. After each run is checked: it ended with exit code 0; the
failing rank of each attempt is the one with the fault; losses, norms and final weights have the bits of the run without
faults; `metrics.jsonl` has every step once; no process is left. The table is printed and written to `results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fault_cases import HARMLESS, LOST, PER_RUN, STRATEGIES, Case, cases, planned
from benchmarks.fault_injection import WORKER, Fault, variable
from parallelrun.api.results import PlannedRun
from parallelrun.checkpoint.find import latest
from parallelrun.launch import processes
from parallelrun.launch import rank as ranks
from parallelrun.launch.rank import Job
from parallelrun.run_records import attempts

GONE_S = 5.0  # for the processes of a run to end
CHECKS = ("survived", "culprit", "same bits", "no orphan", "no lost sample")


def run(case: Case, folder: Path, timeout_s: float, reference: Mapping[str, Any]) -> None:
    """Run a case, after a lost launcher once more, and check it."""
    found = planned(case.strategy, PER_RUN)
    folder.mkdir(parents=True)
    code = _launch(found, folder / "a", case.faults, timeout_s, None)
    if not list((folder / "a" / "runs").glob("*/*/config.yaml")):
        case.results = dict.fromkeys(CHECKS, False)
        case.told = f"exit {code} before the run began; {(folder / 'a' / 'stderr').read_text()[-1500:]}"
        return
    directories = [_directory(folder / "a")]
    lost = case.faults[-1].kind == LOST and code < 0
    orphans = _survivors(folder / "a")
    if lost:
        code = _launch(found, folder / "b", [], timeout_s, directories[0])
        directories.append(_directory(folder / "b"))
        orphans += _survivors(folder / "b")
    history = attempts.read(directories[0])
    rows = _rows(directories)
    expected = reference["rows"]
    case.results = {
        "survived": code == 0,
        "same bits": rows == expected and _weights(directories[-1]) == reference["weights"],
        "no orphan": not orphans,
        "no lost sample": [row[0] for row in rows] == [row[0] for row in expected],
    }
    failed = [one.rank for one in history if one.error and one.exit_code != 4]
    fatal = [number for number, one in enumerate(case.faults) if one.kind not in (*HARMLESS, LOST)]
    case.culprits = {number: rank == case.faults[number].rank for number, rank in zip(fatal, failed)}
    case.restart_s = [
        after.stepping - before.ended for before, after in pairwise(history) if before.ended and after.stepping
    ]
    if not all(case.results.values()):
        case.told = f"exit {code}; {(folder / 'a' / 'stderr').read_text()[-1500:]}"


def _launch(found: PlannedRun, folder: Path, faults: Sequence[Fault], timeout_s: float, resume: Path | None) -> int:
    """Run one launcher in a session of its own; return its exit code, or minus the number of a signal."""
    folder.mkdir(parents=True)
    here = os.getpid()
    pid = os.fork()
    if pid == 0:
        ranks.leave_with_parent(here)
        os.setsid()
        (folder / "session").write_text(str(os.getpid()))
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.environ.update(variable(faults))
        code = 99
        try:
            code = _start(found, folder, len(faults), timeout_s, resume)
        finally:
            ranks.end(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _start(found: PlannedRun, folder: Path, num_faults: int, timeout_s: float, resume: Path | None) -> int:
    from parallelrun.cli import errors
    from parallelrun.launch.start import start

    config = replace(found.config, runs=str(folder / "runs"), timeout_s=timeout_s, restarts=2 * num_faults + 1)
    config = replace(config, resume=str(resume) if resume else None)
    try:
        return start(config, found.plan, found.words, found.words[1:], worker=WORKER)
    except Exception as error:
        return errors.report(error, False)


def _directory(folder: Path) -> Path:
    return next((folder / "runs").glob("*/*/config.yaml")).parent


def _rows(directories: Sequence[Path]) -> list[tuple[Any, ...]]:
    """Step, loss and norm of every step; of a run that another one continued, those before that one's first."""
    out: list[tuple[Any, ...]] = []
    for directory in directories:
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        own = [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]
        out = [row for row in out if row[0] < own[0][0]] + own if own else out
    return out


def _weights(directory: Path) -> dict[str, str] | None:
    """The sha256 of each file of the last checkpoint; None without one."""
    found = latest(directory)
    return {name: digest for name, (_, digest) in _index(found).items()} if found else None


def _index(checkpoint: Path) -> dict[str, Any]:
    from parallelrun.checkpoint.schema import read_index

    return dict(read_index(checkpoint).files)


def _survivors(folder: Path) -> list[int]:
    """Processes of the launcher's session that still run after GONE_S seconds."""
    session = (folder / "session").read_text()
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _in_session(pid, session)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _in_session(pid: int, session: str) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[3] == session and fields[0] not in "ZX"


def references(strategies: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The rows and the weights of each training without faults."""
    out = {}
    for strategy in strategies:
        code = _launch(planned(strategy, PER_RUN), folder / strategy, [], 120.0, None)
        if code:
            raise SystemExit(f"{strategy}: exit {code}\n{(folder / strategy / 'stderr').read_text()}")
        directory = _directory(folder / strategy)
        out[strategy] = {"rows": _rows([directory]), "weights": _weights(directory)}
    return out


def table(done: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each kind of fault: how many were planted, and of how many each check holds."""
    totals: dict[str, Counter[str]] = {}
    for case in done:
        for number, fault in enumerate(case.faults):
            row = totals.setdefault(fault.kind, Counter())
            row["faults"] += 1
            row.update(check for check in CHECKS if case.results.get(check))
            if number in case.culprits:
                row["named"] += 1
                row["culprit"] += case.culprits[number]
    names = ("faults", *CHECKS, "named")
    return [{"kind": kind, **{name: row[name] for name in names}} for kind, row in totals.items()]


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown."""
    lines = ["| fault | planted | survived | right rank named | same bits | no process left | every sample once |"]
    lines.append("|" + "---|" * 7)
    for row in rows:
        named = f"{row['culprit']} of {row['named']}" if row["named"] else "-"
        counts = [row["survived"], named, row["same bits"], row["no orphan"], row["no lost sample"]]
        lines.append(f"| {row['kind']} | {row['faults']} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> int:
    """Run the campaign. Return 1 if a check of any run fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds after which a rank hangs")
    parser.add_argument("--name", default="faults", help="results/<date>-NAME.json; empty: do not write")
    arguments = parser.parse_args()
    names = arguments.strategies.split(",")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first = planned(names[0], PER_RUN)
    processes.preload(Job(first.config, first.plan, Path(), WORKER))
    began, done = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(prefix="parallelrun-faults-"))
    try:
        known = references(names, folder / "references")
        for number, case in enumerate(cases(arguments.faults, arguments.seed, names)):
            run(case, folder / str(number), arguments.timeout, known[case.strategy])
            done.append(case)
            kinds = ", ".join(f"{one.kind} (rank {one.rank})" for one in case.faults)
            is_right = all([*case.results.values(), *case.culprits.values()])
            verdict = "ok" if is_right else f"{case.results} {case.culprits}\n{case.told}".rstrip()
            print(f"{time.monotonic() - began:6.0f} s  {case.strategy}: {kinds}: {verdict}", flush=True)
            if not case.told:
                shutil.rmtree(folder / str(number))
    finally:
        if all(not case.told for case in done):
            shutil.rmtree(folder, ignore_errors=True)
    rows = table(done)
    print(show(rows))
    restart_s = sorted(seconds for case in done for seconds in case.restart_s)
    median = restart_s[len(restart_s) // 2] if restart_s else None
    print(f"{len(restart_s)} restarts, failure to next step: median {median} s, longest {max(restart_s, default=0)} s")
    if arguments.name:
        write(arguments, rows, restart_s, time.monotonic() - began)
    return 0 if all(all(case.results.values()) for case in done) else 1


def write(
    arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]], restart_s: Sequence[float], wall_s: float
) -> None:
    """Write the results with what is needed to judge them."""
    now = datetime.now(timezone.utc)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "seed": arguments.seed,
        "timeout_s": arguments.timeout,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "wall_s": wall_s,
        "restart_s": {"median": restart_s[len(restart_s) // 2], "longest": restart_s[-1]} if restart_s else None,
        "rows": list(rows),
    }
    file = Path(__file__).parent / "results" / f"{now:%Y-%m-%d}-{arguments.name}.json"
    file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
