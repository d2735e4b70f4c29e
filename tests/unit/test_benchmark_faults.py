"""The fault campaign's choice of faults, and its table."""

from __future__ import annotations

from benchmarks.fault_cases import HARMLESS, LOST, PER_RUN, cases
from benchmarks.fault_report import CHECKS, append, document, known, show


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
