"""`plan explain=true`: the waterfall of a step, what limits it, and where another plan would win. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from parallelrun.config.schema import ClusterConfig
from parallelrun.plan.flips import Flip
from parallelrun.plan.limits import Limit
from parallelrun.plan.search.result import Found
from parallelrun.plan.step_time.step import StepTime
from parallelrun.report import waterfall
from parallelrun.report.figures import digits, seconds_text
from parallelrun.report.screen import FRAME, WIDEST, labelled, show_section
from parallelrun.wording import gib

BESIDE_BARS = 46  # columns of the figures beside the bars
NAMES = {
    "cluster.inter_gb_s": "{} GB/s between hosts",
    "cluster.intra_gb_s": "{} GB/s inside a host",
    "global_batch": "{} samples a step",
    "model.seq": "{} tokens a sample",
}


def show(
    time: StepTime,
    found: Sequence[Limit],
    flips: tuple[Sequence[Flip], bool],
    memory: tuple[int, ClusterConfig],
    best: Found | None,
    console: Console,
) -> None:
    """Print the section. memory: bytes of the rank that holds most, and the cluster. best: the fastest plan of a
    search, which `flips` are about; their second value: whether all were looked for."""
    width = max(20, min(console.width, WIDEST) - FRAME - BESIDE_BARS)
    rows = [*_limits(time, found), ("memory", Text(_memory(*memory))), *_flips(*flips, best)]
    show_section("why: the parts of a step", Group(waterfall.bars(time, width), Text(), labelled(rows)), console)


def _limits(time: StepTime, found: Sequence[Limit]) -> list[tuple[str, RenderableType]]:
    """The first of them binds."""
    if not found:
        return [("limit", Text("computation at the device's own rate: nothing else costs half a percent of a step"))]
    texts = [
        f"{one.name}: a step would be {seconds_text(one.saved_s)} ({one.saved_s / time.step_s:.0%}) shorter without"
        for one in found
    ]
    return [
        ("limits" if not index else "", Text(text, "bold" if not index else "")) for index, text in enumerate(texts)
    ]


def _memory(heaviest: int, cluster: ClusterConfig) -> str:
    if not cluster.memory_gb:
        return f"{gib(heaviest)} on the heaviest rank; the cluster gives no memory size"
    available = cluster.memory_gb * 1e9
    return f"{gib(heaviest)} on the heaviest rank, {heaviest / available:.0%} of a device's {gib(available)}"


def _flips(flips: Sequence[Flip], all_done: bool, best: Found | None) -> list[tuple[str, RenderableType]]:
    if best is None:
        return []
    if not flips and all_done:
        return [("flips", Text("the same plan is fastest at any link rate, batch and sequence that was tried"))]
    own = set(best.overrides)
    rows = []
    for one in flips:
        where = "below" if one.value < one.now else "above"
        value, now = (NAMES[one.key].format(digits(number)) for number in (one.value, one.now))
        plan = " ".join(text for text in one.winner.overrides if text not in own)
        rows.append(f"{where} {value} (now {now.split()[0]}): {plan} wins")
    if not all_done:
        rows.append("not all was looked for: this space takes too long to search many times")
    return [("flips" if not index else "", Text(row)) for index, row in enumerate(rows)]
