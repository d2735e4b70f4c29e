"""The lesson on real ranks: each cut of Y = X W is computed by ranks that hold only their blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelrun.base.errors import VerificationError
from parallelrun.distributed import comm
from parallelrun.models.matmul import network
from parallelrun.planner.resolve.freeze import filled
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config
from tests.pool import RanksFailed, run_ranks

MATMUL = {"model.name": "matmul", "model.preset": "matmul"}


def lines(overrides: dict[str, Any]) -> list[str]:
    config = tiny_config({**MATMUL, **overrides})
    plan = resolve(config)
    return network.run(filled(config, plan), plan, torch.device("cpu"), show=False)


def lines_without_reduce(overrides: dict[str, Any]) -> list[str]:
    comm.all_reduce = lambda *_, **__: None
    return lines(overrides)


def test_one_rank_multiplies_alone() -> None:
    told = "\n".join(lines({}))
    assert "X[0:4, 0:5]" in told and "W[0:5, 0:8]" in told and "Equal to X W" in told


def test_data_parallelism_cuts_rows_of_x_and_sums_gradients_of_w() -> None:
    told = "\n".join(run_ranks(2, lines, {"dp": 2})[0])
    assert "X[0:2, 0:5]" in told and "X[2:4, 0:5]" in told
    assert told.count("W[0:5, 0:8]") == 2
    assert told.count("forward: sends nothing") == 2
    assert told.count("backward: all-reduce of the partial dW (5x8 = 40 numbers) over dp, with ranks [0, 1]") == 2
    assert "Equal to X W, dX and dW" in told


def test_tensor_parallelism_cuts_columns_then_rows_of_w() -> None:
    told = "\n".join(run_ranks(2, lines, {"tp": 2})[0])
    columns, rows = told.split("tensor parallel, rows of W")
    assert "W[0:5, 0:4]" in columns and "W[0:5, 4:8]" in columns and columns.count("forward: sends nothing") == 2
    assert "all-reduce of the partial dX (4x5 = 20 numbers) over tp" in columns
    assert "W[0:3, 0:8]" in rows and "W[3:5, 0:8]" in rows
    assert rows.count("forward: all-reduce of the partial Y (4x8 = 32 numbers) over tp") == 2
    assert rows.count("backward: sends nothing") == 2


def test_numbers_shown_are_those_of_the_product() -> None:
    told = run_ranks(2, lines, {"tp": 2})[0]
    summed = next(i for i, line in enumerate(told) if "Y summed" in line)
    first_row = [float(number) for number in told[summed + 1].split()]
    x, w = ([j % 5 - 1 for j in range(5)], [[(2 * j + k) % 7 - 3 for k in range(8)] for j in range(5)])
    assert first_row == [sum(x[j] * w[j][k] for j in range(5)) for k in range(8)]


def test_a_forgotten_reduce_is_found() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, lines_without_reduce, {"tp": 2})
    assert isinstance(failure.value.failures[0].exception, VerificationError)
    assert "rank 0 (tensor parallel, columns of W)" in str(failure.value)


MESHES: dict[str, dict[str, Any]] = {
    "dp and tp": {"dp": 2, "tp": 2},
    "empty blocks of rows": {"dp": 8, "model.rows": 4},
    "empty blocks of columns": {"tp": 4, "model.inner": 3},
    "SUMMA": {"layout": "2d", "tp": 4},
    "stationary y": {"layout": "2d", "tp": 4, "strategy.tensor.form": "stationary_y"},
    "stationary x": {"layout": "2d", "tp": 4, "strategy.tensor.form": "stationary_x"},
    "stationary w": {"layout": "2d", "tp": 4, "strategy.tensor.form": "stationary_w"},
    "uneven 2x3": {"layout": "2d", "tp": 6, "grid": "2x3"},
    "2.5d": {"layout": "2.5d", "tp": 8, "depth": 2},
    "3d": {"layout": "3d", "tp": 8},
    "2d and dp": {"layout": "2d", "tp": 4, "dp": 2},
}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_same_product(name: str) -> None:
    overrides = MESHES[name]
    told = "\n".join(run_ranks(overrides.get("tp", 1) * overrides.get("dp", 1), lines, overrides)[0])
    assert "NOT equal" not in told and "Equal to X W, dX and dW" in told


def test_summa_shows_its_panels_step_by_step() -> None:
    told = "\n".join(run_ranks(4, lines, MESHES["SUMMA"])[0])
    assert "X[0:2, 0:3]" in told and "W[0:3, 0:4]" in told and "W[3:5, 4:8]" in told
    assert "step 1: X[0:2, 3:5] comes from rank 1 over col" in told
    assert "step 1: W[3:5, 0:4] comes from rank 2 over row" in told
    assert "Y after step 1[0:2, 0:4]" in told


def test_depth_sums_the_gradient_of_w_and_nothing_else() -> None:
    told = "\n".join(run_ranks(8, lines, MESHES["2.5d"])[0])
    assert told.count("all-reduce of the partial dW") == 8 and "over depth, with ranks [0, 4]" in told


def test_in_3d_each_axis_moves_one_matrix() -> None:
    told = run_ranks(8, lines, MESHES["3d"])[0]
    first = told[: next(i for i, line in enumerate(told) if "rank 1" in line)]
    moves = [
        line.split("(")[0].strip() + line.rpartition("over ")[2][:1]
        for line in first
        if line.startswith("     forward")
    ]
    assert moves == [
        "forward: all-gather of Xy",
        "forward: all-gather of Wx",
        "forward: reduce-scatter of the partial Yz",
    ]
