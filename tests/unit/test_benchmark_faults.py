"""The fault campaign's choice of faults, and its table."""

from __future__ import annotations

import os

from benchmarks.fault_cases import HARMLESS, LOST, PER_RUN, Case, cases
from benchmarks.fault_injection import Fault
from benchmarks.fault_report import CHECKS, append, document, known, show
from benchmarks.faults import blame
from parallelrun.report.records.attempts import Attempt


def test_a_seed_chooses_the_same_faults_in_steps_that_all_are_reached():
    first, again, other = (list(cases(24, seed, ["ptdp", "ring"])) for seed in (3, 3, 4))
    assert first == again != other
    assert sum(len(case.faults) for case in first) == 24 and {case.strategy for case in first} == {"ptdp", "ring"}
    for case in first:
        steps = [fault.step for fault in case.faults]
        assert steps == sorted(set(steps)) and len(steps) == PER_RUN
        assert all(fault.kind != LOST for fault in case.faults[:-1])  # nothing comes after it in the same launcher


def test_a_failed_check_is_in_the_tables(tmp_path):
    planned = list(cases(16, 3, ["ptdp", "ring"]))
    for case in planned:
        case.results = {check: check != "same bits" or case.number == 1 for check in CHECKS}
        fatal = [number for number, one in enumerate(case.faults) if one.kind not in (*HARMLESS, LOST)]
        case.culprits = {number: number != fatal[0] for number in fatal}
        append(tmp_path / "rows", case)
    with (tmp_path / "rows").open("a") as file:
        file.write('{"number": 1, "stra')  # torn
    done = known(tmp_path / "rows", list(cases(16, 3, ["ptdp", "ring"])))
    assert list(done.values()) == planned
    assert not known(tmp_path / "rows", list(cases(16, 4, ["ptdp", "ring"])))  # other faults
    found = document(planned, 3, 4.0)
    assert (found["runs"], found["right_runs"]) == (2, 0)
    for key in ("kinds", "strategies"):
        assert sum(row["planted"] for row in found[key]) == 16
        assert sum(row["same bits"] for row in found[key]) == 8
        assert sum(row["named"] - row["culprit"] for row in found[key]) == 2
    assert [row["of"] for row in found["strategies"]] == ["ptdp", "ring"]
    text = show(found)
    assert "| all | 16 | 16 | " in text and "0 of 2 runs are right" in text


def test_a_fault_belongs_to_the_attempt_in_which_it_happened(tmp_path):
    kinds = [("kill", 1), ("slow rank", 0), ("flipped bit", 2), ("stop", 3)]
    case = Case(0, "ptdp", [Fault(kind, rank, 4 + number) for number, (kind, rank) in enumerate(kinds)])
    ended = [(1, 6, "died"), (0, 7, "hangs"), (2, 6, "died"), (0, 4, "damaged"), (0, 7, "hangs"), (None, 0, "")]
    history = [
        Attempt(number, 4, {}, began=100.0 * number, error=error, rank=rank, exit_code=code)
        for number, (rank, code, error) in enumerate(ended, 1)
    ]
    for number, when in enumerate((150, 250, 350, 550)):
        (tmp_path / f"fault_{number}").touch()
        os.utime(tmp_path / f"fault_{number}", (when, when))
    blame(case, history, tmp_path, 0)
    assert case.culprits == {0: True, 2: True, 3: False}  # rank 3 was stopped, and rank 0 was blamed
    assert case.unplanned == ["attempt 2: hangs"]
    (tmp_path / "fault_3").unlink()
    blame(case, history, tmp_path, 0)
    assert not case.culprits[3], "a fault that ended no attempt"
