"""Which rank orthogonalises which matrix in a step of Muon, and what it sends, holds and computes for that.

Newton-Schulz needs the whole momentum of a matrix. If several ranks hold its parts, one of them owns the matrix: an
all-to-all over each axis that shards it brings the parts to the owner, and the parts of the result back. N ranks send
an N-th of what all-gathers would, and compute an N-th. Each copy of a matrix is computed where it is, so that zero1
divides the work that ddp repeats. The plan and the runtime (`models.muon`) ask the same functions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from math import prod

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.optimizers import MUON, muon_matrices
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Collective, Plan

MOMENTUM = "momentum"  # the purpose of the traffic
NS_STEPS = 5  # of Newton-Schulz, as torch.optim.Muon's default
Coordinate = Mapping[str, int]
Stack = tuple[int, tuple[str, ...]]  # the experts of a layer, and the axes that shard them


@dataclass(frozen=True)
class MatrixKind:
    """A logical matrix, of an expert that expert's own, or a convolution's kernels. layout: of the momentum."""

    shape: tuple[int, ...]
    layout: Layout

    @property
    def flops(self) -> float:
        """Of one step of Newton-Schulz."""
        short, long = self.sides
        return 4.0 * short * short * long + 2.0 * short**3

    @property
    def sides(self) -> tuple[int, int]:
        """(shorter, longer) side of the matrix, whose columns are all dims but the first."""
        rows, columns = self.shape[0], prod(self.shape[1:])
        return min(rows, columns), max(rows, columns)


@dataclass(frozen=True)
class Matrix:
    """name: of its parameter. expert: the index among this rank's experts; None: the parameter is one matrix. owner:
    the owner's index on each axis of the `Exchange`."""

    name: str
    expert: int | None
    kind: MatrixKind
    owner: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """The matrices that the same axes shard, ordered by owner. axes: in the order in which they are gathered, for each
    tensor dim the minor-most first, so that every part is a range."""

    axes: tuple[str, ...]
    matrices: tuple[Matrix, ...]

    def ranges(self, kind: MatrixKind, hop: int, plan: Plan, coordinate: Coordinate) -> tuple[tuple[int, int], ...]:
        """[start, stop) per dim of the part at a coordinate after the all-to-alls over the first `hop` axes."""
        gathered = self.axes[:hop]
        dims = tuple(tuple(axis for axis in dim if axis not in gathered) for dim in kind.layout.dims)
        return Layout(dims).ranges(kind.shape, plan.mesh.sizes, coordinate)

    def sizes(self, plan: Plan, coordinate: Coordinate) -> list[int]:
        """The elements that a rank holds before the first all-to-all and after each."""
        own = tuple(coordinate[axis] for axis in self.axes)
        return [
            sum(
                counts[own[:hop]] * prod(stop - start for start, stop in self.ranges(kind, hop, plan, coordinate))
                for kind, counts in kinds.items()
            )
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


def exchanges(plan: Plan, coordinate: Coordinate) -> tuple[Exchange, ...]:
    """The exchanges of the rank at a coordinate, in their order; () unless Muon updates its weights."""
    if plan.optimizer != MUON:
        return ()
    pp_rank, sizes = coordinate.get("pp", 0), plan.mesh.sizes
    experts = {
        stack: Layout((stack[1],)).local_shape(stack[:1], sizes, coordinate)[0] for stack in _stacks(plan, pp_rank)
    }
    return _exchanges(plan, pp_rank, tuple(experts.items()))


@cached("weights_cache")
def _stacks(plan: Plan, pp_rank: int) -> frozenset[Stack]:
    return frozenset((shape[0], layout.dims[0]) for _, shape, layout in _sharded(plan, pp_rank) if len(shape) == 3)


def _sharded(plan: Plan, pp_rank: int) -> Iterator[tuple[str, tuple[int, ...], Layout]]:
    """(name, shape, layout of the state) of the parameters of a pp rank that Muon updates. Only experts have 3 dims."""
    for parameter in held_parameters(plan, pp_rank):
        spec = parameter.spec
        if spec.name in muon_matrices(plan) and not spec.frozen:
            yield parameter.name, spec.shape, plan.data.state_layout(spec, parameter.layout, plan)


@cached("weights_cache")
def _exchanges(plan: Plan, pp_rank: int, experts: tuple[tuple[Stack, int], ...]) -> tuple[Exchange, ...]:
    """experts: how many of each stack this rank holds."""
    by_axes: dict[tuple[str, ...], list[Matrix]] = {}
    for name, shape, layout in _sharded(plan, pp_rank):
        is_stack = len(shape) == 3
        kind = MatrixKind(shape[is_stack:], Layout(layout.dims[is_stack:]))
        axes = tuple(axis for dim in kind.layout.dims for axis in reversed(dim) if plan.mesh.size(axis) > 1)
        numbers = range(dict(experts)[shape[0], layout.dims[0]]) if is_stack else (None,)
        by_axes.setdefault(axes, []).extend(Matrix(name, number, kind) for number in numbers)
    return tuple(_with_owners(axes, matrices, plan) for axes, matrices in by_axes.items())


def _with_owners(axes: tuple[str, ...], matrices: list[Matrix], plan: Plan) -> Exchange:
    """Give the matrix with most work to the rank with least; the ranks are in the order of their work, most first."""
    sizes = [plan.mesh.size(axis) for axis in axes]
    loads = [(0.0, number) for number in range(min(prod(sizes), len(matrices)))]  # a heap
    numbers: list[tuple[Matrix, int]] = []
    for matrix in sorted(matrices, key=lambda matrix: -matrix.kind.flops):
        load, number = loads[0]
        numbers.append((matrix, number))
        heapreplace(loads, (load + matrix.kind.flops, number))
    places = {number: place for place, (_, number) in enumerate(sorted(loads, key=lambda item: (-item[0], item[1])))}
    owned = []
    for matrix, number in numbers:
        place, owner = places[number], []
        for size in reversed(sizes):
            place, index = divmod(place, size)
            owner.append(index)
        owned.append(Matrix(matrix.name, matrix.expert, matrix.kind, tuple(reversed(owner))))
    return Exchange(axes, tuple(sorted(owned, key=lambda matrix: matrix.owner)))


def product_dtype(plan: Plan) -> str:
    """The dtype in which matrices travel and are multiplied: torch.optim.Muon's bfloat16 unless nothing is rounded."""
    precision = plan.precision
    return precision.stored if precision.compute == precision.stored else "bfloat16"


def collectives(plan: Plan, coordinate: Coordinate) -> list[Collective]:
    """The all-to-alls of one rank in a step, there and back."""
    width, rows = BYTES[product_dtype(plan)], []
    for exchange in exchanges(plan, coordinate):
        sizes = exchange.sizes(plan, coordinate)
        for axis, before, after in zip(exchange.axes, sizes, sizes[1:]):
            rows.append(Collective(axis, "all_to_all", MOMENTUM, 2, width * (before + after)))
    return rows


def step_bytes(plan: Plan, coordinate: Coordinate) -> int:
    """Bytes of buffers, and of the largest matrix with what its Newton-Schulz holds and the result before it, in the
    exchange with most."""
    most = 0
    for exchange in exchanges(plan, coordinate):
        sizes = exchange.sizes(plan, coordinate)
        sides = (kind.sides for kind, _ in exchange.owned(coordinate))
        largest = max((4 * short * long + 2 * short * short for short, long in sides), default=0)
        most = max(most, sum(sizes[:-1]) + sum(sizes[1:]) + largest)
    return BYTES[product_dtype(plan)] * most
