"""The attention of a layer whose tokens several ranks hold: exchange of heads, blocks of keys, dropout by position.

Exchange of heads: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallelrun.distributed.mesh import Group
from parallelrun.models import documents, dropout
from parallelrun.models.autograd import apply, apply_to_all
from parallelrun.models.blockwise.blocks import DroppedPart
from parallelrun.models.blockwise.product import AttentionCall, BlockwiseAttention, SinkGradient
from parallelrun.models.blockwise.tiles import EXCHANGED
from parallelrun.models.blockwise.transports import RingTransport, Transport
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.exchange import exchange
from parallelrun.models.functions import attend
from parallelrun.planner.contract.context_order import Span, Spans

if TYPE_CHECKING:
    from parallelrun.models.masked_layers import AttentionProduct

HEADS, TOKENS = 1, 2  # dims of queries, keys and values


@dataclass(frozen=True)
class ContextAttention:
    """Attention of a layer over the ranks of cp.

    heads: the group whose ranks exchange tokens for heads first, or of one rank. transport: over the other ranks.
    spans: the positions of each rank of the transport's group, after that exchange; seq: of the whole sample.
    """

    heads: Group
    transport: Transport
    spans: Sequence[Spans]
    seq: int

    def __call__(self, layer: AttentionProduct, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (batch, heads, own tokens, head_dim), key and value with maybe fewer heads: as query."""
        if self.heads.size > 1:
            query, key, value = to_sequence(query, key, value, self.heads)
        packed = layer.documents()
        if self.transport.group.size == 1 and not layer.active and not layer.own_scores:
            if packed is not None:
                out = documents.attend(query, key, value, packed, layer.causal, layer.window)
            else:
                out = attend(query, key, value, layer.causal, layer.window)
        else:
            call = self._call(layer, query, packed)
            out, lse = apply_to_all(BlockwiseAttention, query, key, value, call)
            if call.sinks is not None and layer.sinks is not None:
                out = apply(SinkGradient, out, lse, self._own_heads(layer.sinks))
        return to_heads(out, self.heads) if self.heads.size > 1 else out

    def _call(self, layer: AttentionProduct, query: Tensor, packed: DocumentBounds | None) -> AttentionCall:
        sinks = None if layer.sinks is None else self._own_heads(layer.sinks).detach()
        call = AttentionCall(self.transport, self.spans, layer.causal, packed, None, layer.window, layer.softcap, sinks)
        if not layer.active:
            return call
        batch, num_heads = query.shape[:2]
        first = layer.head_offset + self.heads.index * num_heads
        mine, ids = self._positions(self.transport.group.index, query.device), layer.sample_ids(batch)
        heads = torch.arange(first, first + num_heads, device=query.device).unsqueeze(1) * self.seq

        def dropped(source: int) -> DroppedPart:
            theirs = self._positions(source, query.device)

            def keep(samples: slice, queries: slice, keys: slice) -> Tensor:
                rows = heads + mine[queries]
                mask = dropout.keep_mask(layer.key, ids[samples], rows.flatten(), theirs[keys], layer.rate)
                return mask.view(mask.size(0), *rows.shape, -1)

            return DroppedPart(keep, layer.rate)

        return replace(call, dropped=dropped)

    def _own_heads(self, sinks: Tensor) -> Tensor:
        """Those of the heads that this rank has after the exchange."""
        return sinks.chunk(self.heads.size)[self.heads.index]

    def _positions(self, rank: int, device: torch.device) -> Tensor:
        parts = [torch.arange(s.start, s.stop, s.step, device=device) for s in self.spans[rank]]
        return torch.cat(parts)


def on_one_rank(layer: AttentionProduct, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a layer whose tokens are all here, as `ContextAttention` computes it."""
    one, seq = Group("", (0,), 0, None), key.size(2)
    return ContextAttention(one, RingTransport(one), ((Span(0, 1, seq),),), seq)(layer, query, key, value)


def to_sequence(query: Tensor, key: Tensor, value: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Own tokens of all heads -> all of the group's tokens of this rank's heads, in one all-to-all.

    Heads of keys and values are repeated, where there are fewer than ranks.
    """
    size = group.size
    copies = size // gcd(size, key.size(1))
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    parts = [tensor.unflatten(1, (size, -1)) for tensor in (query, key, value)]
    counts = [tensor.size(2) for tensor in parts]
    both = exchange(torch.cat(parts, 2).flatten(1, 2), group, EXCHANGED, HEADS, TOKENS)
    query, key, value = both.split(counts, 1)
    return query, key, value


def to_heads(out: Tensor, group: Group) -> Tensor:
    """The group's tokens of this rank's heads -> own tokens of all heads."""
    return exchange(out, group, EXCHANGED, TOKENS, HEADS)
