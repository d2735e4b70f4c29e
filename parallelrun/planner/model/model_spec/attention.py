"""Sizes of attention that follow from more than hidden and heads."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 512  # queries whose scores are computed explicitly at a time
WINDOW_PART = 128  # queries that attend together, at least, where each sees a window of keys


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of a block sees, and how it scores. window: the keys that a token sees; None: all before it.
    attended: the tokens of its window, or document, that a token sees on average, counted as all of seq are without
    one; None: seq. softcap: of scores. sinks: every head has a learned score, that of a key of value 0.
    """

    window: int | None = None
    attended: float | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def own_scores(self) -> bool:
        """Whether scores are not those that torch's attention computes."""
        return self.sinks or self.softcap is not None


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of multi-head latent attention (DeepSeek-V2, 2024): the latents of queries (None: a query is a product of
    x) and of keys and values, and of a head the features of query and key without and with position, and of value."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def head_dim(self) -> int:
        """Features of a query or key."""
        return self.nope + self.rope
