"""The scores of the predicted time of a step on published measurements, and what is written about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import foresight
from benchmarks.foresight import Row, cases, planned, rows_of, scores, sets, table

ROOT = Path(__file__).parents[2]
STORED = json.loads(max(ROOT.glob("benchmarks/results/*-foresight.json")).read_text())["rows"]
MIXTRAL = {
    "set": "other", "name": "", "gpu": "H100", "N": "64", "h": "4096", "L": "32", "a": "32", "kv": "8", "ffn": "14336",
    "V": "32000", "s": "4096", "gbs": "256", "mbs": "1", "tp": "2", "pp": "4", "dp": "8", "ep": "8",
    "v": "1", "recomp": "none",
    "sp": "1", "data": "zero1", "prec": "bf16", "llama": "1", "tied": "0", "inter": "50", "experts": "8",
    "efn": "14336", "topk": "2", "shared": "0", "dense": "0",
}  # fmt: skip


def test_the_documented_scores_are_the_stored_ones():
    assert table(STORED) in (ROOT / "docs" / "measured.md").read_text()


@pytest.mark.parametrize(
    ("name", "every"),
    [("fit_sc21_table1", 1), ("dev_mcore_h100", 1), ("dev_vtrain_single_half", 50), ("dev_llmfoundry_a100", 6)],
)
def test_the_stored_scores_are_those_of_the_program(name, every):
    found = next(one for one in STORED if one["case"] == name)
    stored, rows = found["errors"], list(rows_of(name, every))
    assert len(rows) >= 9
    if every == 1:
        assert {key: found[key] for key in ("held", "spread", "mape")} == pytest.approx(
            {key: scores(rows)[key] for key in ("held", "spread", "mape")}, abs=1e-3
        )
    for row in rows:
        assert row.predicted / row.measured - 1 == pytest.approx(stored[row.name], abs=1e-3), row.name


def test_every_set_is_predicted_better_than_by_a_constant_rate():
    named = {one["case"]: one for one in STORED}
    assert {one.partition(":")[0] for one in named} == set(sets())
    for name in set(sets()) - {"dev_dgxc_405b_gb200"}:  # of which all rows have one plan but dp
        assert named[name]["mape"] < named[name]["constant_mape"], name
    for name, most in (("fit_sc21_table1", 0.03), ("dev_vtrain_single_half", 0.12), ("dev_llmfoundry_a100", 0.12),
                       ("dev_mcore_h100", 0.12), ("dev_torchtitan_h100", 0.10), ("dev_dgxc_405b_gb200", 0.08),
                       ("dev_qwen3_moe_h100", 0.20), ("dev_nemo_fp8", 0.08)):  # fmt: skip
        assert named[name]["mape"] < most, name
    assert named["dev_vtrain_single_half"]["regret_top3"] < 0.03
    assert named["dev_ultrascale_3b"]["regret_top3"] < 0.03 and named["dev_ultrascale_3b"]["mape"] < 0.35
    assert named["dev_ultrascale_3b: other rows"]["regret_top3"] < 0.03
    assert named["dev_ultrascale_3b: other rows"]["mape"] < 0.15


def test_the_bounds_hold_four_of_five_rows_and_are_narrow():
    predicted = [one for one in STORED if one["case"].startswith("dev_") and ":" not in one["case"]]
    number = sum(one["rows"] for one in predicted)
    assert 0.8 <= sum(one["rows"] * one["held"] for one in predicted) / number < 0.83
    assert sum(one["rows"] * one["spread"] for one in predicted) / number < 0.29


def test_kinds_of_rows_are_scored_beside_the_set():
    rows = [Row(str(i), "", kind, 1.0, 1.0, 0.9, 1.1, 1.0) for i, kind in enumerate(("", "", "tp > 8"))]
    found = {case: len(some) for case, some in cases("a", rows)}
    assert found == {"a": 3, "a: other rows": 2, "a: tp > 8": 1}
    assert [case for case, _ in cases("a", rows[:2])] == ["a"]


def test_scores_of_rows():
    rows = [Row(str(i), "g", "", measured, predicted, 0.5, 1.5, 1.0)
            for i, (measured, predicted) in enumerate([(1.0, 1.1), (2.0, 1.0), (4.0, 4.0)])]  # fmt: skip
    found = scores(rows)
    assert found["mape"] == pytest.approx(0.6 / 3) and found["bias"] == pytest.approx(-0.4 / 3)
    assert found["held"] == pytest.approx(1 / 3)
    assert found["regret_top1"] == pytest.approx(1.0) and found["regret_top3"] == 0.0
    assert found["spearman"] == pytest.approx(0.5)


def test_a_row_with_experts_and_of_an_unlisted_program():
    plan, config = planned(MIXTRAL)
    assert plan.spec.num_parameters == pytest.approx(46.7e9, rel=0.01) and plan.mesh.size("ep") == 8
    assert plan.stack.name == "parallelrun" and config.cluster.name == "h100_dgx"
    assert foresight.kind_of(MIXTRAL) == ""
