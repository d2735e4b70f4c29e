"""The comparison of tensor layouts for one plan: plain data. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """Of one layer and one microbatch on the rank that holds most. moved_weight_bytes: the part of received_bytes that
    weights and their gradients make. once_bytes: received once a step besides (2.5D sums gradients over depth).
    steps: messages one after the other. weight_bytes, saved_bytes: held, the latter for backward (attention too)."""

    received_elements: int
    received_bytes: int
    moved_weight_bytes: int
    once_bytes: int
    steps: int
    weight_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Row:
    """One layout. reason: why it is not legal here (then without figures). chosen: the plan's own. break_even: rows of
    a microbatch per hidden feature (M/h) above which it receives fewer bytes than 1D; None: never, or 1D itself."""

    layout: str
    kind: str
    chosen: bool
    figures: Figures | None = None
    break_even: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class InsideNode:
    """The same ranks and samples with 1D inside a node and data parallelism outside: bytes that a rank receives per
    layer and step, sums of gradients included, against the plan's own; and weights a rank holds of the layer."""

    tp: int
    dp: int
    node: int
    received_bytes: int
    plan_received_bytes: int
    weight_bytes: int
    plan_weight_bytes: int
    divides: bool  # the batch of a data replica divides by dp

    @property
    def wins(self) -> bool:
        return self.received_bytes < self.plan_received_bytes


@dataclass(frozen=True)
class Comparison:
    """layer: the block that is compared, one of many alike. rows: M, positions of a microbatch."""

    layer: str
    rows: int
    hidden: int
    tp: int
    layouts: tuple[Row, ...]
    inside_node: InsideNode | None

    @property
    def chosen(self) -> Row:
        return next(row for row in self.layouts if row.chosen)
