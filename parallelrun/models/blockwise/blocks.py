"""Attention of queries to keys that arrive block by block, exact in forward and backward.

Each block gives its own output and the log-sum-exp of its scores, by which blocks are merged online (Milakov and
Gimelshein 2018; Dao et al. 2022). The backward of a block needs the output and the log-sum-exp of all blocks, and then
gives exactly its part of the gradients: no softmax over all keys is ever computed, nor kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.models.blockwise.tiles import Tile
from parallelrun.models.functions import accurate_dtype, cast, drop
from parallelrun.planner.model.model_spec.attention import ROWS

# (samples, queries, keys), both by index among the tokens of their ranks -> whether to keep each probability, bool
# (samples, heads, queries, keys)
KeepMask = Callable[[slice, slice, slice], Tensor]


@dataclass(frozen=True)
class DroppedPart:
    """Dropout of the probabilities of one block. keep: of slices of samples, queries and keys."""

    keep: KeepMask
    rate: float


def attend_to_block(
    query: Tensor, key: Tensor, value: Tensor, tile: Tile, dropped: DroppedPart | None = None
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of the tile's queries over its keys.

    query: (batch, heads, queries, head_dim); key, value: (batch, kv heads, keys, head_dim), all of the ranks' tokens.
    out: (batch, heads, tile's queries, head_dim) as query; log-sum-exp: (batch, heads, tile's queries), at least fp32.
    """
    query, key, value = _cut(query, key, value, tile)
    if _is_fused(query, key, tile, dropped):
        return torch_private.fused_attention(query, key, value, tile.causal)
    parts = [_explicit(query, part, key, value, tile, dropped) for part in _parts(query, key, tile)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def block_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    dropped: DroppedPart | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's gradients of its queries, keys and values. grad, out, lse: of all blocks, for all of the queries."""
    rows, num_kv_heads = tile.query, key.size(1)
    query, key, value = _cut(query, key, value, tile)
    grad, out, lse = (tensor[tile.samples, :, rows] for tensor in (grad, out, lse))
    if _is_fused(query, key, tile, dropped):
        gradients = torch_private.fused_attention_backward(grad, query, key, value, out, lse, tile.causal)
    else:
        gradients = _explicit_backward(grad, query, key, value, out, lse, tile, dropped)
    return gradients[0], _summed_heads(gradients[1], num_kv_heads), _summed_heads(gradients[2], num_kv_heads)


class Merged:
    """The attention over the blocks so far, in at least fp32. A query that has not seen a key has the log-sum-exp -inf
    and the result 0."""

    def __init__(self, out: Tensor, lse: Tensor):
        self.out, self.lse = cast(out, accurate_dtype(out.dtype)), lse

    @classmethod
    def nothing(cls, query: Tensor) -> Merged:
        """Return the state of queries (batch, heads, tokens, head_dim) before the first key. The result has the heads
        of a token together, as the next layer reads them."""
        wide = accurate_dtype(query.dtype)
        out = torch.zeros_like(query.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format)
        return cls(out.transpose(1, 2), query.new_full(query.shape[:3], float("-inf"), dtype=wide))

    def add(self, out: Tensor, lse: Tensor, rows: slice, samples: slice = slice(None)) -> None:
        """Merge a block's result for the queries `rows` of `samples`."""
        mine, total = self.out[samples, :, rows], self.lse[samples, :, rows]
        mine.lerp_(cast(out, mine.dtype), torch.sigmoid(lse - total).unsqueeze(-1))
        total.copy_(torch.logaddexp(total, lse))

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a key of score `sinks` (heads,) and value 0, which every query sees once, whatever blocks there are."""
        total = torch.logaddexp(self.lse, cast(sinks, self.lse.dtype).view(-1, 1))
        self.out.mul_(torch.exp(self.lse - total).unsqueeze(-1))
        self.lse = total


def _cut(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's queries, keys and values; heads of keys and values are repeated where they serve several."""
    copies = query.size(1) // key.size(1)
    key, value = key[tile.samples, :, tile.key], value[tile.samples, :, tile.key]
    if copies > 1:  # the kernels on CPU read as many heads of keys as of queries
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    return query[tile.samples, :, tile.query], key, value


def _summed_heads(gradient: Tensor, num_heads: int) -> Tensor:
    copies = gradient.size(1) // num_heads
    return gradient if copies == 1 else gradient.unflatten(1, (num_heads, copies)).sum(2)


def _is_fused(query: Tensor, key: Tensor, tile: Tile, dropped: DroppedPart | None) -> bool:
    plain = dropped is None and tile.softcap is None and tile.oldest is None
    return plain and torch_private.has_fused_attention(query, key)


class _Part(NamedTuple):
    """Some queries of a tile and the keys that they see, by index in the tile."""

    rows: slice
    keys: slice


def _parts(query: Tensor, key: Tensor, tile: Tile) -> Iterator[_Part]:
    """At most ROWS queries at a time, without the keys that none of them sees."""
    for start in range(0, query.size(2), ROWS):
        stop = min(start + ROWS, query.size(2))
        first = 0 if tile.oldest is None else max(0, start + tile.oldest + 1)
        yield _Part(slice(start, stop), slice(first, stop if tile.causal else key.size(2)))


def _scores(query: Tensor, key: Tensor, part: _Part, tile: Tile) -> Tensor:
    """Scores (batch, heads, rows, keys), in at least fp32, -inf where a query does not see the key."""
    query, key = query[:, :, part.rows], key[:, :, part.keys]
    scores = (query @ key.transpose(-2, -1)) * query.size(-1) ** -0.5
    scores = cast(scores, accurate_dtype(scores.dtype))
    if tile.softcap is not None:  # before the mask
        scores = scores.div_(tile.softcap).tanh_().mul_(tile.softcap)
    offset, unseen = part.rows.start - part.keys.start, float("-inf")
    if tile.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + offset)
        scores = scores.masked_fill(future, unseen)
    if tile.oldest is not None:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(tile.oldest + offset)
        scores = scores.masked_fill(behind, unseen)
    return scores


