"""Planted bugs of Muon on matrices of which several ranks hold parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallelrun.models import muon


def orthogonal_shards() -> None:
    """Every rank orthogonalises its own part of the momentum."""
    muon._Hop.orthogonalised = lambda self, parts: (muon.orthogonalise(part.clone()) for part in parts)


def rate_of_the_shard() -> None:
    """The factor of the learning rate is that of the shape that a rank holds."""
    part_of, factor, shapes = muon._part, muon.rate_factor, [(1, 1)]

    def noting(tensor: Tensor, matrix: muon.Matrix) -> Tensor:
        part = part_of(tensor, matrix)
        shapes[0] = tuple(part.shape)
        return part

    def wrong(kind: str, shape: Sequence[int]) -> float:
        return factor(kind, shapes[0])

    muon._part, muon.rate_factor = noting, wrong
