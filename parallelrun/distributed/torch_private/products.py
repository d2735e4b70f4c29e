"""Matrix products on AMD processors with AVX-512, by the faster of the two libraries that torch contains.

torch computes fp32 products by MKL, which takes AVX2 kernels on processors of other makers. oneDNN, by which torch
computes convolutions, generates kernels for what the processor has: half the time on Zen 5 (docs/measured.md). torch
has no switch for it, so the CPU kernels of its products are replaced here; autograd and compilation stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

# Each new shape takes oneDNN half a millisecond and 0.3 MiB that stay: sizes that are no multiples are left to MKL, so
# that numbers of rows that change from step to step (of experts) have few shapes. So are products too small or too
# narrow to gain.
MULTIPLE, SMALLEST, NARROWEST = 16, 2**22, 64

_replaced: list[torch.library.Library] = []  # torch's registry, which this changes, is one for the process


def use_fast_products(largest: int = SMALLEST) -> bool:
    """Replace torch's fp32 products on CPU in this process, if that is faster here; return whether they are replaced.

    The results differ from torch's by rounding. fp64, other dtypes and devices are not touched. largest: about the
    multiplications of the largest product of the training: where all are too small to gain, asking costs more.
    """
    if not _replaced and largest >= SMALLEST and is_faster():
        library = torch.library.Library("aten", "IMPL")
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # torch warns of every kernel that is replaced
            for name, kernel in _KERNELS.items():
                library.impl(name, kernel, "CPU")
        _replaced.append(library)
    return bool(_replaced)


@contextmanager
def torchs_own_products() -> Iterator[None]:
    """Compute by torch's own kernels meanwhile."""
    were_replaced = bool(_replaced)
    while _replaced:
        _replaced.pop()._destroy()
    try:
        yield
    finally:
        if were_replaced:
            use_fast_products()


def products_of_training(largest: int) -> AbstractContextManager[None]:
    """Compute as a training does whose largest product has so many multiplications (`use_fast_products`)."""
    return nullcontext() if largest >= SMALLEST else torchs_own_products()


def is_faster() -> bool:
    """Return whether this is a processor for which MKL has no kernels of its own, and oneDNN has."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    information = Path("/proc/cpuinfo")
    return information.exists() and "AuthenticAMD" in information.read_text(encoding="utf-8", errors="replace")


def suits(rows: int, inner: int, columns: int, *operands: Tensor) -> bool:
    """Return whether oneDNN computes a product of these sizes."""
    is_small = rows * inner * columns < SMALLEST or min(rows, inner, columns) < NARROWEST
    if is_small or (rows | inner | columns) % MULTIPLE:
        return False
    return all(operand.dtype == torch.float32 for operand in operands)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (right.is_contiguous() or right.t().is_contiguous()):
        right = right.contiguous()  # oneDNN's reference loop would take part of a larger matrix: 1,000 times as long
    bias = None if bias is None else bias.contiguous()  # whose strides oneDNN does not look at
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right.t(), bias, "none", [], "")
    return product


def _suits_both(left: Tensor, right: Tensor) -> bool:
    (rows, inner), (same, columns) = left.shape, right.shape
    return inner == same and suits(rows, inner, columns, left, right)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if _suits_both(left, right):
        return _multiply(left, right)
    return _by_torch(left, right, left.new_empty(left.size(0), right.size(1)))


def _mm_into(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    if out.dtype == torch.float32 and out.shape == (left.size(0), right.size(1)) and _suits_both(left, right):
        return out.copy_(_multiply(left, right))
    return _by_torch(left, right, out)


def _by_torch(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Set `out` to the product by torch's kernel; `torch.mm` would come back here."""
    return torch.addmm(left.new_zeros(()), left, right, beta=0, out=out)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if beta == 1 and alpha == 1 and bias.dtype == torch.float32 and _suits_both(left, right):
        if bias.shape == right.shape[1:]:
            return _multiply(left, right, bias)
        return _multiply(left, right).add_(bias)
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha, out=left.new_empty(left.size(0), right.size(1)))


def _addmm_in_place(total: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if beta == 1 and alpha == 1 and total.dtype == torch.float32 and _suits_both(left, right):
        return total.add_(_multiply(left, right))
    return torch.addmm(total, left, right, beta=beta, alpha=alpha, out=total)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    out = left.new_empty(left.size(0), left.size(1), right.size(2))
    if left.shape[::2] == right.shape[:2] and suits(left.size(1), left.size(2), right.size(2), left, right):
        for result, first, second in zip(out, left, right):
            result.copy_(_multiply(first, second))
        return out
    return torch.bmm(left, right, out=out)


def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """The product of groups: of rows (n, in) by a matrix of each group (groups, in, out); of the inner dim, (m, n) by
    (n, out), one result (m, out) a group; of columns; or one matrix each. offs: where each group ends."""
    if bias is not None or out_dtype not in (None, left.dtype):
        raise NotImplementedError("grouped products on CPU have neither a bias nor another dtype")
    if offs is None:
        return torch.bmm(left, right)
    ends = offs.tolist()
    bounds = list(zip([0, *ends], ends))
    if left.dim() == 3:
        return torch.cat([matrix @ right[:, start:end] for matrix, (start, end) in zip(left, bounds)], dim=1)
    if right.dim() == 3:
        out = left.new_empty(left.size(0), right.size(2))
        for (start, end), matrix in zip(bounds, right):
            _multiply_rows(left, matrix, start, end, out)
        return out
    out = left.new_empty(len(bounds), left.size(0), right.size(1))
    for (start, end), result in zip(bounds, out):
        _sum_rows(left[:, start:end], right[start:end], result)
    return out


def _multiply_rows(left: Tensor, right: Tensor, start: int, end: int, out: Tensor) -> None:
    """Set the rows of `out` to those of `left @ right`. The product takes some rows of the neighbours along, so that
    it has one of few shapes."""
    wider = -(-(end - start) // MULTIPLE) * MULTIPLE
    first = max(min(start, left.size(0) - wider), 0)
    rows = left[first : first + wider]
    if _suits_both(rows, right):
        out[start:end] = _multiply(rows, right)[start - first : end - first]
    else:
        _by_torch(left[start:end], right, out[start:end])


def _sum_rows(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Set `out` to left @ right, whose inner dim is cut at a multiple."""
    fitting = right.size(0) // MULTIPLE * MULTIPLE
    if not _suits_both(left[:, :fitting], right[:fitting]):
        _by_torch(left, right, out)
        return
    out.copy_(_multiply(left[:, :fitting], right[:fitting]))
    if fitting < right.size(0):
        torch.addmm(out, left[:, fitting:], right[fitting:], out=out)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "mm": _mm,
    "mm.out": _mm_into,
    "addmm": _addmm,
    "addmm_": _addmm_in_place,
    "bmm": _bmm,
    "_grouped_mm": _grouped_mm,
}
