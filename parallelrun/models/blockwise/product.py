"""The attention of one rank's queries to all ranks' keys as one autograd node. A `Transport` brings the keys.

Backward needs its own keys and values, the output and the log-sum-exp only: keys of other ranks travel again, so that
kept activations shrink with cp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.models.blockwise.blocks import DroppedPart, Merged, attend_to_block, block_gradients
from parallelrun.models.blockwise.tiles import Tile, document_tiles, tiles
from parallelrun.models.blockwise.transports import Transport
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.functions import accurate_dtype
from parallelrun.planner.contract.context_order import Spans


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer. spans: the positions of each rank of the transport's group.

    documents: packed into the samples; tiles are then inside documents, and queries of padding see nothing. dropped:
    from a rank of the group to the dropout of its keys' probabilities; None: nothing is dropped. window: the keys that
    a query sees; None: all before it. softcap: of scores. sinks: a score of each head (heads,), which the softmax
    counts as that of a key of value 0; `SinkGradient` gives them their gradients.
    """

    transport: Transport
    spans: Sequence[Spans]
    causal: bool
    documents: DocumentBounds | None = None
    dropped: Callable[[int], DroppedPart] | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def tiles(self, source: int) -> Iterator[Tile]:
        """The tiles of this rank's queries and the keys of `source`."""
        seen = self._seen(source)
        return seen if self.softcap is None else (tile._replace(softcap=self.softcap) for tile in seen)

    def _seen(self, source: int) -> Iterator[Tile]:
        mine, theirs = self.spans[self.transport.group.index], self.spans[source]
        if self.documents is None:
            yield from tiles(mine, theirs, self.causal, self.window)
            return
        for sample, lengths in enumerate(self.documents.lengths):
            yield from document_tiles(mine, theirs, self.causal, tuple(lengths), sample, self.window)

    def dropout(self, source: int) -> DroppedPart | None:
        """The dropout of the probabilities of the keys of `source`."""
        return None if self.dropped is None else self.dropped(source)


class BlockwiseAttention(torch.autograd.Function):
    """query (batch, heads, tokens, head_dim), key and value (batch, kv heads, tokens, head_dim) -> as query; and the
    log-sum-exp of scores (batch, heads, tokens)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        own = torch.stack((key, value))
        # no tile has all of the queries, or its result is not known to have the heads of a token together
        in_pieces = any(x is not None for x in (call.documents, call.window, call.softcap, call.sinks))
        merged = Merged.nothing(query) if in_pieces else None
        for source, (keys, values) in call.transport.blocks(own):
            dropped = call.dropout(source)
            for tile in call.tiles(source):
                out, lse = attend_to_block(query, keys, values, tile, dropped)
                if merged is None:  # the first result is not copied
                    merged = Merged(out, lse)
                else:
                    merged.add(out, lse, tile.query, tile.samples)
        assert merged is not None, "a rank attends to itself"
        if call.sinks is not None:
            merged.add_sinks(call.sinks)
        result = merged.out.to(query.dtype)
        if query.untyped_storage().nbytes() > query.nbytes:  # of the exchanged heads: it would keep keys and values
            query = query.clone()
        ctx.save_for_backward(query, own, result, merged.lse)
        ctx.call = call
        ctx.mark_non_differentiable(merged.lse)
        return result, merged.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, own, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        grad_query = torch.zeros_like(query, dtype=accurate_dtype(query.dtype))
        sums = call.transport.gradients(own)
        for source, (keys, values) in call.transport.blocks(own):
            dropped, parts = call.dropout(source), []
            for tile in call.tiles(source):
                gradients = block_gradients(grads[0], query, keys, values, out, lse, tile, dropped)
                grad_query[tile.samples, :, tile.query] += gradients[0]
                parts.append((tile, gradients[1], gradients[2]))
                del gradients  # else it would live beside the next block's
            sums.add(source, parts)
            del parts
        grad_key, grad_value = sums.own().to(own.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, None


class SinkGradient(torch.autograd.Function):
    """Attention's result unchanged; backward gives sinks (heads,) their gradients.

    A node of its own: where backward is split, the weights' half runs nothing else again. lse: with the sinks.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        ctx.save_for_backward(out, lse, sinks)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        out, lse, sinks = ctx.saved_tensors
        share = torch.exp(sinks.to(lse.dtype).view(-1, 1) - lse)  # of a query's probability
        mean = (grads[0].to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        return grads[0], None, -(share * mean).sum((0, 2)).to(sinks.dtype)
