"""Initial weights: drawn by block from (seed, name), so any slice under any layout is a slice of one tensor."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from parallelrun.base.layout import Layout
from parallelrun.base.precision import TABLE
from parallelrun.distributed.mesh import build_mesh
from parallelrun.models import initialise
from parallelrun.models.gpt import network
from parallelrun.planner.model.model_spec import Initialiser, ParameterSpec
from tests.plans import tiny_plan

WEIGHT = ParameterSpec("layers.0.mlp.up.up.weight", (37, 12), Initialiser("normal", 0.5), "column_parallel")
SIZES = {"tp": 2, "dp": 3}
LAYOUTS = [
    Layout(((), ())),
    Layout((("tp",), ())),
    Layout(((), ("tp",))),
    Layout((("tp", "dp"), ())),
    Layout((("dp",), ("tp",))),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows of WEIGHT a block: shards start and end inside blocks."""
    monkeypatch.setattr(initialise, "BLOCK_BYTES", 5 * 12 * 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.dims))
@pytest.mark.parametrize("kind", ["normal", "uniform", "zeros", "ones"])
def test_shards_of_any_layout_are_slices_of_one_tensor(layout: Layout, kind: str) -> None:
    spec = replace(WEIGHT, initialiser=Initialiser(kind, 0.5))
    whole = initialise.logical(spec, 1)
    for tp, dp in product(range(2), range(3)):
        ranges = layout.ranges(spec.shape, SIZES, {"tp": tp, "dp": dp})
        local = torch.full([stop - start for start, stop in ranges], 7.0)
        initialise.fill(local, spec, ranges, 1, {})
        assert torch.equal(local, whole[tuple(slice(*pair) for pair in ranges)])


def test_a_rank_draws_only_the_blocks_it_needs_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialise, "BLOCK_BYTES", 5 * 12 * 4)
    drawn = []
    original = initialise._draw
    monkeypatch.setattr(initialise, "_draw", lambda *given: drawn.append(given[1:]) or original(*given))
    initialise.fill(torch.empty(8, 12), WEIGHT, ((12, 20), (0, 12)), 1, {})
    assert drawn == [((5, 12), f"1/{WEIGHT.name}/{number}") for number in (2, 3)]


def test_blocks_are_at_most_16_mib_of_whole_rows() -> None:
    large = replace(WEIGHT, shape=(1000, 25600))
    (start, block), *_ = initialise._blocks(large, (999, 1000), 0)
    assert block.shape[1] == 25600 and start < 1000 == start + block.shape[0]
    (start, block), *_ = initialise._blocks(large, (0, 1), 0)
    assert 15 * 2**20 < block.nbytes <= 16 * 2**20


def test_values_have_the_distribution_asked_for() -> None:
    wide = replace(WEIGHT, shape=(400, 500))
    normal = initialise.logical(wide, 1)
    assert normal.mean().item() == pytest.approx(0, abs=0.01) and normal.std().item() == pytest.approx(0.5, rel=0.02)
    assert (normal.abs() < 0.5).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    uniform = initialise.logical(replace(wide, initialiser=Initialiser("uniform", 0.5)), 1)
    assert -0.5 <= uniform.min() < -0.49 and 0.49 < uniform.max() <= 0.5
    assert uniform.std().item() == pytest.approx(1 / 12**0.5, rel=0.02)


def test_seed_name_and_block_each_change_the_values(small_blocks: None) -> None:
    whole = initialise.logical(WEIGHT, 1)
    assert torch.equal(whole, initialise.logical(WEIGHT, 1))
    assert not torch.equal(whole, initialise.logical(WEIGHT, 2))
    assert not torch.equal(whole, initialise.logical(replace(WEIGHT, name="layers.1.mlp.up.up.weight"), 1))
    assert not torch.equal(whole[:5], whole[5:10])


def test_a_scalar_and_a_vector_have_values_too() -> None:
    assert initialise.logical(replace(WEIGHT, shape=()), 1).shape == ()
    assert initialise.logical(replace(WEIGHT, shape=(7,)), 1).std() > 0


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_every_precision_starts_from_the_same_numbers(precision: str) -> None:
    plan = tiny_plan({"precision.name": precision})
    from tests.plans import tiny_config

    with torch.device("meta"):
        gpt = network.build(tiny_config(), plan.spec, TABLE[precision])
    mesh = build_mesh(plan, torch.device("cpu"))
    tied = gpt.get_parameter("head.head.weight")
    initialise.materialise([gpt], plan, mesh, seed=9)
    assert gpt.get_parameter("embedding.tokens.weight") is gpt.get_parameter("head.head.weight") is tied
    for name, parameter in gpt.named_parameters():
        assert parameter.device.type == "cpu" and parameter.requires_grad
        assert str(parameter.dtype) == f"torch.{TABLE[precision].stored}"
        expected = initialise.logical(plan.spec.parameters[name], 9)
        assert torch.equal(parameter.detach(), expected.to(parameter.dtype))
