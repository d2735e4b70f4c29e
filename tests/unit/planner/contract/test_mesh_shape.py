"""MeshShape: ranks, coordinates and groups are arithmetic that nobody may get wrong."""

from __future__ import annotations

import pytest

from parallelrun.planner.contract.mesh_shape import MeshShape

PTDP = MeshShape((("pp", 2), ("dp", 3), ("tp", 4)))
FACTORED = MeshShape(
    (("pp", 2), ("dp_replicate", 2), ("dp_shard", 3), ("tp_kv", 2), ("tp_copy", 2)),
    (("dp", ("dp_replicate", "dp_shard")), ("tp", ("tp_kv", "tp_copy"))),
)


def test_tp_varies_fastest_and_pp_slowest():
    assert PTDP.coordinate(0) == {"pp": 0, "dp": 0, "tp": 0}
    assert PTDP.coordinate(1) == {"pp": 0, "dp": 0, "tp": 1}
    assert PTDP.coordinate(4) == {"pp": 0, "dp": 1, "tp": 0}
    assert PTDP.coordinate(12) == {"pp": 1, "dp": 0, "tp": 0}


def test_a_factored_axis_has_the_product_of_its_leaves_and_the_major_one_first():
    assert FACTORED.size("dp") == 6 and FACTORED.size("tp") == 4 and FACTORED.size("ep") == 1
    coordinate = FACTORED.coordinate(FACTORED.rank(dp=4, tp=3))
    assert (coordinate["dp_replicate"], coordinate["dp_shard"]) == (1, 1)
    assert (coordinate["tp_kv"], coordinate["tp_copy"]) == (1, 1)


def test_a_rank_or_coordinate_outside_the_mesh_is_our_own_mistake():
    with pytest.raises(AssertionError):
        PTDP.coordinate(24)
    with pytest.raises(AssertionError):
        PTDP.rank(tp=4)
