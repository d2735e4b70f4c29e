"""The computations of role layers as functions of tensors. Tensor strategies call them too, for the same numbers.

A step makes hundreds of these calls. Casting a tensor to the dtype that it already has costs more than a comparison,
which small models notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.models import fused_norms
from parallelrun.models.autograd import apply
from parallelrun.models.rounding import rounded
from parallelrun.planner.model.model_spec import GATED
from parallelrun.planner.model.model_spec.attention import WINDOW_PART

ACCURATE = (torch.float32, torch.float64)


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, softmax and loss compute for activations of `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def cast_all(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Any]:
    """The tensors in `dtype`; None where there is none. One call, where `cast` takes one for each."""
    return [tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype) -> Tensor:
    """x (..., in) by weight (out, in) plus bias (out), all rounded to `compute_dtype`."""
    if weight.dtype != compute_dtype:
        weight = rounded(weight, compute_dtype)
    if bias is not None and bias.dtype != compute_dtype:
        bias = bias.to(compute_dtype)
    return functional.linear(x if x.dtype == compute_dtype else x.to(compute_dtype), weight, bias)


def normalise(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm or RMSNorm over the last dim; the result has the dtype of `x`.

    torch's kernels compute in at least fp32 inside and round once, so x is not widened here.
    """
    if weight.dtype != x.dtype:
        weight = rounded(weight, x.dtype)
    if bias is not None and bias.dtype != x.dtype:
        bias = rounded(bias, x.dtype)
    if kind == "rmsnorm":
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return apply(fused_norms.RMSNorm, x, weight, eps)
        return functional.rms_norm(x, weight.shape, weight, eps)
    return torch.layer_norm(x, weight.shape, weight, bias, eps)  # torch.nn's first reads a setting of cuDNN


def activate(kind: str, *parts: Tensor) -> Tensor:
    """gelu(up), in GPT-2's tanh form or exact, relu(up), or silu(gate) * up (swiglu; Shazeer 2020), gelu(gate) * up
    (geglu) or gpt-oss's form of swiglu."""
    if kind == "swiglu":
        gate, up = parts
        return functional.silu(gate) * up if torch.compiler.is_compiling() else apply(fused_norms.SwiGLU, gate, up)
    if kind in GATED:
        compute = {"geglu": fused_norms.geglu, "swiglu_clamped": fused_norms.swiglu_clamped}[kind]
        return compute(*parts) if torch.compiler.is_compiling() else apply(fused_norms.Gated, compute, *parts)
    (up,) = parts
    if kind == "relu":
        return functional.relu(up)
    return functional.gelu(up, approximate="none" if kind == "gelu_exact" else "tanh")


def token_loss(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Sum over targets >= 0 of the cross-entropy, in at least fp32.

    logits: (..., vocab); targets: int64 (...). With smoothing e each target's distribution is (1 - e) at the target
    plus e / vocab everywhere (Szegedy et al. 2016, as in torch). z_loss: weight of log^2 Z of each, where Z is the sum
    of the exponentials of its logits (Chowdhery et al. 2022, section 5).
    """
    wide = logits if logits.dtype in ACCURATE else logits.to(accurate_dtype(logits.dtype))
    wide, targets = wide.flatten(0, -2), targets.flatten().clamp(min=-1)  # torch ignores one number only
    options: dict[str, Any] = {"ignore_index": -1, "reduction": "sum", "label_smoothing": label_smoothing}
    loss = functional.cross_entropy(wide, targets, **options)
    if not z_loss:
        return loss
    return loss + z_loss * wide.logsumexp(1).masked_fill(targets < 0, 0.0).square().sum()


def drop(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """x where kept, scaled to the same expectation; backward needs only the mask, one byte an element."""
    return torch.where(keep, x * (1.0 / (1.0 - rate)), torch.zeros((), dtype=x.dtype, device=x.device))


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, window: int | None = None) -> Tensor:
    """Attention (batch, heads, seq, head_dim); fewer key/value heads serve groups of query heads.

    window: a query sees its own key and the window - 1 keys before it; None: all. Not causal: the last query alone.
    """
    if window is not None and window < key.size(2):
        if causal:
            return _attend_in_window(query, key, value, window)
        key, value = key[:, :, -window:], value[:, :, -window:]
    grouped = query.size(1) != key.size(1)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)


def _attend_in_window(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Causal attention by parts of the queries, each to the keys that some of them see: no tensor has seq x seq
    elements. The result has the heads of a token together."""
    seq, size, outputs = query.size(2), max(window, WINDOW_PART), []
    masks: dict[tuple[int, int], Tensor] = {}
    for start in range(0, seq, size):
        stop, first = min(start + size, seq), max(0, start - window + 1)
        shape = stop - start, stop - first
        if shape not in masks:
            seen = window_mask(*shape, start - first, window, query.device)
            masks[shape] = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
        out = functional.scaled_dot_product_attention(
            query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop], masks[shape],
            enable_gqa=query.size(1) != key.size(1),
        )  # fmt: skip
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, 1).transpose(1, 2)


