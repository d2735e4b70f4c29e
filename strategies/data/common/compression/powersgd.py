"""PowerSGD at run time (Vogels, Karimireddy and Jaggi 2019).

After the wait a bucket's buffer holds the approximation, bitwise equal on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.comm import Waitable
from parallelrun.planner.contract.plan import Plan

from ..bucketed_plan import BucketedAllReduce
from ..reducer import Part, Sum
from . import factors
from .plan import PowerSGD, matrix_shape, num_columns


def sender(buffer: Tensor, parts: Sequence[Part], plan: Plan, start_sum: Sum) -> Callable[[], Waitable]:
    """Return a function that starts the exchange of `buffer`, in the messages that `PowerSGD.messages` predicts."""
    compression = BucketedAllReduce.of(plan).compression
    assert isinstance(compression, PowerSGD)
    factored = [(held, gradient) for held, gradient in parts if compression.is_factored(held, gradient.shape, plan)]
    if not factored:
        return partial(start_sum, buffer)
    names = {held.name for held, _ in factored}
    whole = [gradient for held, gradient in parts if held.name not in names]
    return FactoredSum(whole, factored, compression.rank, start_sum).start


class Stack:
    """The matrices of one shape in a bucket, stacked, with the state that this rank keeps of them between steps.

    error: the part of past gradients that has not been sent; during a step, the corrected gradient. right: the Q of the
    next step. left and summed_right: this step's P and Q, views of the flat tensors that are summed.
    """

    def __init__(self, parts: Sequence[Part], rank: int):
        self.gradients = [gradient.view(matrix_shape(gradient.shape)) for _, gradient in parts]
        like = self.gradients[0]
        rows, columns = like.shape
        rank = num_columns(like.shape, rank)
        first = [factors.first_right_factor(held.name, columns, rank) for held, _ in parts]
        self.first = torch.stack(first).to(like)
        self.right = self.first
        self.error = like.new_zeros(len(parts), rows, columns)
        self.left, self.summed_right = like.new_zeros(len(parts), rows, rank), like.new_zeros(len(parts), columns, rank)

    def project(self) -> None:
        """P = (gradient + error) Q."""
        torch_private.add_all(list(self.error.unbind()), self.gradients)
        torch.bmm(self.error, self.right, out=self.left)

    def answer(self) -> None:
        """Make the summed P orthonormal, compute Q = (gradient + error)^T P, and keep the error of P Q^T."""
        self.left.copy_(factors.orthonormal(self.left))
        torch.bmm(self.error.mT, self.left, out=self.summed_right)
        self.error.baddbmm_(self.left, self.summed_right.mT, alpha=-1)

    def finish(self) -> None:
        """Replace the gradients by P Q^T with the summed Q."""
        torch_private.copy_all(self.gradients, list(torch.bmm(self.left, self.summed_right.mT).unbind()))
        self.right = factors.next_right_factor(self.summed_right, self.first)


class FactoredSum:
    """PowerSGD with error feedback: a rank adds the error of one step's approximation to its next gradient.

    The error is kept in memory only: a resumed run starts with an error of zero.
    """

    def __init__(self, whole: Sequence[Tensor], factored: Sequence[Part], rank: int, start_sum: Sum):
        self._start_sum = start_sum
        self._whole = list(whole)
        self._flat = factored[0][1].new_empty(sum(gradient.numel() for gradient in whole))
        by_shape: dict[tuple[int, int], list[Part]] = defaultdict(list)
        for held, gradient in factored:
            by_shape[matrix_shape(gradient.shape)].append((held, gradient))
        self.stacks = [Stack(parts, rank) for parts in by_shape.values()]
        self._left = _joined([stack.left for stack in self.stacks])
        self._right = _joined([stack.summed_right for stack in self.stacks])
        self._works: list[Waitable] = []

    @torch.no_grad()
    def start(self) -> Waitable:
        """Start the sums of the gradients that are not factored and of P."""
        self._works = []
        if self._whole:
            torch_private.copy_all(_views(self._flat, self._whole), self._whole)
            self._works.append(self._start_sum(self._flat))
        for stack in self.stacks:
            stack.project()
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
        if self._whole:
            torch_private.copy_all(self._whole, _views(self._flat, self._whole))
        for stack in self.stacks:
            stack.finish()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor, of which the tensors become views."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for tensor, view in zip(tensors, _views(flat, tensors)):
        tensor.data = view
    return flat


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [part.view_as(tensor) for part, tensor in zip(flat.split([t.numel() for t in like]), like)]
