"""Which rank orthogonalises which matrix in a step of Muon, and what it sends, holds and computes for that.

Newton-Schulz needs the whole momentum of a matrix. If several ranks hold its parts, one of them owns the matrix: an
all-to-all over each axis that shards it brings the parts to the owner, and the parts of the result back. N ranks send
an N-th of what all-gathers would, and compute an N-th. Each copy of a matrix is computed where it is, so that zero1
divides the work that ddp repeats. The plan and the runtime (`models.optimizers.muon`) ask the same functions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import islice, product
from math import prod
from typing import NamedTuple

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.optimizers import MUON, muon_matrices
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Plan

MOMENTUM = "momentum"  # the purpose of the traffic
NS_STEPS = 5  # of Newton-Schulz, as torch.optim.Muon's default
Coordinate = Mapping[str, int]


@dataclass(frozen=True)
class MatrixKind:
    """A logical matrix, a convolution's kernels, or a layer's experts, of which each is a matrix. layout: of the
    momentum. experts: of the rank that has most; 0: a single matrix."""

    shape: tuple[int, ...]
    layout: Layout
    experts: int

    @property
    def sides(self) -> tuple[int, int]:
        """(shorter, longer) side of a matrix, whose columns are all dims but the first."""
        rows, *columns = self.shape[bool(self.experts) :]
        return min(rows, prod(columns)), max(rows, prod(columns))

    @property
    def flops(self) -> float:
        """Of one step of Newton-Schulz."""
        short, long = self.sides
        return max(1, self.experts) * (4.0 * short * short * long + 2.0 * short**3)


class Matrix(NamedTuple):
    """name: of its parameter. owner: the owner's index on each axis of the `Exchange`."""

    name: str
    kind: MatrixKind
    owner: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """The matrices that the same axes shard, ordered by owner. axes: in the order in which they are gathered, for each
    tensor dim the minor-most first, so that parts are joined in their order."""

    axes: tuple[str, ...]
    matrices: tuple[Matrix, ...]

    def shape(self, kind: MatrixKind, hop: int, plan: Plan, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the part at a coordinate after the all-to-alls over the first `hop` axes."""
        sizes = plan.mesh.sizes | dict.fromkeys(self.axes[:hop], 1)
        return kind.layout.local_shape(kind.shape, sizes, {**coordinate, **dict.fromkeys(self.axes[:hop], 0)})

    def sizes(self, plan: Plan, coordinate: Coordinate) -> list[int]:
        """The elements that a rank holds before the first all-to-all and after each."""
        own = tuple(coordinate[axis] for axis in self.axes)
        return [
            sum(counts[own[:hop]] * prod(self.shape(kind, hop, plan, coordinate)) for kind, counts in kinds.items())
            for hop, kinds in enumerate(self._held)
        ]

    def owned(self, coordinate: Coordinate) -> Iterator[tuple[MatrixKind, int]]:
        """(kind, how many) of the matrices that the rank at a coordinate orthogonalises."""
        own = tuple(coordinate[axis] for axis in self.axes)
        return ((kind, counts[own]) for kind, counts in self._held[-1].items() if counts[own])

    def edges(self, axis: str) -> set[int]:
        """The indices on an axis whose ranks may receive other matrices than those of the index before."""
        place, received = self.axes.index(axis), defaultdict[int, Counter[object]](Counter)
        for matrix in self.matrices:
            received[matrix.owner[place]][matrix.kind, matrix.owner[:place], matrix.owner[place + 1 :]] += 1
        return {i for own in [*received] for i in (own, own + 1) if i and received[i] != received[i - 1]}

    @cached_property
    def _held(self) -> list[dict[MatrixKind, Counter[tuple[int, ...]]]]:
        """Per number of all-to-alls and kind, how many matrices the ranks with an index on each of their axes hold."""
        held: list[dict[MatrixKind, Counter[tuple[int, ...]]]] = [{} for _ in range(len(self.axes) + 1)]
        for matrix in self.matrices:
            for hop, kinds in enumerate(held):
                kinds.setdefault(matrix.kind, Counter())[matrix.owner[:hop]] += 1
        return held


def exchanges(plan: Plan, pp_rank: int) -> tuple[Exchange, ...]:
    """The exchanges of a pp rank, in their order; () unless Muon updates its weights."""
    return _exchanges(plan, pp_rank) if plan.optimizer == MUON else ()


@cached("weights_cache")
def _exchanges(plan: Plan, pp_rank: int) -> tuple[Exchange, ...]:
    kinds_of: dict[tuple[str, ...], list[tuple[MatrixKind, str]]] = {}
    for parameter in held_parameters(plan, pp_rank):
        spec = parameter.spec
        if spec.name not in muon_matrices(plan) or spec.frozen:
            continue
        layout, is_stack = plan.data.state_layout(spec, parameter.layout, plan), spec.layer_role == "expert"
        experts = layout.local_shape(spec.shape, plan.mesh.sizes, {})[0] if is_stack else 0
        dims = layout.dims[is_stack:]  # experts stay where they are
        axes = tuple(axis for dim in dims for axis in reversed(dim) if plan.mesh.size(axis) > 1)
        kinds_of.setdefault(axes, []).append((MatrixKind(spec.shape, layout, experts), parameter.name))
    return tuple(_with_owners(axes, kinds, plan) for axes, kinds in kinds_of.items())


def _with_owners(axes: tuple[str, ...], kinds: list[tuple[MatrixKind, str]], plan: Plan) -> Exchange:
    """Give the matrix with most work to the rank with least; the ranks are in the order of their work, most first."""
    owners = [*islice(product(*(range(plan.mesh.size(axis)) for axis in axes)), len(kinds))]
    loads = [(0.0, number) for number in range(len(owners))]  # a heap
    numbers = []
    for kind, _ in (ordered := sorted(kinds, key=lambda item: -item[0].flops)):
        load, number = loads[0]
        numbers.append(number)
        heapreplace(loads, (load + kind.flops, number))
    owner_of = {number: owner for (_, number), owner in zip(sorted(loads, key=lambda item: -item[0]), owners)}
    matrices = (Matrix(name, kind, owner_of[number]) for (kind, name), number in zip(ordered, numbers))
    return Exchange(axes, tuple(sorted(matrices, key=lambda matrix: matrix.owner)))


def product_dtype(plan: Plan) -> str:
    """The dtype in which matrices travel and are multiplied: torch.optim.Muon's bfloat16 unless nothing is rounded."""
    precision = plan.precision
    return precision.stored if precision.compute == precision.stored else "bfloat16"


def collectives(plan: Plan, coordinate: Coordinate) -> list[Collective]:
    """The all-to-alls of one rank in a step, there and back."""
    width, rows = BYTES[product_dtype(plan)], []
    for exchange in exchanges(plan, coordinate.get("pp", 0)):
        sizes = exchange.sizes(plan, coordinate)
        for axis, before, after in zip(exchange.axes, sizes, sizes[1:]):
            rows.append(Collective(axis, "all_to_all", MOMENTUM, 2, width * (before + after)))
    return rows


def step_bytes(plan: Plan, coordinate: Coordinate) -> int:
    """Bytes of buffers, and of the largest matrix with what its Newton-Schulz holds and the result before it, in the
    exchange with most."""
    most = 0
    for exchange in exchanges(plan, coordinate.get("pp", 0)):
        sizes = exchange.sizes(plan, coordinate)
        sides = ((max(1, kind.experts), *kind.sides) for kind, _ in exchange.owned(coordinate))
        largest = max((2 * short * (count * long + long + short) for count, short, long in sides), default=0)
        most = max(most, sum(sizes[:-1]) + sum(sizes[1:]) + largest)
    return BYTES[product_dtype(plan)] * most
