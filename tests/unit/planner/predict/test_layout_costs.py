"""The tensor layouts side by side: volumes and break-evens of the papers, and what the plan itself predicts."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from parallelrun.cli import main as program
from parallelrun.planner.facts.document import document
from parallelrun.planner.model.product import ActivationLayout, Product, transfers
from parallelrun.planner.model.product import forms as products
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.layout_costs import Comparison, Row, compare
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.plans.layouts import panel, sweep_row, sweep_table
from tests.plans import tiny_config

# Hidden is large, so that the norms' few numbers a row do not blur the papers' figures, which leave them out.
LARGE = {"model.hidden": 4096, "model.heads": 64, "model.seq": 128, "model.layers": 2, "global_batch": 64}
H, M = 4096, 128 * 64


def compared(overrides: dict[str, Any]) -> Comparison:
    config = tiny_config({**LARGE, **overrides})
    found = compare(resolve(config), config)
    assert found is not None
    return found


def by_name(found: Comparison) -> dict[str, Row]:
    return {row.layout: row for row in found.layouts}


@pytest.mark.parametrize(
    ("tp", "layout", "expected"),
    [  # the reference's derived break-evens: 2D 1.5 saved, SUMMA 12, 3D 1
        (4, "2d 2x2", 1.5),
        (4, "2d 2x2 summa", 12.0),
        (8, "3d 2x2x2", 1.0),
        (4, "2d 2x2 lean", 18 / 7),
    ],
)
def test_break_evens_are_those_of_the_reference(tp, layout, expected):
    assert by_name(compared({"tp": tp}))[layout].break_even == pytest.approx(expected, rel=0.01)


def test_the_reference_s_lean_figure_is_that_of_its_own_forms():
    """It multiplies the attention's output stationary-Y: 2.8. Stationary-X moves less there: 18/7, as above."""
    grid, sizes = ActivationLayout(("row",), ("col",)), {"row": 2, "col": 2}
    y, x = products.stationary_y(grid), products.stationary_x(grid)
    assert lean_break_even([y, y, y, x], sizes) == pytest.approx(2.77, abs=0.01)
    assert lean_break_even([y, x, y, x], sizes) == pytest.approx(18 / 7)


def lean_break_even(forms: list[Product], sizes: dict[str, int]) -> float:
    """M/h at which a gpt layer's products receive what 1D's do on as many ranks; volumes are lines in M."""

    def volume(m: int) -> float:
        linears = zip(forms, [(1, 3), (1, 1), (1, 4), (4, 1)])
        moved = (transfers(f, m, k * H, n * H, sizes, save_gathered=False) for f, (k, n) in linears)
        return sum(transfer.received(sizes) for layer in moved for transfer in layer)

    slope = (volume(2 * H) - volume(H)) / H
    return (volume(H) - slope * H) / (8 * 3 / 4 * H - slope) / H


@pytest.mark.parametrize(("layout", "tp"), [("2d 2x2", 4), ("2d 2x2 lean", 4), ("3d 2x2x2", 8), ("2d 2x4", 8)])
def test_a_layout_receives_less_than_1d_just_above_its_break_even_and_more_just_below(layout, tp):
    """With samples of one token, M is the microbatch: the forms are chosen at that M."""
    short = {"tp": tp, "model.seq": 1, "model.hidden": 1024, "model.heads": 16}
    break_even = by_name(compared(short))[layout].break_even * 1024
    for factor, less in ((1.02, True), (0.98, False)):
        rows = by_name(compared({**short, "global_batch": round(factor * break_even / 8) * 8}))
        assert (rows[layout].figures.received_bytes < rows["1d"].figures.received_bytes) == less


def test_always_and_never():
    assert by_name(compared({"tp": 16}))["2d 4x4"].break_even == 0  # weights can stay where they are: less at any M
    assert compared({"tp": 4, "layout": "2d", "grid": "1x4"}).chosen.break_even is None


