"""A rank's own chunk of a weight is fit for an optimizer. `tests/ranks/test_data_experts.py` proves the values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.strategies.data.common.zero_runtime import ChunkedWeight, cut
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
    def test_weight_and_gradient_lie_alike_in_one_piece(self, case, name):
        """torch's fused optimizers misread, or refuse, gradients of other strides."""
        for one in cuts_of(plan_of(*CASES[case]), name):
            gradient = one.own(torch.zeros(one.numel))
            assert one.mine.is_contiguous() and one.mine.stride() == gradient.stride()

    def test_only_a_chunk_inside_of_several_experts_is_a_copy(self, case, name):
        for one in cuts_of(plan_of(*CASES[case]), name):
            shares = one.mine.untyped_storage().data_ptr() == one.weight.untyped_storage().data_ptr()
            assert shares == (one.dim == 0 or one.weight.size(0) == 1)
