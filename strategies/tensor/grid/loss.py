"""The loss of the samples whose logits a rank has: their targets cut out, the vocabulary summed over its axis."""

from __future__ import annotations

from torch import Tensor

from parallelrun.mesh import Group

from ..common.cross_entropy import VocabParallelLoss
from .parts import EvenSlice


class GridLoss(VocabParallelLoss):
    """`TokenLoss` on this rank's rows and columns of the logits: the sum over its own samples, at least fp32.

    rows: which samples those are. group: of the axis that splits the vocabulary; start: the first token id here.
    """

    def __init__(self, label_smoothing: float, group: Group, start: int, vocab: int, rows: EvenSlice):
        super().__init__(label_smoothing, group, start, vocab)
        self.rows = rows

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (own samples, ..., own vocabulary); targets (samples of the microbatch, ...), global ids."""
        return super().forward(logits, self.rows.of(targets))
