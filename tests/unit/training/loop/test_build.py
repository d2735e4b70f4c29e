"""Which runs replace torch's products: those of which a microbatch has a product that is large enough to gain."""

from __future__ import annotations

import pytest
import torch

from parallelrun.distributed import torch_private
from parallelrun.distributed.torch_private.products import SMALLEST
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop import build as building
from tests.plans import tiny_config

SIZES = {"model.hidden": 64, "model.heads": 4, "model.seq": 32, "model.layers": 1, "model.vocab": 128}


@pytest.mark.parametrize(
    ("overrides", "rows", "columns"),
    [
        ({"micro_batch": 2}, 2 * 32, 4 * 64),
        ({"micro_batch": 2, "tp": 2}, 2 * 32, 4 * 64 // 2),
        ({"micro_batch": 2, "cp": 2}, 2 * 32 // 2, 4 * 64),
    ],
)
def test_the_largest_product_is_of_the_rows_of_a_microbatch(overrides, rows, columns):
    """Of the MLP's weight, of 64 x 256 numbers."""
    assert building._largest_product(resolve(tiny_config({**SIZES, **overrides}))) == rows * 64 * columns


@pytest.mark.parametrize(("micro_batch", "is_asked"), [(1, False), (16, True)])
def test_products_are_replaced_where_one_is_large(micro_batch, is_asked, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch_private, "use_fast_products", asked.append)
    config = tiny_config({**SIZES, "micro_batch": micro_batch, "global_batch": 16})
    building.build(config, resolve(config), torch.device("cpu"))
    assert [largest >= SMALLEST for largest in asked] == [is_asked]
