"""The replaced products against fp64: operands of any layout, gradients, groups of any size, what torch keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.distributed import torch_private
from parallelrun.distributed.torch_private import products
from parallelrun.models.moe.experts import one_by_one

CLOSE = 5e-6  # of the largest element
has_library = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The replaced products, on any processor; the shapes that oneDNN multiplies."""
    shapes: list[tuple[int, ...]] = []
    multiply = products._multiply

    def noted(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*left.shape, right.size(1)))
        return multiply(left, right, bias)

    monkeypatch.setattr(products, "is_faster", lambda: True)
    monkeypatch.setattr(products, "_multiply", noted)
    with torch_private.torchs_own_products():
        assert torch_private.use_fast_products()
        try:
            yield shapes
        finally:
            with torch_private.torchs_own_products():
                monkeypatch.undo()


def _error(found: Tensor | None, exact: Tensor | None) -> float:
    assert found is not None and exact is not None and found.dtype == torch.float32
    return float((found.detach() - exact.detach()).abs().max() / exact.detach().abs().max().clamp(min=1e-30))


def _both(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The same leaves in fp32 and in fp64."""
    dtypes = torch.float32, torch.float64
    single, double = ([one.detach().to(dtype).requires_grad_() for one in tensors] for dtype in dtypes)
    return single, double


@has_library
def test_a_linear_layer_and_its_gradients(chosen: list[tuple[int, ...]]) -> None:
    mine, exact = _both(torch.randn(2, 128, 128), torch.randn(256, 128), torch.randn(256))
    grad = torch.randn(2, 128, 256)
    results = [functional.linear(*leaves) for leaves in (mine, exact)]
    for result in results:
        result.backward(grad.to(result.dtype))
    assert _error(*results) < CLOSE
    assert [_error(one.grad, other.grad) < CLOSE for one, other in zip(mine, exact)] == [True] * 3
    assert chosen == [(256, 128, 256), (256, 256, 128), (256, 256, 128)], "forward, input's and weight's gradient"


@has_library
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_operands_of_any_strides(chosen: list[tuple[int, ...]], turned: tuple[bool, bool]) -> None:
    left, right = torch.randn(160, 384)[:, ::2], torch.randn(192, 300)[:, 20:180]
    left = left.t().contiguous().t() if turned[0] else left
    right = right.t().contiguous().t() if turned[1] else right
    exact, total = left.double() @ right.double(), torch.randn(160, 160)
    assert _error(left @ right, exact) < CLOSE
    assert _error(torch.addmm(total, left, right), total + exact) < CLOSE
    assert _error(torch.addmm(total[0], left, right), total[0] + exact) < CLOSE
    assert _error(total.clone().addmm_(left, right), total + exact) < CLOSE
    assert _error(torch.addmm(total, left, right, beta=2, alpha=3), 2 * total + 3 * exact) < CLOSE
    assert _error(total.clone().addmm_(left, right, beta=2, alpha=3), 2 * total + 3 * exact) < CLOSE
    assert _error(torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1)), exact.expand(2, -1, -1)) < CLOSE
    assert len(chosen) == 6


@has_library
@pytest.mark.parametrize("inner", [192, 161, 0])
def test_a_product_is_written_where_it_is_wanted(chosen: list[tuple[int, ...]], inner: int) -> None:
    left, right = torch.randn(160, inner), torch.randn(inner, 160)
    buffer, grown = torch.full((160, 200), torch.nan), torch.empty(0)
    part = buffer[:, 20:180]
    assert torch.mm(left, right, out=part) is part and torch.mm(left, right, out=grown) is grown
    exact = left.double() @ right.double()
    assert _error(part, exact) < CLOSE and _error(grown, exact) < CLOSE
    assert buffer.isnan().sum() == 160 * 40 and len(chosen) == (inner == 192)


@has_library
@pytest.mark.parametrize("kind", ["part", "part turned", "every other", "expanded"])
def test_part_of_a_larger_matrix_is_multiplied_fast(chosen: list[tuple[int, ...]], kind: str) -> None:
    """oneDNN's reference loop, which it takes for operands with gaps, needs 1,000 times as long."""
    whole = torch.randn(512, 512)
    operand = {
        "part": whole[:256, 128:384],
        "part turned": whole[:256, 128:384].t(),
        "every other": whole[::2, ::2],
        "expanded": whole[:256, :1].expand(256, 256),
    }[kind]
    ours = min(_seconds(operand) for _ in range(3))
    with torch_private.torchs_own_products():
        theirs = min(_seconds(operand) for _ in range(3))
    assert len(chosen) == 9 and ours < 50 * theirs


def _seconds(operand: Tensor) -> float:
    """Processor time of three products, in which the operand is the left one, the right one, both."""
    other, began = torch.randn(256, 256), time.process_time()
    operand @ other, other @ operand, operand @ operand
    return time.process_time() - began


@has_library
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.randn(48, 512), torch.randn(512, 512)),
        (torch.randn(161, 192), torch.randn(192, 160)),
        (torch.randn(16, 16), torch.randn(16, 16)),
        (torch.randn(0, 192), torch.randn(192, 160)),
        (torch.randn(160, 0), torch.randn(0, 160)),
        (torch.randn(160, 192, dtype=torch.float64), torch.randn(192, 160, dtype=torch.float64)),
        (torch.randint(9, (160, 192)), torch.randint(9, (192, 160))),
    ],
)
def test_what_is_left_to_torch(chosen: list[tuple[int, ...]], left: Tensor, right: Tensor) -> None:
    total = torch.ones(left.size(0), right.size(1), dtype=left.dtype)
    with torch_private.torchs_own_products():
        wanted = left @ right, torch.addmm(total, left, right), torch.addmm(total, left, right, beta=2, alpha=3)
    found = left @ right, torch.addmm(total, left, right), torch.addmm(total, left, right, beta=2, alpha=3)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))
    assert torch.equal(total.clone().addmm_(left, right, beta=2, alpha=3), wanted[2])
    assert chosen == []


