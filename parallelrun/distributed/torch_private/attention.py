"""Attention of one block of keys, with the log-sum-exp of its scores, by the fused kernels below torch's own
`scaled_dot_product_attention`.

torch's public function keeps the log-sum-exp to itself, and its backward normalises by the block's own. Attention over
keys that arrive block by block needs both: it merges blocks by their log-sum-exp, and differentiates each block with
the output and the log-sum-exp of all blocks. The kernels' operators take and return them; they are private.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CUDA_HALF = (torch.float16, torch.bfloat16)
_LSE_ROWS = 32  # the memory-efficient kernel keeps its log-sum-exp in multiples of so many rows
_LOAD = 16  # bytes that the kernels on CUDA load at a time


def has_fused_attention(query: Tensor, key: Tensor) -> bool:
    """Whether a kernel serves the dtype, device, head_dim and heads of (batch, heads, seq, head_dim)."""
    if query.device.type == "cpu":
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    width = query.size(-1)
    if query.device.type != "cuda":
        return False
    if query.dtype in _CUDA_HALF:
        return width % 8 == 0 and width <= 256
    return query.dtype == torch.float32 and width % 4 == 0 and query.size(1) == key.size(1)


def _loadable(x: Tensor) -> Tensor:
    """Return x, or a copy where its strides are not as the kernels assume without checking: the features of a head side
    by side; on CUDA every head at a multiple of `_LOAD` bytes."""
    step = _LOAD // x.element_size() if x.device.type == "cuda" else 1
    offsets = (x.storage_offset(), *(stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1))
    if x.stride(-1) == 1 and all(offset % step == 0 for offset in offsets):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    (batch, heads, seq, width), (_, kv_heads, num_keys, _) = query.shape, key.shape
    assert key.shape == value.shape == (batch, kv_heads, num_keys, width) and kv_heads and heads % kv_heads == 0
    assert not causal or seq == num_keys, "a causal block has as many keys as queries"


def fused_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out as query, log-sum-exp (batch, heads, seq) in at least fp32), all of (batch, heads, seq, head_dim), in any
    strides. Without keys the result is 0, its log-sum-exp -inf.

    causal: query i sees keys 0..i; there are then as many keys as queries.
    """
    aten: Any = torch.ops.aten
    _check(query, key, value, causal)
    if not (query.numel() and key.numel()):  # the kernel on CPU divides by the number of tokens
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
        return torch.zeros_like(query), lse
    query, key, value = map(_loadable, (query, key, value))
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    elif query.dtype in _CUDA_HALF:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)
    return out, lse[..., : query.size(2)]


def fused_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's gradients of query, key and value. grad, out, lse: of the attention over all blocks."""
    aten: Any = torch.ops.aten
    _check(query, key, value, causal)
    if not (query.numel() and key.numel()):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    query, out = _loadable(query), _loadable(out)
    tensors = tuple(map(_loadable, (grad, query, key, value)))
    if query.device.type == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, out, lse, 0.0, causal)
    elif query.dtype in _CUDA_HALF:
        seeds = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.zeros((), device=query.device)
        sizes = (None, None, query.size(2), key.size(2), 0.0, causal)
        gradients = aten._scaled_dot_product_flash_attention_backward(*tensors, out, lse.contiguous(), *sizes, *seeds)
    else:
        seeds = (torch.zeros((), dtype=torch.int64, device=query.device),) * 2
        padded = functional.pad(lse, (0, -lse.size(2) % _LSE_ROWS))
        wanted = [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            *tensors, None, out, padded, *seeds, 0.0, wanted, causal
        )
    grad_query, grad_key, grad_value = gradients[:3]
    return grad_query, grad_key, grad_value
