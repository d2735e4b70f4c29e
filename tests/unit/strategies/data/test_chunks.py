"""A weight cut into chunks: every element travels once, in its place; a rank's own chunk is fit for an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.strategies.data.common.zero_runtime import ChunkedWeight, Chunks, cut
from tests.plans import tiny_plan

# experts, ep, copies: along dim 0 even, uneven and with empty chunks (33 rows of `up`), along dim 1 of one and of three
CASES = {
    "whole experts": (4, 2, 2, None),
    "uneven": (6, 2, 2, 33),
    "empty": (2, 2, 2, 33),
    "one expert": (2, 2, 4, None),
    "three": (6, 2, 2, None),
}


def plan_of(experts: int, ep: int, copies: int, ffn: int | None) -> Plan:
    dp = ep * copies
    changes = {"model.experts": experts, "model.ffn": ffn} if ffn else {"model.experts": experts}
    return tiny_plan({**changes, "dp": dp, "ep": ep, "strategy.data.kind": "zero1"})


def cuts_of(plan: Plan, name: str) -> list[ChunkedWeight]:
    """The cut of one matrix of experts, of numbers 0 to n, on each of its copies."""
    held = next(p for p in held_parameters(plan, 0) if p.name.endswith(name))
    shape = held.layout.local_shape(held.spec.shape, plan.mesh.sizes, plan.mesh.coordinate(0))
    copies = plan.mesh.size("expert_dp")
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    ranks = tuple(range(copies))
    groups = [Group("expert_dp", ranks, index, None) for index in ranks]
    return [cut(held, nn.Parameter(whole.clone()), group, plan) for group in groups]


@pytest.mark.parametrize("name", ["experts.up", "experts.down"])
@pytest.mark.parametrize("case", CASES)
class TestChunks:
    def test_what_every_copy_puts_in_its_row_is_the_weight_again(self, case, name):
        cuts = cuts_of(plan_of(*CASES[case]), name)
        rows = torch.zeros(len(cuts), cuts[0].numel, dtype=torch.float64)
        for row, one in zip(rows, cuts):
            one.own(row).copy_(one.mine)
        regions, there = cuts[0].regions(rows), torch.full_like(cuts[0].weight, torch.nan)
        for region, place in cuts[0].pieces(regions, there.detach()):
            place.copy_(region)
        assert torch.equal(there, cuts[0].weight)

    def test_a_gradient_is_dealt_out_as_the_weight_is(self, case, name):
        """In any strides, as a split backward leaves them."""
        cuts = cuts_of(plan_of(*CASES[case]), name)
        rows = torch.zeros(len(cuts), cuts[0].numel, dtype=torch.float64)
        gradient = cuts[0].weight.detach().transpose(0, 2).contiguous().transpose(0, 2)
        for region, part in cuts[0].pieces(cuts[0].regions(rows), gradient):
            region.copy_(part)
        assert all(torch.equal(one.own(row), one.mine) for row, one in zip(rows, cuts))

    def test_weight_and_gradient_lie_alike_in_one_piece(self, case, name):
        """torch's fused optimizers misread, or refuse, gradients of other strides."""
        for one in cuts_of(plan_of(*CASES[case]), name):
            gradient = one.own(torch.zeros(one.numel))
            assert one.mine.is_contiguous() and one.mine.stride() == gradient.stride()

    def test_only_a_chunk_inside_of_several_experts_is_a_copy(self, case, name):
        for one in cuts_of(plan_of(*CASES[case]), name):
            shares = one.mine.untyped_storage().data_ptr() == one.weight.untyped_storage().data_ptr()
            assert shares == (one.dim == 0 or one.weight.size(0) == 1)


def test_chunks_of_several_weights_lie_one_after_the_other():
    plan = plan_of(*CASES["three"])
    up, down = (cuts_of(plan, f"experts.{name}")[0] for name in ("up", "down"))
    assert (up.dim, down.dim) == (1, 1)
    chunks = Chunks([up, down], Group("expert_dp", (0, 1), 0, None))
    width = up.numel + down.numel
    first, second = chunks.regions(torch.arange(2 * width))
    assert first[0].flatten().tolist() == list(range(up.numel)) and first[1].flatten()[0] == width
    assert second[1].flatten().tolist() == list(range(width + up.numel, 2 * width))
