"""Attention on the meta device as a real device computes it, for measurements of what a module saves and computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Let attention on meta save no scores. torch's function takes the unfused formula on meta, whatever the device to
    come; the operator of the fused kernel, which is private, has the same shapes there as on a GPU."""
    unfused = functional.scaled_dot_product_attention

    def fused(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        if query.is_meta and query.dim() == 4 and not dropout_p:
            operator: Any = torch.ops.aten._scaled_dot_product_efficient_attention
            if more.get("enable_gqa"):  # kernels keep few keys and values as they are; which ones, meta cannot tell
                key, value = (few[:, :1].expand(-1, query.size(1), -1, -1) for few in (key, value))
            if query.shape[:2] == key.shape[:2]:
                out: Tensor = operator(query, key, value, attn_mask, True, 0.0, is_causal)[0]
                return out
        return unfused(query, key, value, attn_mask, dropout_p, is_causal, **more)

    with mock.patch.object(functional, "scaled_dot_product_attention", fused):
        yield
