"""Planted bugs of context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_sum_exp_of_the_last_block() -> None:
    """Merged outputs keep the first block's log-sum-exp: right for two blocks in forward, wrong in backward."""
    from parallelrun.models.blockwise.blocks import Merged

    right = Merged.add

    def wrong(self: Merged, out: Tensor, lse: Tensor, rows: slice, samples: slice) -> None:
        before = self.lse.clone()
        right(self, out, lse, rows, samples)
        self.lse.copy_(torch.where(before.isinf(), self.lse, before))

    Merged.add = wrong


def positions_begin_at_zero() -> None:
    """Rotary positions are those of the tokens held here, counted from 0."""
    from parallelrun.models.local_tokens import ALL
    from parallelrun.models.transformer.modules import Attention

    Attention.positions = lambda self, heads: ALL.indices(heads.size(2), heads.device)


def tokens_in_another_order() -> None:
    """Batches are cut into contiguous pieces, attention and positions follow the plan's order."""
    from parallelrun.training.loop import reader

    def wrong(plan: Any, mesh: Any) -> Tensor:
        return torch.arange(plan.seq) + mesh.coordinate["cp"] * plan.seq

    reader._positions = wrong


def gradients_of_keys_stay() -> None:
    """The gradients of keys and values do not travel with them."""
    from parallelrun.models.blockwise.transports import TravellingSum

    right = TravellingSum.add

    def wrong(self: Any, source: int, parts: Any) -> None:
        arrived = self._arriving()
        self._arriving = lambda: torch.zeros_like(arrived)
        right(self, source, parts)

    TravellingSum.add = wrong


def dropout_of_local_positions() -> None:
    """Every rank of a sequence draws the same masks."""
    from parallelrun.models.local_tokens import ALL
    from parallelrun.models.masked_layers import HashDropout

    right = HashDropout.forward

    def wrong(self: HashDropout, x: Tensor) -> Tensor:
        self.local_tokens = ALL
        return right(self, x)

    HashDropout.forward = wrong


def stripes_see_their_own_index() -> None:
    """The diagonal of two stripes is taken as if both began at the same position."""
    from parallelrun.models.blockwise import tiles

    tiles._striped = lambda query, key: (tiles.Tile(slice(0, query.length), slice(0, key.length), True),)


def window_of_one_key_more() -> None:
    """Queries see a key behind their window, as `distance <= window` would say."""
    from parallelrun.models.blockwise import tiles

    right = tiles._cut_behind
    tiles._cut_behind = lambda tile, query, key, window: right(tile, query, key, window + 1)


def routing_groups_of_own_tokens() -> None:
    """Capacity and losses of balance count the tokens of one rank."""
    from parallelrun.models.moe.shared_groups import SharedGroups

    SharedGroups.gathered = lambda self, logits: logits
    SharedGroups.own = lambda self, routing: routing


def sinks_of_every_block() -> None:
    """Each block of keys has the sinks in its softmax, and not the whole of them once."""
    from parallelrun.models.blockwise.blocks import Merged
    from parallelrun.models.blockwise.product import BlockwiseAttention

    right_add, right_forward = Merged.add, BlockwiseAttention.forward
    sinks: list[Tensor] = []

    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Any) -> Any:
        sinks[:] = [call.sinks]
        return right_forward(ctx, query, key, value, call)

    def add(self: Merged, out: Tensor, lse: Tensor, rows: slice, samples: slice) -> None:
        block = Merged(out.clone(), lse)
        if sinks[0] is not None:
            block.add_sinks(sinks[0])
        right_add(self, block.out.to(out.dtype), block.lse, rows, samples)

    Merged.add, BlockwiseAttention.forward = add, staticmethod(forward)


def sinks_of_the_first_heads() -> None:
    """After the exchange of tokens for heads every rank has the sinks of the first heads."""
    from parallelrun.models.blockwise.attention import ContextAttention

    ContextAttention._own_heads = lambda self, sinks: sinks.chunk(self.heads.size)[0]


def cap_behind_the_mask() -> None:
    """Soft caps of scores make finite what a query does not see."""
    from parallelrun.models.blockwise import blocks

    right = blocks._scores

    def wrong(query: Tensor, key: Tensor, part: Any, tile: Any) -> Tensor:
        scores, cap = right(query, key, part, tile._replace(softcap=None)), tile.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    blocks._scores = wrong


def tokens_ahead_of_the_own_part() -> None:
    """Tokens further ahead are looked for among those held here."""
    from dataclasses import replace

    from parallelrun.models.documents import tokens_ahead
    from parallelrun.training.loop import reader

    right = reader.HostSamples.__getitem__

    def wrong(self: reader.HostSamples, step: int) -> reader.Batch:
        batch = right(self, step)
        return replace(batch, ahead=tokens_ahead(torch.stack((batch.inputs, batch.targets), 1), None, self.depth))

    reader.HostSamples.__getitem__ = wrong