def window_mask(queries: int, keys: int, offset: int, window: int, device: torch.device) -> Tensor:
    """bool (queries, keys): whether query i, at position offset + i among the keys, sees key j."""
    places = torch.arange(offset, offset + queries, device=device).unsqueeze(1)
    distance = places - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


def attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    rate: float,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """The same, computed explicitly, with dropped probabilities. keep: bool (batch, heads, query, key)."""
    group = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(-2, -1)) * query.size(-1) ** -0.5
    scores = scores.to(accurate_dtype(scores.dtype))
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if window is not None:
            unseen |= torch.ones_like(unseen).tril(-window)
        scores = scores.masked_fill(unseen, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1).to(query.dtype)
    return drop(probabilities, keep, rate) @ value


@dataclass(frozen=True)
class Rotary:
    """The frequencies of rotary positions. kind: none | linear (Chen et al. 2023) | llama3 (Llama 3.1: long waves are
    divided by `factor`, short ones kept, those between interpolated) | yarn (Peng et al. 2023: the same, by the number
    of the pair). growth: of what is turned. See `model.rope_*` in the schema."""

    theta: float
    kind: str = "none"
    factor: float = 1.0
    original_seq: int = 8192
    low_factor: float = 1.0
    high_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    growth: float = 1.0
    truncate: bool = True

    def frequencies(self, half: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(half,): the angle per position of each pair of a head."""
        plain = self.theta ** (-torch.arange(half, dtype=dtype, device=device) / half)
        if self.kind == "none":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "yarn":
            first, last = self._scaled_pairs(half)
            pairs = torch.arange(half, dtype=dtype, device=device)
            share = 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
        else:
            turns = self.original_seq * plain / (2 * math.pi)  # within the first training's sequence
            share = ((turns - self.low_factor) / (self.high_factor - self.low_factor)).clamp(0.0, 1.0)
        return plain * (share + (1.0 - share) / self.factor)

    def _scaled_pairs(self, half: int) -> tuple[float, float]:
        """The last pair of features that is kept and the first one that is scaled, in yarn's published form."""
        first, last = (
            half * math.log(self.original_seq / (turns * 2 * math.pi)) / math.log(self.theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, 2 * half - 1)
        return low, high if high != low else high + 0.001  # no division by 0


def rotate(x: Tensor, rotary: Rotary, positions: Tensor | None = None) -> Tensor:
    """Rotary positions (Su et al. 2021, halves rotated as in the published Llama weights' layout on Hugging Face).

    x: (batch, heads, seq, head_dim). positions: int64 (seq,), or (batch, seq) where samples have their own; None: 0, 1,
    ... Angles are computed rather than kept in a buffer, so that only parameters need storage.
    """
    dtype, half = accurate_dtype(x.dtype), x.size(-1) // 2
    frequency = rotary.frequencies(half, dtype, x.device)
    places = torch.arange(x.size(-2), device=x.device) if positions is None else positions
    angle = places.to(dtype).unsqueeze(-1) * frequency
    if angle.dim() > 2:
        angle = angle.unsqueeze(1)  # of every head
    cosine, sine = angle.cos(), angle.sin()
    if rotary.growth != 1.0:
        cosine, sine = cosine * rotary.growth, sine * rotary.growth
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