@has_library
def test_errors_are_torchs_own(chosen: list[tuple[int, ...]]) -> None:
    for multiply in (torch.mm, lambda a, b: torch.bmm(a[None], b[None]), lambda a, b: torch.addmm(a[:, :1], a, b)):
        with pytest.raises(RuntimeError):
            multiply(torch.randn(160, 192), torch.randn(176, 160))
    with pytest.raises(RuntimeError):
        torch.mm(torch.randn(160, 192), torch.randn(192, 160, dtype=torch.float64))
    assert chosen == []


@has_library
@pytest.mark.parametrize("counts", [(300, 0, 471, 229), (10, 30, 0, 0), (256, 256, 256, 256), (0, 0, 601, 0)])
def test_groups_of_rows(chosen: list[tuple[int, ...]], counts: tuple[int, ...]) -> None:
    """The rows that a product takes along from its neighbours leave no trace, also in gradients."""
    mine, exact = _both(torch.randn(sum(counts), 128), torch.randn(4, 256, 128))
    grad, numbers = torch.randn(sum(counts), 256), torch.tensor(counts)
    results = [torch_private.grouped_product(*mine, numbers), one_by_one(*exact, numbers)]
    for result in results:
        result.backward(grad.to(result.dtype))
    assert _error(*results) < CLOSE
    assert [_error(one.grad, other.grad) < CLOSE for one, other in zip(mine, exact)] == [True] * 2
    assert bool(chosen) == (max(counts) > 128)
    assert all(size % products.MULTIPLE == 0 for shape in chosen for size in shape)


@has_library
def test_calibration_times_small_products_as_trainings_compute_them(chosen: list[tuple[int, ...]]) -> None:
    """A training whose products are all small keeps torch's kernels."""
    left, right = torch.randn(160, 192), torch.randn(192, 160)
    for largest, replaced in ((products.SMALLEST - 1, 0), (products.SMALLEST, 1)):
        with torch_private.products_of_training(largest):
            left @ right
        assert len(chosen) == replaced


def test_products_that_are_all_too_small_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_faster", lambda: True)
    with torch_private.torchs_own_products():
        assert not torch_private.use_fast_products(products.SMALLEST - 1)
