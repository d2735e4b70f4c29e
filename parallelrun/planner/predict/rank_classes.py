"""Classes of ranks that send the same, so that each is predicted once, however many ranks there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from itertools import pairwise, product
from math import prod

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.parameters import distinct_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.orthogonalising import collectives, exchanges
from parallelrun.planner.predict.prediction import pp_rank_classes

Parts = Set[tuple[tuple[int, ...], Layout]]  # shapes of tensors before their layouts cut them


def rank_classes(plan: Plan) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of every class of ranks that send the same; the very first rank holds most.

    Workers are classified by equal pp ranks, then by rank of tp if weights are sharded unevenly over it, by rank of the
    data axis if shards of the last sums (partial axes, tied copies) are uneven or the data strategy distinguishes its
    ranks (`sending_classes`), and by the matrices that Muon sends them. With servers, every server and every rank of
    one worker is a class.
    """
    if plan.servers:
        ranks = plan.mesh.group_of(0, *plan.worker_ranks.split("+"))
        servers = range(plan.num_workers, plan.world)
        return [*((rank, plan.num_replicas) for rank in ranks), *((rank, 1) for rank in servers)]
    originals = {original for _, original in plan.tied_copies}
    classes = []
    for pp_ranks in pp_rank_classes(plan):
        parameters = [parameter for parameter, _ in distinct_parameters(plan, pp_ranks[0])]
        parts = {(h.spec.shape, h.layout) for h in parameters}
        last = [h for h in parameters if (h.layout.partial or h.spec.name in originals) and not h.spec.frozen]
        parts |= {(h.spec.shape, plan.data.state_layout(h.spec, h.layout, plan)) for h in last}
        first = plan.mesh.rank(pp=pp_ranks[0])
        is_asked = plan.data.sending_classes(pp_ranks[0], plan.mesh.coordinate(first), plan) is not None
        for rank, num_alike in _alike(plan, parts, first, is_asked):
            coordinate = plan.mesh.coordinate(rank)
            own = plan.data.sending_classes(pp_ranks[0], coordinate, plan) if is_asked else None
            times = plan.num_data_ranks // plan.mesh.size(plan.data_axis)
            replicas = [(_replica(plan, coordinate, i), count * times) for i, count in own or ()] or [(rank, 1)]
            classes += [(replica, len(pp_ranks) * num_alike * count) for replica, count in replicas]
    return classes


def _replica(plan: Plan, coordinate: dict[str, int], index: int) -> int:
    """The rank with an index on the data axis that has the same part of a replica's weights."""
    return plan.mesh.rank(**{"pp": coordinate["pp"], plan.data_axis: index, "tp": coordinate["tp"]})


def _alike(plan: Plan, parts: Parts, first: int, is_asked: bool) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of each class of the ranks of a stage, the first of which is `first`, that have
    equal shapes of all parts and are sent the same matrices.

    Of each axis, only the members are tried at which a chunk can have another length than the one before, or that may
    be sent other matrices. is_asked: the data strategy says which of its ranks differ; one of each is taken here.
    """
    mesh, pp_rank = plan.mesh, plan.mesh.coordinate(first)["pp"]
    received = exchanges(plan, pp_rank)
    parts = parts | {(matrix.kind.shape, matrix.kind.layout) for exchange in received for matrix in exchange.matrices}
    data = set(mesh.mesh_dims_of(plan.count_axis)) if is_asked else set()
    axes = sorted({a for _, layout in parts for a in layout.axes if data.isdisjoint(mesh.mesh_dims_of(a))})
    mesh_dims = Counter(mesh_dim for axis in axes for mesh_dim in mesh.mesh_dims_of(axis))
    edges: dict[str, set[int]] = {}
    for axis in axes:
        if all(mesh_dims[mesh_dim] == 1 for mesh_dim in mesh.mesh_dims_of(axis)):
            edges[axis] = {edge for shape, layout in parts for edge in layout.edges(shape, mesh.sizes, axis)}
            edges[axis].update(*(exchange.edges(axis) for exchange in received if axis in exchange.axes))
        else:  # dp and the experts' part of it: every member is tried
            edges |= {mesh_dim: set(range(mesh.size(mesh_dim))) for mesh_dim in mesh.mesh_dims_of(axis)}
    others = mesh.num_ranks // mesh.size("pp") // prod(mesh.size(axis) for axis in {*edges, *data})
    classes: dict[object, tuple[int, int]] = {}
    for spans in product(*(pairwise(sorted({0, mesh.size(axis), *places})) for axis, places in edges.items())):
        rank = mesh.rank(pp=pp_rank, **{axis: start for axis, (start, _) in zip(edges, spans)})
        coordinate = mesh.coordinate(rank)
        shapes = tuple(layout.local_shape(shape, mesh.sizes, coordinate) for shape, layout in parts)
        key = shapes, tuple(collectives(plan, coordinate))
        same, count = classes.get(key, (rank, 0))
        classes[key] = same, count + others * prod(stop - start for start, stop in spans)
    return list(classes.values())
