"""Sizes of attention that follow from more than hidden and heads."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_PART = 128  # queries that attend together, at least, where each sees a window of keys


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
