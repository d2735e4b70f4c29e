"""`plan explain=true`: the waterfall of a step, what limits it, and where another plan would win."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from parallelrun.base.wording import gib
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.predict.limits import Limit
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.search.crossovers import BATCH, Crossover
from parallelrun.planner.search.result import Found
from parallelrun.report.figures import digits, seconds_text
from parallelrun.report.plans import waterfall
from parallelrun.report.screen import FRAME, WIDEST, labelled, show_section, under_one_label

BESIDE_BARS = 46  # columns of the figures beside the bars
LINKS = {"cluster.inter_gb_s": "links between hosts", "cluster.intra_gb_s": "links inside a host"}
FREE = {  # the condition under which a limit costs nothing, where it is not `without NAME`
    "links between hosts": "with unlimited bandwidth between hosts",
    "links inside a host": "with unlimited bandwidth inside a host",
    "memory bandwidth": "with unlimited memory bandwidth",
    "products cut into tiles": "if products were not cut into tiles,",
    "issuing operations": "if operations were issued in no time,",
}


def show(
    time: StepTime,
    limits: Sequence[Limit],
    crossovers: tuple[Sequence[Crossover], bool] | None,
    memory: tuple[int, ClusterConfig],
    best: Found | None,
    console: Console,
) -> None:
    """Print the section. crossovers: of `best`, the fastest plan of a search, and whether all were looked for. memory:
    bytes of the rank that holds most, and the cluster.

    M/h is the tokens of a microbatch by the model's width: the rows of a product by its columns.
    """
    width = max(20, min(console.width, WIDEST) - FRAME - BESIDE_BARS)
    texts = crossover_texts(*crossovers, best) if crossovers and best else []
    rows = [*limit_rows(time, limits), ("memory", Text(_memory(*memory))), *under_one_label("crossovers", texts)]
    show_section("why: the parts of a step", Group(waterfall.bars(time, width), Text(), labelled(rows)), console)


def limit_rows(time: StepTime, limits: Sequence[Limit]) -> list[tuple[str, RenderableType]]:
    """The first of them binds."""
    if not limits:
        text = "computation at the device's own rate; everything else costs less than 0.5 % of a step"
        return [("limit", Text(text))]
    texts = []
    for limit in limits:
        condition = FREE.get(limit.name, f"without {limit.name}")
        saved = f"{seconds_text(limit.saved_s)} ({limit.saved_s / time.step_s:.0%})"
        texts.append(f"{condition} a step would be {saved} shorter")
    return [("limits", Text(texts[0], "bold")), *under_one_label("", texts[1:])]


def _memory(heaviest: int, cluster: ClusterConfig) -> str:
    if not cluster.memory_gb:
        return f"{gib(heaviest)} on the heaviest rank; the cluster gives no memory size"
    available = cluster.memory_gb * 1e9
    return f"{gib(heaviest)} on the heaviest rank, {heaviest / available:.0%} of a device's {gib(available)}"


def crossover_texts(crossovers: Sequence[Crossover], all_done: bool, best: Found) -> list[str]:
    """A sentence for each crossover: where another plan wins, and its overrides that differ from the best plan's."""
    rows = []
    for crossover in crossovers:
        overrides = " ".join(text for text in crossover.winner.overrides if text not in best.overrides)
        rows.append(f"another plan wins {_condition(crossover)}: {overrides}")
    if not all_done:
        rows.append("the list may be incomplete: this space takes too long to search many times")
    return rows or ["the same plan is fastest at any link rate, batch and tokens per microbatch that was tried"]


def _condition(crossover: Crossover) -> str:
    """The condition under which the winner wins: `below 1,900 tokens per microbatch (now 8,192)`."""
    is_below = crossover.value < crossover.now
    side = "below" if is_below else "above"
    if crossover.key in LINKS:
        link = f"{LINKS[crossover.key]} are {'slower' if is_below else 'faster'} than {digits(crossover.value)} GB/s"
        return f"where {link} (now {digits(crossover.now)})"
    if crossover.key == BATCH:
        return f"{side} {crossover.value:,.0f} samples a step (now {crossover.now:,.0f})"
    ratio = f"M/h {side} {digits(crossover.value / crossover.hidden)}"
    return f"{side} {crossover.value:,.0f} tokens per microbatch (now {crossover.now:,.0f}), {ratio}"