def _keep(dropped: DroppedPart, part: _Part, tile: Tile) -> Tensor:
    queries, keys = (
        slice(start + inside.start, start + inside.stop)
        for start, inside in ((tile.query.start, part.rows), (tile.key.start, part.keys))
    )
    return dropped.keep(tile.samples, queries, keys)


def _explicit(
    query: Tensor, part: _Part, key: Tensor, value: Tensor, tile: Tile, dropped: DroppedPart | None
) -> tuple[Tensor, Tensor]:
    """Some rows of a tile: probabilities are dropped after they were normalised, so log-sum-exp counts all."""
    scores = _scores(query, key, part, tile)
    lse = torch.logsumexp(scores, -1)
    probabilities = scores.sub_(lse.unsqueeze(-1)).exp_().to(query.dtype)
    if dropped is not None:
        probabilities = drop(probabilities, _keep(dropped, part, tile), dropped.rate)
    return probabilities @ value[:, :, part.keys], lse


def _explicit_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    dropped: DroppedPart | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al. 2022, algorithm 4. The sum over keys of probability times its gradient is the product of the output
    and its gradient, whatever was dropped."""
    wide = accurate_dtype(query.dtype)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros_like(tensor, dtype=wide) for tensor in (key, value))
    for part in _parts(query, key, tile):
        rows, keys = part
        grad_out = grad[:, :, rows]
        scores = _scores(query, key, part, tile)
        # that of the cap at its result, which is -inf where the query does not see the key
        cap = tile.softcap
        slope = None if cap is None else 1.0 - (scores.clamp(min=-cap) / cap).square_()
        probabilities = (scores - lse[:, :, rows].unsqueeze(-1)).exp_()
        del scores
        weights, grad_weights = probabilities.to(query.dtype), grad_out @ value[:, :, keys].transpose(-2, -1)
        if dropped is not None:
            keep = _keep(dropped, part, tile)
            weights, grad_weights = drop(weights, keep, dropped.rate), drop(grad_weights, keep, dropped.rate)
        mean = (grad_out.to(wide) * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        grad_wide = probabilities * (grad_weights.to(wide) - mean) * query.size(-1) ** -0.5
        grad_scores = (grad_wide if slope is None else grad_wide.mul_(slope)).to(query.dtype)
        grad_query[:, :, rows] = grad_scores @ key[:, :, keys]
        grad_key[:, :, keys] += grad_scores.transpose(-2, -1) @ query[:, :, rows]
        grad_value[:, :, keys] += weights.transpose(-2, -1) @ grad_out
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)