@pytest.mark.parametrize(
    ("overrides", "elements"),
    [
        ({"tp": 4}, 6 * M * H),
        ({"tp": 4, "layout": "2d"}, 2 * M * H + 6 * H**2),
        ({"tp": 16, "layout": "2d"}, 1.5 * M * H + 4.5 * H**2),
        ({"tp": 64, "layout": "2d", "strategy.tensor.form": "summa"}, 2.30 * M * H + 3.94 * H**2),
        ({"tp": 64, "layout": "3d"}, 1.5 * M * H + 1.125 * H**2),
    ],
    ids=str,
)
def test_volumes_are_those_of_the_reference_s_table(overrides, elements):
    figures = compared(overrides).chosen.figures
    assert figures.received_elements == pytest.approx(elements, rel=0.005)
    assert figures.received_bytes == 4 * figures.received_elements


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("1d", {"tp": 4}),
    ("1d sequence", {"tp": 4, "strategy.tensor.sequence_parallel": True}),
    ("2d 2x2", {"tp": 4, "layout": "2d", "dp": 2}),
    ("2d 2x2 lean", {"tp": 4, "layout": "2d", "strategy.tensor.save_gathered": False}),
    ("2d 2x2 summa", {"tp": 4, "layout": "2d", "strategy.tensor.form": "summa", "pp": 2}),
    ("2d 4x2", {"tp": 8, "layout": "2d", "grid": "4x2"}),
    ("2d 2x2 stationary_w", {"tp": 4, "layout": "2d", "strategy.tensor.form": "stationary_w"}),
    ("2.5d 2x2x2", {"tp": 8, "layout": "2.5d"}),
    ("2.5d 2x2x2 lean", {"tp": 8, "layout": "2.5d", "strategy.tensor.save_gathered": False}),
    ("3d 2x2x2", {"tp": 8, "layout": "3d", "precision.name": "bf16"}),
    ("2d 2x2", {"tp": 4, "layout": "2d", "cp": 2}),
]


@pytest.mark.parametrize(("name", "overrides"), PLANS, ids=[name for name, _ in PLANS])
def test_the_plan_s_own_layout_is_marked_and_has_the_figures_that_the_plan_predicts(name, overrides):
    config = tiny_config({**LARGE, **overrides})
    plan = resolve(config)
    found = compare(plan, config)
    assert [row.layout for row in found.layouts if row.chosen] == [name]
    strategy, block = plan.tensor, plan.spec.block("layers.1")
    rows = strategy.collectives((block,), plan)
    sent = sum(prediction.wire_bytes(row, prediction.group_size(plan, row.axis)) for row in rows)
    figures = found.chosen.figures
    assert plan.batch.microbatches * figures.received_bytes == sent
    assert figures.saved_bytes == strategy.saved_bytes(block, plan)
    numels = (strategy.layout(p, plan).local_numel(p.shape, plan.mesh.sizes, {}) for p in block.parameters)
    assert figures.weight_bytes == 4 * sum(numels)


def test_steps_are_messages_one_after_the_other():
    rows = by_name(compared({"tp": 4}))
    assert rows["1d"].figures.steps == 4 * 2 * 3
    assert rows["2d 2x2 summa"].figures.steps == 4 * 6 * 2 + 2 * 3  # 6 q messages a product, one step each; two norms


def test_2_5d_sums_gradients_over_depth_besides():
    rows = by_name(compared({"tp": 8}))
    weights = 12 * H**2 / 4
    assert rows["2.5d 2x2x2"].figures.once_bytes == pytest.approx(4 * 2 * (2 - 1) / 2 * weights, rel=0.01)
    assert rows["3d 2x2x2"].figures.once_bytes < 5e-3 * 4 * weights


def test_what_is_not_legal_stands_with_its_reason_once():
    rows = by_name(compared({"tp": 4}))
    assert [name for name, row in rows.items() if row.figures is None] == ["2.5d", "3d"]
    assert all("tp=4" in rows[name].reason and not rows[name].chosen for name in ("2.5d", "3d"))
    odd = by_name(compared({"tp": 4, "global_batch": 1}))
    assert "2d 2x2 lean" not in odd and "micro_batch=1" in odd["2d 2x2"].reason


