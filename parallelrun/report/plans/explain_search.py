"""`plan explain=true`: the waterfall of a step, what limits it, and where another plan would win."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from parallelrun.base.wording import gib
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.predict.limits import Limit
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.search.crossovers import Flip
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
TRIED = "with 8 times slower or faster links, or a quarter to 4 times the tokens per microbatch"


def show(
    time: StepTime,
    limits: Sequence[Limit],
    flips: tuple[Sequence[Flip], bool] | None,
    memory: tuple[int, ClusterConfig],
    best: Found | None,
    console: Console,
) -> None:
    """Print the section. memory: bytes of the rank that holds most, and the cluster. best: the fastest plan of a
    search, which `flips` are about, None for a plan that is named; their second value: whether all were looked for.

    M/h is the tokens of a microbatch by the model's width: the rows of a product by its columns.
    """
    width = max(20, min(console.width, WIDEST) - FRAME - BESIDE_BARS)
    crossovers = under_one_label("crossovers", flip_texts(*flips, best) if flips else [])
    rows = [*limit_rows(time, limits), ("memory", Text(_memory(*memory))), *crossovers]
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


def flip_texts(flips: Sequence[Flip], all_done: bool, best: Found | None) -> list[str]:
    """A sentence for each flip. best: of a search; None: they are about a plan that is named."""
    if best is None:
        rows = [f"this plan is faster than the fastest {_where(flip)}" for flip in flips]
        rows = rows or [f"this plan is not faster than the fastest {TRIED}"]
    else:
        rows = [f"another plan wins {_where(flip)}: {_difference(flip, best)}" for flip in flips]
        if not flips and all_done:
            rows = ["the same plan is fastest at any link rate, batch and tokens per microbatch that was tried"]
    if not all_done:
        rows.append("the list may be incomplete: this space takes too long to search many times")
    return rows


def _difference(flip: Flip, best: Found) -> str:
    """Return the winner's overrides that differ from the best plan's."""
    assert flip.winner is not None
    return " ".join(text for text in flip.winner.overrides if text not in best.overrides)


def _where(flip: Flip) -> str:
    """The condition under which the winner wins: `below 1,900 tokens per microbatch (now 8,192)`."""
    side = "below" if flip.value < flip.now else "above"
    if flip.key not in LINKS:
        if not flip.key.endswith("seq"):
            return f"{side} {flip.value:,.0f} samples a step (now {flip.now:,.0f})"
        ratio = f"M/h {side} {digits(flip.value / flip.hidden)}"
        return f"{side} {flip.value:,.0f} tokens per microbatch (now {flip.now:,.0f}), {ratio}"
    speed = "slower" if flip.value < flip.now else "faster"
    link = f"{LINKS[flip.key]} are {speed} than {digits(flip.value)} GB/s"
    tokens = flip.least if flip.most is None else flip.most
    if tokens is None:
        return f"where {link} (now {digits(flip.now)})"
    bound = "is below" if flip.least is None else "exceeds"
    now = f"now {digits(flip.tokens / flip.hidden)} and {digits(flip.now)}"
    return f"where M/h {bound} {digits(tokens / flip.hidden)} and {link} ({now})"
