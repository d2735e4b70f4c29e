"""The backward pass of a block that describes it operation by operation."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BackwardStep:
    """One operation in the backward pass of its block: numbers of elements, of one sample.

    layer: the name of the layer whose weights get gradients; empty without one. kept: what forward saves for it, each
    tensor with the first operation that needs it. indices: int64 numbers that it saves besides. arriving, giving:
    gradients that it reads and gives. waiting: those for an earlier operation, meanwhile. waits_itself: what waits is
    the arriving gradient, unless the operation reads that in another dtype. normalises: over a set of samples, in the
    accurate dtype. sums: what it gives is added to what waits, in a third tensor. reads_split, gives_split: tensor
    parallelism splits the channels of what forward reads and gives.
    """

    layer: str
    kept: int
    arriving: int
    giving: int
    indices: int = 0
    waiting: int = 0
    waits_itself: bool = False
    normalises: bool = False
    sums: bool = False
    reads_split: bool = False
    gives_split: bool = False

    def on_rank(self, tp: int) -> BackwardStep:
        """The numbers of one of `tp` ranks."""
        reads, gives = tp if self.reads_split else 1, tp if self.gives_split else 1
        return replace(
            self,
            kept=self.kept // reads,
            giving=self.giving // reads,
            arriving=self.arriving // gives,
            indices=self.indices // gives,
        )


@dataclass(frozen=True)
class BlockBackward:
    """The backward pass of a block. saves_input: its input is among what the steps save; else the block before saves
    it, or none needs it. steps: in forward order. shortcut: the number of the first step of a second branch, whose
    result the last step adds to that of the first one in place."""

    saves_input: bool
    steps: tuple[BackwardStep, ...]
    shortcut: int | None = None
