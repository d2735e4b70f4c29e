"""Operations on many tensors in one call from Python, and products that torch keeps private."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply many tensors in place with one call from Python, which is faster than a loop."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, 0-d, with one call from Python."""
    return list(torch._foreach_norm(tensors)) if tensors else []


def num_changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, which autograd counts and tells nobody."""
    return tensor._version


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors with one call from Python."""
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add many tensors in place with one call from Python."""
    if targets:
        torch._foreach_add_(targets, sources)


def has_grouped_product(rows: Tensor, weights: Tensor) -> bool:
    """Return whether `grouped_product` supports them: not fp64, some rows, contiguous weights of fewer than 1,024
    groups, lines that begin at multiples of 16 bytes."""
    line = 16 // rows.element_size()
    starts = rows.size(-1), weights.size(1), rows.storage_offset(), weights.storage_offset()
    if rows.size(0) == 0 or weights.size(0) >= 1024 or not weights.is_contiguous():
        return False
    return rows.dtype in (torch.float32, torch.bfloat16, torch.float16) and not any(start % line for start in starts)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows (n, in), sorted by group, by their group's weights (groups, out, in); return (n, out).

    counts: (groups,), the rows of each group. `functional.grouped_mm` is private in older versions of torch.
    """
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = grouped(rows.contiguous(), weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    if product.requires_grad:
        product.register_hook(Tensor.contiguous)  # backward's products refuse other strides
    return product


def has_scaled_product(left: Tensor, right: Tensor) -> bool:
    """Return whether the device multiplies in float8 itself: NVIDIA's from Ada on, sizes that are multiples of 16."""
    if not left.is_cuda or torch.version.hip or any(size % 16 for size in (*left.shape, *right.shape)):
        return False
    return torch.cuda.get_device_capability(left.device) >= (8, 9)


def scaled_product(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply matrices in float8, whose numbers stand for as many times their scales; the kernel reads both along the
    inner dim. `functional.scaled_mm` is not in older versions of torch."""
    rows, columns = left.contiguous(), right.t().contiguous().t()
    product: Tensor = torch._scaled_mm(rows, columns, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
    return product


def reshaped(fresh: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a result of a node's forward in another shape, no view of it for autograd: others may overwrite it."""
    tensor: Tensor = torch.ops.aten._unsafe_view(fresh, shape)
    return tensor


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given that of silu(x): the kernel of torch's own backward, which has no public name."""
    gradient: Tensor = torch.ops.aten.silu_backward(grad, x)
    return gradient
