"""Role layers that drop by hash: dropout itself, and attention, which drops probabilities. In their one-device form.

The mask is a function of sample, site and global index (`models.dropout`), so a rank that holds a part drops the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.models import documents as packed
from parallelrun.models import dropout as masks
from parallelrun.models.blockwise.attention import on_one_rank
from parallelrun.models.blockwise.blocks import Merged, attend_to_block
from parallelrun.models.blockwise.tiles import Tile
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.functions import attend, attend_with_dropout, drop
from parallelrun.models.layers import RoleLayer
from parallelrun.models.local_tokens import ALL


class _HashMasked(RoleLayer):
    """Base of the layers that drop by hash. In training at a rate above 0 they need the sample ids of `dropout.scope`.

    sample_part: (index, count) of the equal part of the microbatch's samples held here; set by the tensor strategy.
    """

    def __init__(self, rate: float, seed: int, site: str, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"dropout rate {rate} of {site} is outside [0, 1); give a rate below 1")
        self.rate, self.seed, self.site = rate, seed, site
        self.key = masks.site_key(seed, site)
        self.sample_part = (0, 1)

    @property
    def active(self) -> bool:
        return self.rate > 0.0 and self.training

    def sample_ids(self, num_samples: int) -> Tensor:
        return masks.sample_ids_at(f"dropout at {self.site}", num_samples, self.sample_part)


class HashDropout(_HashMasked):
    """Drops elements of x (batch, [seq,] hidden) by hash(seed, sample id, site, global element index).

    hidden: the *global* size of the last dim (0: that of x). When x is a slice, the context strategy sets the tokens
    `local_tokens`, and the tensor strategy the slice's start among them, `sequence_offset`, and among the columns,
    `hidden_offset`; the mask is then the same slice of the global mask.
    """

    layer_role = "dropout"

    def __init__(self, rate: float, seed: int, site: str, hidden: int, compute_dtype: torch.dtype):
        super().__init__(rate, seed, site, compute_dtype)
        self.hidden = hidden
        self.local_tokens = ALL
        self.sequence_offset = 0
        self.hidden_offset = 0

    @property
    def p(self) -> float:
        """The rate, by the name that nn.Dropout gives it: modules read it."""
        return self.rate

    def forward(self, x: Tensor) -> Tensor:
        if not (self.rate and self.active):  # without a rate no call: a step asks in every layer
            return x
        by_token = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
        rows = self.local_tokens.indices(by_token.size(1), x.device, self.sequence_offset)
        columns = torch.arange(by_token.size(2), device=x.device) + self.hidden_offset
        keep = masks.keep_mask(self.key, self.sample_ids(x.size(0)), rows, columns, self.rate)
        return drop(x, keep.view(x.shape), self.rate)


# Computes the attention of a layer (an `AttentionProduct`) whose tokens several ranks hold, of query (batch, heads, own
# tokens, head_dim), and key and value with maybe fewer heads: as query.
AttentionOverRanks = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class AttentionProduct(_HashMasked):
    """Attention on (batch, heads, seq, head_dim), causal or bidirectional. With a rate above 0, probabilities are
    dropped by hash over (head, query, key) and attention is computed explicitly, in memory of seq x seq per head. Of
    packed documents, each attends to itself alone. window: see `functions.attend`. softcap, sinks: see
    `blockwise.product.AttentionCall`; sinks are parameters, of the query heads held here.

    head_offset: the global index of the first query head held here; set by the tensor strategy. over_ranks: computes it
    where other ranks hold tokens too; set by the context strategy.
    """

    layer_role = "attention"
    uncompiled = ("_of_documents",)  # they differ from batch to batch

    def __init__(
        self,
        rate: float,
        seed: int,
        site: str,
        compute_dtype: torch.dtype,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        num_sinks: int = 0,
    ):
        super().__init__(rate, seed, site, compute_dtype)
        self.causal, self.window, self.softcap = causal, window, softcap
        self.sinks = nn.Parameter(torch.empty(num_sinks)) if num_sinks else None
        if self.own_scores:
            self.__dict__["uncompiled"] = ("forward",)
        self.head_offset = 0
        self.over_ranks: AttentionOverRanks | None = None

    @property
    def own_scores(self) -> bool:
        """Whether scores are not those that torch's attention computes."""
        return self.softcap is not None or self.sinks is not None

    def documents(self) -> DocumentBounds | None:
        """The packed documents of the samples held here; None if samples are no packs."""
        documents = packed.SCOPE.documents
        return documents if documents is None else documents.part(*self.sample_part)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.over_ranks is not None:
            return self.over_ranks(self, query, key, value)
        if self.own_scores:
            return on_one_rank(self, query, key, value)
        if packed.SCOPE.documents is not None:
            return self._of_documents(query, key, value)
        if not (self.rate and self.active):
            return attend(query, key, value, self.causal, self.window)
        return self._dropped(query, key, value, self.sample_ids(query.size(0)), 0, query.size(2))

    def of_last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the last of all tokens, in evaluation. query: of one token."""
        if not self.own_scores:
            return attend(query, key, value, False, self.window)
        seen = slice(max(0, key.size(2) - (self.window or key.size(2))), key.size(2))
        tile = Tile(slice(0, 1), seen, causal=False, softcap=self.softcap)
        merged = Merged(*attend_to_block(query, key, value, tile))
        if self.sinks is not None:
            merged.add_sinks(self.sinks)
        return merged.out.to(query.dtype)

    def _of_documents(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        documents = self.documents()
        assert documents is not None
        if not self.active:
            return packed.attend(query, key, value, documents, self.causal, self.window)
        ids, seq = self.sample_ids(query.size(0)), query.size(2)

        def attend_one(q: Tensor, k: Tensor, v: Tensor, sample: int, start: int) -> Tensor:
            return self._dropped(q, k, v, ids[sample : sample + 1], start, seq)

        return packed.attend_each(query, key, value, documents, attend_one)

    def _dropped(self, query: Tensor, key: Tensor, value: Tensor, ids: Tensor, start: int, seq: int) -> Tensor:
        """Attention with dropped probabilities among the tokens from `start` on of samples of `seq` tokens."""
        batch, heads, size = query.shape[:3]
        columns = torch.arange(start, start + size, device=query.device)
        each_head = torch.arange(self.head_offset, self.head_offset + heads, device=query.device) * seq
        rows = (each_head.unsqueeze(1) + columns).flatten()
        keep = masks.keep_mask(self.key, ids, rows, columns, self.rate)
        kept = keep.view(batch, heads, size, size)
        return attend_with_dropout(query, key, value, kept, self.rate, self.causal, self.window)
