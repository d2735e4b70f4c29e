"""The fault campaign's choice of faults, and its table."""

from __future__ import annotations

from benchmarks.fault_cases import HARMLESS, LOST, PER_RUN, cases
from benchmarks.faults import CHECKS, show, table


def test_a_seed_chooses_the_same_faults_in_steps_that_all_are_reached():
    first, again, other = (list(cases(24, seed, ["ptdp", "ring"])) for seed in (3, 3, 4))
    assert first == again != other
    assert sum(len(case.faults) for case in first) == 24 and {case.strategy for case in first} == {"ptdp", "ring"}
    for case in first:
        steps = [fault.step for fault in case.faults]
        assert steps == sorted(set(steps)) and len(steps) == PER_RUN
        assert all(fault.kind != LOST for fault in case.faults[:-1])  # nothing comes after it in the same launcher


def test_a_failed_check_is_in_the_table():
    case = next(cases(8, 3, ["ptdp"]))
    case.results = {check: check != "same bits" for check in CHECKS if check != "culprit"}
    case.culprits = {number: number != 0 for number, one in enumerate(case.faults) if one.kind not in (*HARMLESS, LOST)}
    rows = {row["kind"]: row for row in table([case])}
    assert sum(row["faults"] for row in rows.values()) == 8 and not any(row["same bits"] for row in rows.values())
    assert sum(row["named"] - row["culprit"] for row in rows.values()) == (0 in case.culprits)
    assert show(list(rows.values())).count("\n") == len(rows) + 1