def test_small_tp_and_large_dp_as_derived_in_the_reference():
    """64 ranks as 1D on 4 x dp 16: 0.375 M h per layer and microbatch and 5.6 h^2 of gradients once per step."""
    m = 8 * M
    found = compared({"tp": 64, "layout": "3d", "global_batch": 8 * 64, "cluster.gpus_per_node": 4}).inside_node
    assert (found.tp, found.dp, found.wins) == (4, 16, True)
    assert found.received_bytes == pytest.approx(4 * (0.375 * m * H + 5.625 * H**2), rel=0.005)
    assert found.plan_received_bytes == pytest.approx(4 * (1.5 * m * H + 1.125 * H**2), rel=0.005)
    assert found.weight_bytes == pytest.approx(16 * found.plan_weight_bytes, rel=0.01) and found.divides


def test_where_weights_outweigh_tokens_the_grid_wins():
    found = compared({"tp": 64, "layout": "2d", "global_batch": 8, "cluster.gpus_per_node": 4})
    assert (
        not found.inside_node.wins
        and " receives less than 1d at this or any smaller tp" in " ".join(shown(found).split())
        and not found.inside_node.divides
    )


def test_against_2_5d_no_more_ranks_than_a_slice_has():
    assert compared({"tp": 8, "layout": "2.5d", "global_batch": 8}).inside_node.tp <= 4


@pytest.mark.parametrize("overrides", [{"tp": 1}, {"tp": 2, "model.name": "mlp"}], ids=str)
def test_nothing_is_compared_without_a_split_language_model(overrides):
    config = tiny_config(overrides)
    assert compare(resolve(config), config) is None


def test_the_document_carries_it():
    config = tiny_config({"tp": 4, "layout": "2d"})
    found = json.loads(json.dumps(document(resolve(config), config), allow_nan=False))["layouts"]
    assert found["tp"] == 4 and [row["chosen"] for row in found["layouts"]].count(True) == 1
    assert {"received_bytes", "saved_bytes", "steps"} <= set(found["layouts"][0]["figures"])


def shown(found: Comparison, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(panel(found))
    return file.getvalue()


@pytest.mark.parametrize("width", [76, 100])
@pytest.mark.parametrize(("name", "overrides"), PLANS[2:], ids=[name for name, _ in PLANS[2:]])
def test_on_screen_a_line_per_layout_and_none_is_too_wide(name, overrides, width):
    found = compared(overrides)
    lines = shown(found, width).splitlines()
    assert max(map(len, lines)) <= width
    for row in found.layouts:
        assert sum(line.lstrip("* ").startswith((f"{row.layout} ", f"{row.layout}:")) for line in lines) >= 1
    assert any(line.startswith(f"* {name} ") for line in lines)


def test_a_sweep_shows_each_point_in_its_own_layout():
    points = [(number, sweep_row(compared(overrides))) for number, (_, overrides) in enumerate(PLANS[:5])]
    file = io.StringIO()
    sweep_table(points, Console(file=file, width=100))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert [" ".join(line[1:3]) for line in lines if line[:1] in (["2"], ["3"])] == ["2d 2x2", "2d 2x2"]


def test_the_sweep_of_a_large_model_ends_with_one_table_over_its_points(capsys, monkeypatch, tmp_path, composed_once):
    monkeypatch.chdir(tmp_path)
    line = "plan -m model=mt_nlg_530b strategy=tp,tp2d,tp25d,tp3d tp=64 model.layers=2"
    assert program.main(line.split()) == 0
    *_, last = capsys.readouterr().out.split("layouts side by side: ")
    for name in ("1d 64", "2d 8x8", "2.5d 4x4x4", "3d 4x4x4"):
        assert f" {name} " in last
    assert last.rstrip().endswith("4 of 4 points are legal") and not list(tmp_path.iterdir())


def test_ranks_of_cp_have_rows_of_their_own():
    """Half of the positions: in 1D half of what is received; on a grid other forms may be the best."""
    whole, halves = (compared({"tp": 4, "cp": cp}) for cp in (1, 2))
    assert halves.rows == whole.rows // 2 and by_name(whole).keys() == by_name(halves).keys()
    one, other = by_name(whole)["1d"].figures, by_name(halves)["1d"].figures
    assert one.received_bytes == 2 * other.received_bytes and one.weight_bytes == other.weight_bytes
    one, other = by_name(whole)["2d 2x2"], by_name(halves)["2d 2x2"]
    assert one.figures.received_bytes > other.figures.received_bytes and one.break_even == other.break_even
