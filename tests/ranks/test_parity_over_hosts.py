"""Training over several hosts, which are pretended, equals one device: shared memory within them, gloo between them."""

from __future__ import annotations

import pytest

from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.ranks.test_expert_parity import EXPERTS
from tests.ranks.test_parity import Cell, name_of, overrides_of

CELLS: tuple[Cell, ...] = (
    ((4, 1, 1), "hsdp", "none"),
    ((2, 2, 1), "zero1", "none"),
    ((1, 4, 1), "ddp", "none"),
    ((2, 1, 2), "fsdp", "interleaved"),
    *([((4, 1, 1), "ddp", "none"), ((1, 2, 2), "ddp", "1f1b")] if FULL else []),
)


@pytest.mark.parametrize("cell", shared(CELLS), ids=name_of)
def test_a_plan_on_two_hosts_of_two_ranks_equals_one_device_in_fp64(cell: Cell) -> None:
    (dp, tp, pp), data, schedule = cell
    assert_equal(parity(overrides_of(dp, tp, pp, data, schedule), hosts="aabb"))


def test_so_do_hosts_with_three_ranks_and_one() -> None:
    if FULL:
        assert_equal(parity(overrides_of(4, 1, 1, "fsdp", "none"), hosts="aaab"))
    assert_equal(parity(overrides_of(2, 1, 2, "ddp", "gpipe"), hosts="aaab"))


def test_experts_on_two_hosts() -> None:
    """Their all-to-alls go both ways."""
    assert_equal(parity({**EXPERTS, "dp": 4, "ep": 4}, hosts="abab"))
