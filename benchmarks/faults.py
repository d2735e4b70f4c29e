"""The fault campaign: seeded faults in small trainings, which must survive them with the bits of an undisturbed run.

    python -m benchmarks.faults --faults 300 --seed 0

Every run has several faults, one after the other, and as many restarts. Its ranks are forked from a launcher that is
itself forked from this process, which has imported torch. After each run is checked: it ended with exit code 0; the
failing rank of each attempt is the one with the fault; losses, norms and final weights have the bits of the run without
faults; `metrics.jsonl` has every step once; no process is left. Each run's result is written as the run ends: the same
command with the same `--rows FILE` goes on where another one stopped, and shards (`--from`, `--runs`) may share a file.
The tables are printed, and written to `results/` once all runs are there (`docs/failures.py` puts them on the page).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import fault_report
from benchmarks.fault_cases import HARMLESS, LOST, PER_RUN, STRATEGIES, Case, cases, planned
from benchmarks.fault_injection import WORKER, Fault, variable
from benchmarks.fault_report import CHECKS
from parallelrun.api.results import PlannedRun
from parallelrun.base.errors import EXIT_MISMATCH
from parallelrun.checkpoint.find import latest
from parallelrun.launch.host.job import Job
from parallelrun.launch.ranks import processes
from parallelrun.launch.ranks import rank as ranks
from parallelrun.report.records import attempts
from parallelrun.report.records.attempts import Attempt

GONE_S = 5.0  # for the processes of a run to end


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
    blame(case, history, directories[0], code)
    case.restart_s = [
        after.stepping - before.ended for before, after in pairwise(history) if before.ended and after.stepping
    ]
    if not case.is_right or case.unplanned:
        case.told = f"exit {code}; {(folder / 'a' / 'stderr').read_text()[-1500:]}"


def blame(case: Case, history: Sequence[Attempt], directory: Path, code: int) -> None:
    """Find for each fault that ends an attempt the rank that was named for it, and attempts that no fault has ended.

    A fault belongs to the attempt in whose time it has happened. What follows a damaged checkpoint is no new fault.
    """
    happened: dict[int, int] = {}  # attempt -> fault
    for number, one in enumerate(case.faults):
        marker = directory / f"fault_{number}"
        if one.kind in (*HARMLESS, LOST) or not marker.exists():
            if one.kind not in (*HARMLESS, LOST) and code == 0:
                case.culprits[number] = False
            continue
        attempt = max(each.number for each in history if each.began <= marker.stat().st_mtime)
        happened[attempt] = number
        case.culprits[number] = history[attempt - 1].rank == one.rank
    others = [
        each for each in history if each.error and each.number not in happened and each.exit_code != EXIT_MISMATCH
    ]
    case.unplanned = [f"attempt {each.number}: {each.error}" for each in others]


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
    from parallelrun.launch.entry.start import start

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


def main() -> int:
    """Run the campaign, or what is left of it. Return 1 if a check of any run fails, or a wrong rank is named."""
    arguments = _arguments()
    names = arguments.strategies.split(",")
    rows = arguments.rows or Path(tempfile.mkdtemp(prefix="parallelrun-faults-")) / "rows.jsonl"
    planned_cases = list(cases(arguments.faults, arguments.seed, names))
    known = fault_report.known(rows, planned_cases)
    last = arguments.begin + arguments.runs if arguments.runs else len(planned_cases)
    left = [case for case in planned_cases[arguments.begin : last] if case.number not in known]
    if left:
        print(f"{len(left)} runs; each is written to {rows} as it ends", flush=True)
        _run_all(left, rows, arguments.timeout)
    done = list(fault_report.known(rows, planned_cases).values())
    document = fault_report.document(done, arguments.seed, arguments.timeout)
    print(fault_report.show(document))
    if arguments.name and len(done) == len(planned_cases):
        file = Path(__file__).parent / "results" / f"{document['date'][:10]}-{arguments.name}.json"
        file.write_text(json.dumps(document, indent=2) + "\n")
        print(f"written to {file}")
    return 0 if all(case.is_right for case in done) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds after which a rank hangs")
    parser.add_argument("--from", dest="begin", type=int, default=0, help="the first run of this shard")
    parser.add_argument("--runs", type=int, default=0, help="how many runs this shard has; 0: all that follow")
    parser.add_argument("--rows", type=Path, help="a line for each run that has ended; those in it are not run again")
    parser.add_argument("--name", default="faults", help="results/<date>-NAME.json; empty: do not write")
    return parser.parse_args()


def _run_all(left: Sequence[Case], rows: Path, timeout_s: float) -> None:
    """Run cases one after the other; keep the files of those that fail."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first = planned(left[0].strategy, PER_RUN)
    processes.preload(Job(first.config, first.plan, Path(), WORKER))
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="parallelrun-faults-"))
    known = references(list(dict.fromkeys(case.strategy for case in left)), folder / "references")
    for case in left:
        case_began, own = time.monotonic(), folder / str(case.number)
        run(case, own, timeout_s, known[case.strategy])
        case.wall_s, case.load = time.monotonic() - case_began, os.getloadavg()[0]
        fault_report.append(rows, case)
        kinds = ", ".join(f"{one.kind} (rank {one.rank})" for one in case.faults)
        verdict = "ok" if case.is_right else f"{case.results} {case.culprits} {own}\n{case.told}".rstrip()
        verdict += f" unplanned: {case.unplanned}\n{case.told}" if case.is_right and case.unplanned else ""
        print(f"{time.monotonic() - began:6.0f} s  {case.number} {case.strategy}: {kinds}: {verdict}", flush=True)
        if case.is_right:
            shutil.rmtree(own)
    if all(case.is_right for case in left):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
