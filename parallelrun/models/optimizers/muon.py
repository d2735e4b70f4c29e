"""Muon (Jordan et al. 2024) on sharded matrices, with the conventions of torch.optim.Muon.

The momentum of a matrix is sharded as the matrix is. Its owner (`planner.pieces.orthogonalising`) receives the parts of
the update, orthogonalises the matrix, and returns the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod, sqrt

import torch
from torch import Tensor

from parallelrun.config.schema.run_schema import OptimizerConfig
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.orthogonalising import MOMENTUM, NS_STEPS, Exchange, Matrix, exchanges, product_dtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial that a step applies to the singular values
EPSILON = 1e-7


class Muon:
    """The update of this rank's parts of matrices. state: one `momentum_buffer` for each tensor, of its shape. These
    may be on the host: only what is orthogonalised is then on the device."""

    def __init__(self, parameters: Sequence[LocalParameter], config: OptimizerConfig, plan: Plan, mesh: Mesh):
        self.param_groups = [{"lr": config.lr}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._config, self._tensors = config, {parameter.name: parameter.tensor for parameter in parameters}
        dtype = getattr(torch, product_dtype(plan))
        self._exchanges = [
            (exchange.matrices, _Hop(exchange, 0, exchange.matrices, plan, mesh, dtype))
            for exchange in exchanges(plan, mesh.coordinate.get("pp", 0))
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix by its `.grad`. Collective over the axes that shard matrices."""
        for matrices, hop in self._exchanges:
            for matrix, update in zip(matrices, hop.orthogonalised(map(self._direction, matrices))):
                tensor, lr = self._tensors[matrix.name], self.param_groups[0]["lr"]
                tensor.mul_(1 - lr * self._config.weight_decay)
                factor = rate_factor(self._config.adjust_lr_fn, matrix.kind.shape)
                tensor.add_(update.to(tensor.device), alpha=-lr * factor)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Move the momentum towards the gradient; return this rank's part of Nesterov's momentum."""
        tensor = self._tensors[matrix.name]
        state = self.state.setdefault(tensor, {})
        if not state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        assert tensor.grad is not None
        buffer = state["momentum_buffer"].lerp_(tensor.grad, 1 - self._config.momentum)
        return tensor.grad.lerp(buffer, self._config.momentum)


class _Hop:
    """The all-to-all over axis number `number` of an exchange, there and back, and those that follow between."""

    def __init__(
        self, exchange: Exchange, number: int, matrices: Sequence[Matrix], plan: Plan, mesh: Mesh, dtype: torch.dtype
    ):
        self._dtype, self._device = dtype, mesh.device
        self._is_last = number == len(exchange.axes)
        if self._is_last:
            return
        axis, own = exchange.axes[number], mesh.coordinate[exchange.axes[number]]
        self._group = mesh.group(axis)
        owned = [matrix for matrix in matrices if matrix.owner[number] == own]
        members = [{**mesh.coordinate, axis: member} for member in range(self._group.size)]
        self._shapes = [exchange.shape(matrix.kind, number, plan, members[own]) for matrix in matrices]
        self._sending = [0] * self._group.size
        for matrix, shape in zip(matrices, self._shapes):
            self._sending[matrix.owner[number]] += prod(shape)
        self._arriving = [[exchange.shape(matrix.kind, number, plan, at) for matrix in owned] for at in members]
        self._receiving = [sum(map(prod, shapes)) for shapes in self._arriving]
        self._dims = [next(i for i, axes in enumerate(m.kind.layout.dims) if axis in axes) for m in owned]
        self._next = _Hop(exchange, number + 1, owned, plan, mesh, dtype)

    def orthogonalised(self, parts: Iterable[Tensor]) -> Iterable[Tensor]:
        """The parts of the orthogonal matrices, given those of the matrices. parts: taken one at a time."""
        if self._is_last:
            return (orthogonalise(part.to(self._device, self._dtype)) for part in parts)
        sent = torch.empty(sum(self._sending), dtype=self._dtype, device=self._device)
        out = _views(sent, self._shapes)
        for place, part in zip(out, parts):
            place.copy_(part)
        received = sent.new_empty(sum(self._receiving))
        comm.all_to_all(received, sent, self._group, MOMENTUM, self._receiving, self._sending)
        members = map(_views, received.split(self._receiving), self._arriving)
        pieces = [*zip(*members)]  # of each matrix, in the order in which they are joined
        matrices = map(torch.cat, pieces, self._dims)
        for places, dim, result in zip(pieces, self._dims, self._next.orthogonalised(matrices)):
            for place, part in zip(places, result.split([place.size(dim) for place in places], dim)):
                place.copy_(part)
        comm.all_to_all(sent, received, self._group, MOMENTUM, self._sending, self._receiving)
        return out


def _views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([*map(prod, shapes)]), shapes)]


def rate_factor(kind: str, shape: Sequence[int]) -> float:
    """The factor of the learning rate of a logical matrix, given its shape or that of experts.

    original: by the ratio of its sides (Jordan). match_rms_adamw: updates are as large as AdamW's usually are, so that
    both share a rate (Liu et al. 2025, Moonlight).
    """
    rows, columns = shape[-2:] if len(shape) == 3 else (shape[0], prod(shape[1:]))
    return sqrt(max(1, rows / columns)) if kind == "original" else 0.2 * sqrt(max(rows, columns))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix, which is overwritten, near 1 by Newton-Schulz, in its dtype.

    Dims behind the first are one, but with 3 dims it is one matrix for each expert. The result has the same shape.
    """
    if matrix.dim() == 3:
        for expert in matrix:
            expert.copy_(orthogonalise(expert))
        return matrix
    a, b, c = COEFFICIENTS
    flat = matrix.flatten(1)
    is_tall = flat.size(0) > flat.size(1)
    x = flat.T if is_tall else flat
    x.div_(x.norm().clamp(min=EPSILON))
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).reshape(matrix.shape)
