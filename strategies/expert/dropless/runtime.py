"""Dropless dispatch: counts first, then uneven all-to-alls of the kept rows (MegaBlocks, Gale et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallelrun.models.moe import rows
from parallelrun.models.moe.routing import Routing

from ..common import dispatcher
from ..common.all_to_all import exchange_counts
from ..common.dispatcher import ChunkDispatch, TokenDispatcher, chunk_and_group
from ..common.rows import Level, RowPermutation, sort_segments

Sizes = list[tuple[list[int], list[int]]]  # of a chunk, by level: rows to every member, rows from every member


@dataclass(frozen=True)
class _RowCounts:
    """Numbers of rows of every chunk, int64.

    packed: (chunks, inner, outer, local experts), by destination. halfway: (inner source, chunks, outer, local), on two
    levels: the rows after the first level. arrived: (source ranks, chunks, local).
    """

    packed: Tensor
    halfway: Tensor | None
    arrived: Tensor


class DroplessTokenDispatcher(TokenDispatcher):
    """Rows are sorted by expert, as many as there are."""

    def chunks(self, routing: Routing) -> list[ChunkDispatch]:
        """Wait for the device once: the sizes of the messages must be known on the host."""
        chunks, num_experts = self.settings.chunks, routing.num_experts
        expert = self.groups.send_order(routing.tokens.device)[routing.experts]
        key = chunk_and_group(routing, chunks)[0] * num_experts + expert
        ordered, order = torch.sort(torch.where(routing.kept, key, chunks * num_experts), stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(chunks * num_experts + 1, device=key.device))
        counts = self._exchange(bounds.diff().view(chunks, *self.groups.shape, self.groups.num_local))
        sizes = self._sizes(counts)
        sent = [sum(of_chunk[0][0]) for of_chunk in sizes]
        by_chunk = order[: sum(sent)].split(sent)
        return [self._chunk(chunk, routing, by_chunk[chunk], counts, sizes[chunk]) for chunk in range(chunks)]

    def _exchange(self, packed: Tensor) -> _RowCounts:
        inner, *outer = self.groups.groups
        first = exchange_counts(packed.transpose(0, 1), inner, self.counter)  # (inner source, chunks, outer, local)
        if not outer:
            return _RowCounts(packed, None, first.squeeze(2))
        second = exchange_counts(first.permute(2, 0, 1, 3), outer[0], self.counter)  # (outer, inner, chunks, local)
        return _RowCounts(packed, first, second.flatten(0, 1))

    def _sizes(self, counts: _RowCounts) -> list[Sizes]:
        """Return the sizes of every chunk, read from the device at once."""
        inner, outer = self.groups.shape
        by_chunk = counts.arrived.sum(-1).t()  # (chunks, source ranks)
        parts = [counts.packed.sum((2, 3)), by_chunk]
        if counts.halfway is not None:
            halfway = counts.halfway.sum(3)  # (inner source, chunks, outer)
            parts = [parts[0], halfway.sum(2).t(), halfway.sum(0), by_chunk.unflatten(1, (outer, inner)).sum(2)]
        widths = [part.size(1) for part in parts]
        table = [[part.tolist() for part in row.split(widths)] for row in torch.cat(parts, dim=1).cpu()]
        return [list(zip(row[::2], row[1::2])) for row in table]

    def _chunk(self, chunk: int, routing: Routing, sent: Tensor, counts: _RowCounts, sizes: Sizes) -> ChunkDispatch:
        """Return how a chunk is sent. sent: the assignments that are sent, in send order."""
        num_tokens = routing.num_tokens // self.settings.chunks
        tokens = routing.tokens[sent].remainder(num_tokens)
        order = rows.order_rows(sent, tokens, counts.packed[chunk].flatten(), num_tokens)
        arrived = counts.arrived[:, chunk]
        local = torch.arange(arrived.size(1), device=arrived.device).repeat(arrived.size(0))
        by_expert = sort_segments(arrived.flatten(), local, sum(sizes[-1][1]))
        combine = partial(rows.combine, weights=routing.weights, order=order)
        levels = self._levels(chunk, counts, sizes, by_expert)
        return ChunkDispatch(partial(rows.spread, order=order), combine, levels, arrived.sum(0))

    def _levels(self, chunk: int, counts: _RowCounts, sizes: Sizes, by_expert: RowPermutation) -> tuple[Level, ...]:
        first, *second = [
            self.all_to_all(group, sends, receives) for group, (sends, receives) in zip(self.groups.groups, sizes)
        ]
        if counts.halfway is None:
            return (Level(first, after=by_expert),)
        lengths = counts.halfway[:, chunk]  # (inner source, outer, local)
        outer = torch.arange(lengths.size(1), device=lengths.device).view(1, -1, 1).expand_as(lengths)
        halfway = sort_segments(lengths.flatten(), outer.flatten(), sum(sizes[0][1]))
        return Level(first), Level(second[0], halfway, by_expert)


parallelize = partial(dispatcher.parallelize, dispatcher=DroplessTokenDispatcher)
