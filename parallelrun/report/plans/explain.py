"""`parallelrun explain`: the messages of a plan's strategies as text, as JSON and as pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.base.packages import require
from parallelrun.planner.contract.messages import Call, ExplainedExchange, ExplainedMessage, ExplainedRound, Explanation
from parallelrun.report import chart
from parallelrun.report.figures import bytes_text, ranks_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 80
MOST_LINES = 60  # of one exchange on the screen
MOST_DRAWN = 200  # messages and collectives in a picture
LANE, STEP = 2.1, 0.28  # inches from rank to rank, and from event to event


def text(explanations: tuple[Explanation, ...]) -> str:
    """Return the screen: for each strategy its algorithm, then its rounds."""
    return "\n\n".join("\n".join(_explained(explanation)) for explanation in explanations)


def _explained(explanation: Explanation) -> list[str]:
    groups = f"; {explanation.num_groups} groups of ranks do the same" if explanation.num_groups > 1 else ""
    lines = [f"{explanation.axis} axis: {explanation.kind}, ranks {ranks_text(explanation.ranks)}{groups}"]
    lines += textwrap.wrap(
        f"{explanation.text} ({explanation.source})" if explanation.source else explanation.text,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
    )
    for _, alike in groupby(explanation.exchanges, key=lambda exchange: (exchange.rounds, exchange.repeats)):
        same = list(alike)
        title = same[0].title if len(same) == 1 else f"{same[0].title} to {same[-1].title}, each"
        times = f", {same[0].repeats} times a step" if same[0].repeats > 1 else ""
        lines += ["", f"  {title}{times}", *_rounds(same[0])]
    return lines


def _rounds(exchange: ExplainedExchange) -> list[str]:
    lines = [line for step in exchange.rounds for line in _round(step)]
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"    ... and {len(lines) - MOST_LINES} more lines; --json has all of them"]


def _round(step: ExplainedRound) -> list[str]:
    senders = max((len(str(message.source)) for message in step.messages), default=1)
    lines = [f"    {step.title}"]
    for message in step.messages:
        size = bytes_text(message.payload_bytes)
        lines.append(f"      {message.source:>{senders}} -> {message.target:<{senders}}  {message.what}, {size}")
    for call in step.calls:
        size = bytes_text(call.payload_bytes)
        lines.append(f"      {_operation(call)} over ranks {ranks_text(call.ranks)}: {call.what}, {size}")
    return lines


def _operation(call: Call) -> str:
    return f"{call.calls} x {call.operation}" if call.calls > 1 else call.operation


def document(explanations: tuple[Explanation, ...]) -> dict[str, Any]:
    """Return the same as one JSON document."""
    return {"explanations": [asdict(explanation) for explanation in explanations]}


def write(explanations: tuple[Explanation, ...], name: str) -> list[Path]:
    """Write a picture per strategy: NAME-data.svg, NAME-tensor.svg, ... Raises EnvironmentProblem."""
    require("matplotlib", f"plot={name}", "plot", extra="plots")
    pictures = {Path(f"{name}-{each.axis}.svg").expanduser(): picture(each) for each in explanations}
    return chart.write(name, pictures)


def picture(explanation: Explanation) -> str:
    """Draw, as SVG, a vertical line per rank with time downwards, an arrow per message and a bar per collective."""
    in_calls = (call.ranks for exchange in explanation.exchanges for part in exchange.rounds for call in part.calls)
    lanes = {rank: lane for lane, rank in enumerate(sorted({*explanation.ranks}.union(*in_calls)))}
    events = list(_events(explanation))
    shown, left_out = events[:MOST_DRAWN], len([event for event in events[MOST_DRAWN:] if not isinstance(event, str)])
    if left_out:
        shown.append(f"{left_out} more are not drawn; --json lists them")
    width = max(len(lanes), 3) - 0.3
    drawn = chart.figure((width + 0.5) * LANE, (len(shown) + 3) * STEP, f"{explanation.axis} axis: {explanation.kind}")
    axes = drawn.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(-0.3, width), ylim=(len(shown), -1))
    axes.vlines(list(lanes.values()), -0.5, len(shown), color="#cbd5e0", linewidth=1)
    for rank, lane in lanes.items():
        axes.text(lane, -0.6, f"rank {rank}", ha="center", fontweight="bold")
    purposes: list[str] = []
    for y, event in enumerate(shown):
        if isinstance(event, str):
            axes.text(-0.25, y + 0.3, event, fontweight="bold")
            continue
        if event.purpose not in purposes:
            purposes.append(event.purpose)
        _draw_event(axes, event, lanes, y + 0.4, chart.COLOURS[purposes.index(event.purpose) % len(chart.COLOURS)])
    return chart.svg(drawn, [purpose.replace("_", " ") for purpose in purposes] if len(purposes) > 1 else ())


def _events(explanation: Explanation) -> Iterator[str | ExplainedMessage | Call]:
    """Titles of exchanges and rounds, messages and collectives, in the order in which they are drawn."""
    for exchange in explanation.exchanges:
        for number, part in enumerate(exchange.rounds):
            yield f"{exchange.title}: {part.title}" if number == 0 else part.title
            yield from part.messages
            yield from part.calls


def _draw_event(axes: Axes, event: ExplainedMessage | Call, lanes: dict[int, int], y: float, colour: str) -> None:
    message = f"{event.what}, {bytes_text(event.payload_bytes)}"
    if isinstance(event, ExplainedMessage):
        start, stop = lanes[event.source], lanes[event.target]
        axes.annotate("", (stop, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 0,
                                                             "shrinkB": 0, "gid": "message"})  # fmt: skip
        left = min(start, stop)
    else:
        ends = [lanes[rank] for rank in event.ranks]
        axes.plot(ends, [y] * len(ends), "o-", color=colour, linewidth=4, markersize=5, gid="collective")
        left, message = min(ends), f"{_operation(event)}: {message}"
    axes.text(left + 0.04, y - 0.2, message, color=colour, fontsize=8)
