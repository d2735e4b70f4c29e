"""Planted bugs of Muon on matrices of which several ranks hold parts."""

from __future__ import annotations

from parallelrun.models.optimizers import muon


def orthogonal_shards() -> None:
    """Every rank orthogonalises its own part of the momentum."""
    muon._Hop.orthogonalised = lambda self, parts: (muon.orthogonalise(part.clone()) for part in parts)


def rate_of_the_shard() -> None:
    """The factor of the learning rate is that of a row-parallel layer's shape on one of two ranks."""
    right = muon.rate_factor
    muon.rate_factor = lambda kind, shape: right(kind, (*shape[:-1], shape[-1] // 2))
