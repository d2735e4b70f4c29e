"""The attention operators of CUDA, with their arguments and results, computed by the CPU's (`tests.stand_in_gpu`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LSE_ROWS = 32  # the memory-efficient operator pads its log-sum-exp to multiples of so many rows
LOAD = 16  # bytes that the kernels load at a time


def _check_loads(*tensors: Tensor) -> None:
    """A GPU's kernels fail or read something else where these do not hold."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1
        starts = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1]
        assert not any(start * tensor.element_size() % LOAD for start in (tensor.storage_offset(), *starts))


def flash(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any) -> Any:
    assert query.dtype in (torch.float16, torch.bfloat16)
    _check_loads(query, key, value)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal)
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, query.size(2), key.size(2), *seeds, out.new_zeros(())


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, query_starts: None,
    key_starts: None, num_queries: int, num_keys: int, dropout: float, causal: bool, *seeds: Tensor,
) -> Any:  # fmt: skip
    assert query_starts is key_starts is None and (num_queries, num_keys) == (query.size(2), key.size(2))
    assert lse.shape == query.shape[:3] and lse.is_contiguous() and len(seeds) == 2
    return _backward(grad, query, key, value, out, lse, dropout, causal)


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: None, keeps_lse: bool, dropout: float = 0.0, causal: bool = False
) -> Any:
    assert bias is None and keeps_lse and query.size(1) == key.size(1)
    _check_loads(query, key, value)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal)
    padded = functional.pad(lse, (0, -lse.size(2) % LSE_ROWS), value=torch.inf)
    return out, padded, *torch.zeros(2, dtype=torch.int64).unbind()


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False,
) -> Any:  # fmt: skip
    assert bias is None and wanted == [True, True, True, False] and lse.size(2) % LSE_ROWS == 0
    lse = lse[..., : query.size(2)].contiguous()
    return *_backward(grad, query, key, value, out, lse, dropout, causal), None


def _backward(*args: Any) -> Any:
    _check_loads(*args[:5])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args)


ON_CPU = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
