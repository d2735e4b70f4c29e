"""Classes of ranks that send the same, so that each is predicted once, however many ranks there are."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise, product
from math import prod

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.parameters import distinct_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.prediction import pp_rank_classes

Parts = Set[tuple[tuple[int, ...], Layout]]  # shapes of tensors before their layouts cut them


def rank_classes(plan: Plan) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of every class of ranks that send the same; the very first rank holds most.

    Workers are classified by equal pp ranks, then by tp rank if weights are sharded unevenly over tp, then by rank of
    the data axis if shards of the last sums (partial axes, tied copies) are uneven or the data strategy distinguishes
    its ranks (`sending_classes`). With servers, every server and every rank of one worker is a class.
    """
    if plan.servers:
        ranks = plan.mesh.group_of(0, *plan.worker_ranks.split("+"))
        servers = range(plan.num_workers, plan.world)
        return [*((rank, plan.num_replicas) for rank in ranks), *((rank, 1) for rank in servers)]
    num_tensor = plan.mesh.size("tp")
    originals = {original for _, original in plan.tied_copies}
    classes = []
    for pp_ranks in pp_rank_classes(plan):
        parameters = [parameter for parameter, _ in distinct_parameters(plan, pp_ranks[0])]
        parts = {(h.spec.shape, h.layout) for h in parameters}
        last = [h for h in parameters if (h.layout.partial or h.spec.name in originals) and not h.spec.frozen]
        shards = {(h.spec.shape, plan.data.state_layout(h.spec, h.layout, plan)) for h in last}
        for first, num_alike in _alike(plan, parts, [plan.mesh.rank(pp=pp_ranks[0], tp=i) for i in range(num_tensor)]):
            tensor = plan.mesh.coordinate(first)["tp"]
            own = plan.data.sending_classes(pp_ranks[0], plan.mesh.coordinate(first), plan)
            if own is not None:
                times = plan.num_data_ranks // plan.mesh.size(plan.data_axis)
                replicas = [(_replica(plan, pp_ranks[0], tensor, i), count * times) for i, count in own]
            else:
                replicas = _alike_replicas(plan, shards, pp_ranks[0], tensor)
            classes += [(rank, len(pp_ranks) * num_alike * count) for rank, count in replicas]
    return classes


def _replica(plan: Plan, pp_rank: int, tp_rank: int, index: int) -> int:
    """The rank with an index on the data axis."""
    return plan.mesh.rank(**{"pp": pp_rank, plan.data_axis: index, "tp": tp_rank})


def _alike_replicas(plan: Plan, parts: Parts, pp_rank: int, tp_rank: int) -> list[tuple[int, int]]:
    """`_alike` of the whole data axis: of each axis that shards there, only the members are asked at which a chunk can
    have another length than the one before."""
    mesh, data = plan.mesh, set(plan.mesh.mesh_dims_of(plan.data_axis))
    axes = sorted({axis for _, layout in parts for axis in layout.axes if data.issuperset(mesh.mesh_dims_of(axis))})
    mesh_dims = [mesh_dim for axis in axes for mesh_dim in mesh.mesh_dims_of(axis)]
    if len(set(mesh_dims)) < len(mesh_dims):  # dp and the experts' part of it: every member is asked
        axes = sorted(set(mesh_dims))
    classes: dict[object, tuple[int, int]] = {}
    others = plan.num_data_ranks // prod(map(mesh.size, axes))
    for spans in product(*(_spans(plan, parts, axis) for axis in axes)):
        rank = mesh.rank(pp=pp_rank, tp=tp_rank, **{axis: start for axis, (start, _) in zip(axes, spans)})
        shapes = _shapes(plan, parts, rank)
        first, count = classes.get(shapes, (rank, 0))
        classes[shapes] = first, count + others * prod(stop - start for start, stop in spans)
    return list(classes.values())


def _spans(plan: Plan, parts: Parts, axis: str) -> list[tuple[int, int]]:
    """[start, stop) of members of an axis that have equally long chunks of all parts."""
    size = plan.mesh.size(axis)
    if not any(axis in layout.axes for _, layout in parts):
        return [(index, index + 1) for index in range(size)]
    edges = {edge for shape, layout in parts for edge in layout.edges(shape, plan.mesh.sizes, axis)}
    return list(pairwise(sorted({0, size, *edges})))


def _alike(plan: Plan, parts: Parts, ranks: list[int]) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of each class of `ranks` whose parts of all tensors have equal shapes."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(_shapes(plan, parts, rank), []).append(rank)
    return [(same[0], len(same)) for same in groups.values()]


def _shapes(plan: Plan, parts: Parts, rank: int) -> tuple[tuple[int, ...], ...]:
    coordinate = plan.mesh.coordinate(rank)
    return tuple(layout.local_shape(shape, plan.mesh.sizes, coordinate) for shape, layout in parts)
