"""Reductions of tensors in a fixed order, so that all ranks that compute one get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_Combine = Callable[..., Tensor]
_OPERATIONS: dict[Any, _Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_OF_CODE = {int(kind): kind for kind in _OPERATIONS}  # comparing torch's objects takes longer than a small sum
_ROUNDED = (torch.bfloat16, torch.float16)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """Return the reduction of one of torch's ReduceOps.

    Raises RuntimeError for one that CPU tensors do not have, or not of this dtype.
    """
    reduction = _OF_CODE.get(int(getattr(op, "op", op)))
    if reduction is None:
        raise RuntimeError(f"[shared memory] {op} is not supported on CPU tensors")
    return _reduction(reduction, dtype)


class Reduction:
    """See `reduction_of`. operation: a key of _OPERATIONS."""

    __slots__ = ("_combine", "_in_fp32", "_is_mean")

    def __init__(self, operation: Any, dtype: torch.dtype):
        if dtype.is_floating_point and operation in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            raise RuntimeError(f"[shared memory] {operation} needs integers, not {dtype}")
        self._combine = _OPERATIONS[operation]
        self._is_mean = operation == dist.ReduceOp.AVG
        self._in_fp32 = dtype in _ROUNDED and self._combine in (torch.add, torch.mul)

    def __call__(self, output: Tensor, sources: Sequence[Tensor]) -> None:
        """Set `output` to the reduction of `sources` in their order; it may be the memory of one of the first two.

        Sums of more than two 16-bit numbers are rounded once.
        """
        if output.dtype == torch.bool:
            output, sources = output.view(torch.uint8), [source.view(torch.uint8) for source in sources]
        if len(sources) == 1:
            output.copy_(sources[0])
        elif self._in_fp32 and (len(sources) > 2 or self._is_mean):
            total = self._combine(sources[0].float(), sources[1])
            for source in sources[2:]:
                self._combine(total, source, out=total)
            output.copy_(total.div_(len(sources)) if self._is_mean else total)
            return
        else:
            self._combine(sources[0], sources[1], out=output)
            for source in sources[2:]:
                self._combine(output, source, out=output)
        if self._is_mean and len(sources) > 1:
            output.div_(len(sources))


_reduction = cache(Reduction)
