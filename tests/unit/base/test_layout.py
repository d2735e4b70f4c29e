"""Layout: parts are cut as torch.chunk cuts them, cover a tensor exactly once, and have one owner."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.layout import Layout, chunk_range
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.contract.parameters import owns


@settings(deadline=None)
@given(length=st.integers(0, 200), chunks=st.integers(1, 40))
def test_chunk_range_agrees_with_torch_chunk(length, chunks):
    parts = [list(range(*chunk_range(length, chunks, index))) for index in range(chunks)]
    torchs = [part.tolist() for part in torch.arange(length).chunk(chunks)] if length else []
    assert [part for part in parts if part] == torchs
    assert all(not part for part in parts[len(torchs) :]), "what torch.chunk leaves out is empty"


def coordinates(sizes):
    return [dict(zip(sizes, place)) for place in product(*(range(size) for size in sizes.values()))]


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 17), st.integers(1, 9)),
    sizes=st.fixed_dictionaries({"dp": st.integers(1, 4), "tp": st.integers(1, 5), "pp": st.integers(1, 2)}),
    dims=st.sampled_from(
        [((), ()), (("tp",), ()), ((), ("tp",)), (("tp", "dp"), ()), (("dp", "tp"), ()), (("dp",), ("tp",))]
    ),
)
def test_parts_cover_a_tensor_once_per_copy_with_one_owner_each(shape, sizes, dims):
    layout = Layout(dims)
    covered, owned = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    mesh = MeshShape(tuple((axis, size) for axis, size in sizes.items() if axis != "pp"))
    for place in coordinates(sizes):
        part = tuple(slice(*bounds) for bounds in layout.ranges(shape, sizes, place))
        assert covered[part].shape == layout.local_shape(shape, sizes, place)
        assert covered[part].numel() == layout.local_numel(shape, sizes, place)
        covered[part] += 1
        owned[part] += owns(layout, mesh, place) and place["pp"] == 0
    copies = 1
    for axis, size in sizes.items():
        copies *= 1 if axis in layout.axes else size
    assert torch.equal(covered, torch.full(shape, copies))
    assert torch.equal(owned, torch.ones(shape, dtype=torch.int64))


def test_the_major_axis_comes_first():
    """A dim split tp-major then dp: the parts of one tp coordinate are neighbours."""
    layout, sizes = Layout((("tp", "dp"),)), {"tp": 2, "dp": 2}
    parts = {tuple(p.values()): layout.ranges((8,), sizes, p)[0] for p in coordinates({"tp": 2, "dp": 2})}
    assert parts == {(0, 0): (0, 2), (0, 1): (2, 4), (1, 0): (4, 6), (1, 1): (6, 8)}


def test_split_appends_the_minor_axis_and_keeps_partial():
    layout = Layout((("tp",), ()), partial=("tp_copy",))
    assert layout.split(0, "dp") == Layout((("tp", "dp"), ()), ("tp_copy",))


def test_an_uneven_vocabulary_leaves_small_or_empty_last_shards():
    layout = Layout((("tp",), ()))
    rows = [layout.local_shape((50257, 4), {"tp": 4}, {"tp": rank})[0] for rank in range(4)]
    assert rows == [12565, 12565, 12565, 12562]
    assert layout.local_shape((5, 2), {"tp": 4}, {"tp": 3}) == (0, 2)


def test_ranges_refuse_a_shape_of_another_rank():
    with pytest.raises(AssertionError):
        Layout.replicated(2).ranges((3,), {}, {})


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 7))
def test_the_shape_of_a_part_changes_at_edges_only(length, outer, inner):
    """Of either axis, whatever the coordinate on the other, which cuts before it or after it."""
    layout, sizes = Layout((("dp", "tp"),)), {"dp": outer, "tp": inner}
    for axis, other in (("dp", "tp"), ("tp", "dp")):
        edges = layout.edges((length,), sizes, axis)
        for at, place in product(range(1, sizes[axis]), range(sizes[other])):
            here, before = (layout.local_shape((length,), sizes, {axis: i, other: place}) for i in (at, at - 1))
            assert here == before or at in edges, (axis, at, place)
