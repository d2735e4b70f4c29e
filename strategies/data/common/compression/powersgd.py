"""PowerSGD at run time (Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2).

A gradient M (rows x columns) is approximated by P Q^T with P = M Q made orthonormal and Q = M^T P: one step of subspace
iteration, started from the last step's Q. Sums of M, P and Q over ranks stand for M, P and Q, so two small all-reduces
sum the approximation. After the wait a bucket's buffer holds the approximation, bitwise equal on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.comm import Waitable
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.data_runtime import DataRuntime
from parallelrun.training.loop.flat_tensors import flat_views, flatten

from ..bucketed_plan import BucketedAllReduce
from ..reducer import Kept, Part, Sum
from .plan import PowerSGD, matrix_sizes, row_dim


def sender(
    buffer: Tensor, parts: Sequence[Part], plan: Plan, start_sum: Sum, runtime: DataRuntime
) -> tuple[Callable[[], Waitable], Kept]:
    """Return a function that starts the exchange of `buffer`, in the messages that `PowerSGD.messages` predicts, and
    the tensors from which a resumed run goes on."""
    compression = BucketedAllReduce.of(plan).compression
    assert isinstance(compression, PowerSGD)
    factored = [part for part in parts if compression.is_factored(part[0], part[1].shape, plan)]
    if not factored:
        return partial(start_sum, buffer), []
    names = {parameter.name for parameter, _ in factored}
    uncompressed = [gradient for parameter, gradient in parts if parameter.name not in names]
    exchange = FactoredSum(uncompressed, factored, compression.rank, start_sum, lambda: runtime.loss_scale)
    return exchange.start, [kept for stack in exchange.stacks for kept in stack.kept(compression, plan)]


def first_right_factor(name: str, columns: int, rank: int) -> Tensor:
    """The Q (columns, rank) that a parameter starts from: the same on every rank and in every run. fp64, on the CPU."""
    generator = torch.Generator().manual_seed(crc32(f"{name} {columns} {rank}".encode()))
    return unit_columns(torch.randn(columns, rank, generator=generator, dtype=torch.float64))


def unit_columns(matrices: Tensor) -> Tensor:
    """(..., n, r) with every column scaled to length 1; columns of zeros stay."""
    lengths = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    return matrices / torch.where(lengths > 0, lengths, 1.0)


def orthonormal(matrices: Tensor) -> Tensor:
    """Columns of (..., n, r) made orthonormal by Gram and Schmidt, each projected twice.

    A column that lies in the span of those before it, up to the cube root of the precision, becomes zero: what is left
    of it is rounding, and would point elsewhere on every machine.
    """
    out = torch.zeros_like(matrices)
    lengths = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    least = torch.finfo(matrices.dtype).eps ** (1 / 3) * lengths.amax(dim=-1, keepdim=True)
    for index in range(matrices.shape[-1]):
        column, before = matrices[..., index : index + 1], out[..., :index]
        for _ in range(2 if index else 0):
            column = column - before @ (before.mT @ column)
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        out[..., index : index + 1] = torch.where(length > least, column / torch.where(length > 0, length, 1.0), 0.0)
    return out


def next_right_factor(summed: Tensor, first: Tensor) -> Tensor:
    """Return the right factor of the next step: this step's summed Q with columns of norm 1. A column of zeros starts
    again from the first Q."""
    is_used = torch.linalg.vector_norm(summed, dim=-2, keepdim=True) > 0
    return torch.where(is_used, unit_columns(summed), first)


class Stack:
    """The matrices of one shape in a bucket, stacked, with the state that this rank keeps of them between steps.

    error: the part of past gradients that has not been sent, without the loss scale, which changes; during a step, the
    corrected gradient, with it. right: the Q of the
    next step. left and summed_right: this step's P and Q, views of the flat tensors that are summed.
    """

    def __init__(self, parts: Sequence[Part], rank: int):
        self.parts = list(parts)
        stacks = [gradient.view(matrix_sizes(parameter, gradient.shape)) for parameter, gradient in parts]
        self.gradients = [matrix for stack in stacks for matrix in stack]
        self.counts = [len(stack) for stack in stacks]
        like, number = self.gradients[0], len(self.gradients)
        rows, columns = like.shape
        first = [first_right_factor(parameter.name, columns, rank) for parameter, _ in parts]
        self.first = torch.cat([own.expand(count, -1, -1) for own, count in zip(first, self.counts)]).to(like)
        self.right = self.first.clone()
        self.error = like.new_zeros(number, rows, columns)
        self.left, self.summed_right = like.new_zeros(number, rows, rank), like.new_zeros(number, columns, rank)

    def project(self, loss_scale: float) -> None:
        """P = (gradient + error) Q."""
        if loss_scale != 1.0:
            self.error.mul_(loss_scale)
        torch_private.add_all(list(self.error.unbind()), self.gradients)
        torch.bmm(self.error, self.right, out=self.left)

    def answer(self) -> None:
        """Make the summed P orthonormal, compute Q = (gradient + error)^T P, and keep the error of P Q^T."""
        self.left.copy_(orthonormal(self.left))
        torch.bmm(self.error.mT, self.left, out=self.summed_right)
        self.error.baddbmm_(self.left, self.summed_right.mT, alpha=-1)

    def finish(self, loss_scale: float) -> None:
        """Replace the gradients by P Q^T with the summed Q."""
        if loss_scale != 1.0:
            self.error.div_(loss_scale)
        torch_private.copy_all(self.gradients, list(torch.bmm(self.left, self.summed_right.mT).unbind()))
        self.right.copy_(next_right_factor(self.summed_right, self.first))

    def kept(self, compression: PowerSGD, plan: Plan) -> Kept:
        """The errors and right factors, which live as long as the stack."""
        out = []
        errors, factors = self.error.split(self.counts), self.right.split(self.counts)
        for (parameter, gradient), error, right in zip(self.parts, errors, factors):
            local, rows = gradient.shape, row_dim(parameter)
            views = error.view(1, *local), right.view(1, *local[:rows], 1, *local[rows + 1 :], -1)
            for (kind, (shape, layout)), view in zip(compression.saved(parameter, plan).items(), views):
                spec = replace(parameter.spec, shape=shape)
                kept = LocalParameter(parameter.name, view, spec, layout, parameter.shared)
                out.append((f"powersgd/{kind} of {'x'.join(map(str, shape))}", kept))
        return out


class FactoredSum:
    """PowerSGD with error feedback: a rank adds the error of one step's approximation to its next gradient.

    A checkpoint has the errors. A run that resumes with another number of senders starts with errors of zero.
    """

    def __init__(
        self,
        uncompressed: Sequence[Tensor],
        factored: Sequence[Part],
        rank: int,
        start_sum: Sum,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ):
        self._start_sum, self._loss_scale = start_sum, loss_scale
        self._uncompressed = list(uncompressed)
        self._flat = factored[0][1].new_empty(sum(gradient.numel() for gradient in uncompressed))
        self._views = flat_views(self._flat, [gradient.shape for gradient in uncompressed])
        by_shape: dict[tuple[int, int], list[Part]] = defaultdict(list)
        for part in factored:
            by_shape[matrix_sizes(part[0], part[1].shape)[1:]].append(part)
        self.stacks = [Stack(parts, rank) for parts in by_shape.values()]
        self._left = _joined([stack.left for stack in self.stacks])
        self._right = _joined([stack.summed_right for stack in self.stacks])
        self._works: list[Waitable] = []

    @torch.no_grad()
    def start(self) -> Waitable:
        """Start the sums of the gradients that are not factored and of P."""
        self._works = []
        if self._uncompressed:
            torch_private.copy_all(self._views, self._uncompressed)
            self._works.append(self._start_sum(self._flat))
        for stack in self.stacks:
            stack.project(self._loss_scale())
        self._works.append(self._start_sum(self._left))
        return self

    @torch.no_grad()
    def wait(self) -> None:
        """Sum Q, then write all results into the bucket."""
        self._works.pop().wait()
        for stack in self.stacks:
            stack.answer()
        self._works.append(self._start_sum(self._right))
        for work in self._works:
            work.wait()
        if self._uncompressed:
            torch_private.copy_all(self._uncompressed, self._views)
        for stack in self.stacks:
            stack.finish(self._loss_scale())


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor, of which the tensors become views."""
    flat = flatten(tensors)
    for tensor, view in zip(tensors, flat_views(flat, [tensor.shape for tensor in tensors])):
        tensor.data = view
    return flat
