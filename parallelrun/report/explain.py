"""`parallelrun explain`: the messages of a plan's strategies as text, as JSON and as a picture."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.plan.messages import Call, Exchange, Explanation, Message, Round
from parallelrun.report.figures import bytes_text

WIDTH = 80
MOST_LINES = 60  # of one exchange on the screen; JSON has them all
MOST_DRAWN = 200  # messages and collectives in a picture
LANE, STEP, LEFT, TOP = 190, 26, 60, 90
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#718096")


def text(explanations: tuple[Explanation, ...]) -> str:
    """What the screen shows: per strategy what it does, then its rounds."""
    return "\n\n".join("\n".join(_explained(one)) for one in explanations)


def _explained(one: Explanation) -> list[str]:
    groups = f"; {one.num_groups} groups of ranks do this" if one.num_groups > 1 else ""
    lines = [f"{one.axis} axis: {one.kind}, ranks {_ranks(one.ranks)}{groups}"]
    lines += textwrap.wrap(
        f"{one.text} ({one.source})" if one.source else one.text, WIDTH, initial_indent="  ", subsequent_indent="  "
    )
    for _, alike in groupby(one.exchanges, key=lambda exchange: (exchange.rounds, exchange.repeats)):
        same = list(alike)
        title = same[0].title if len(same) == 1 else f"{same[0].title} to {same[-1].title}, each"
        times = f", {same[0].repeats} times a step" if same[0].repeats > 1 else ""
        lines += ["", f"  {title}{times}", *_rounds(same[0])]
    return lines


def _rounds(exchange: Exchange) -> list[str]:
    lines = [line for one in exchange.rounds for line in _round(one)]
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"    ... and {len(lines) - MOST_LINES} lines more: --json has them all"]


def _round(one: Round) -> list[str]:
    senders = max((len(str(message.source)) for message in one.messages), default=1)
    lines = [f"    {one.title}"]
    for message in one.messages:
        size = bytes_text(message.payload_bytes)
        lines.append(f"      {message.source:>{senders}} -> {message.target:<{senders}}  {message.what}, {size}")
    for call in one.calls:
        times = f"{call.calls} x " if call.calls > 1 else ""
        size = bytes_text(call.payload_bytes)
        lines.append(f"      {times}{call.operation} over ranks {_ranks(call.ranks)}: {call.what}, {size}")
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    """`0 1 2 3`, or `0 to 63` where many follow each other, or the first few."""
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return f"{ranks[0]} {ranks[1]} {ranks[2]} ... {ranks[-1]} ({len(ranks)} ranks)"


def document(explanations: tuple[Explanation, ...]) -> dict[str, Any]:
    """The same as one JSON document."""
    return {"explanations": [asdict(one) for one in explanations]}


def write(explanations: tuple[Explanation, ...], name: str) -> list[Path]:
    """The pictures, one a strategy: NAME-data.svg, NAME-tensor.svg, ... Raises EnvironmentProblem."""
    written = []
    for one in explanations:
        path = Path(f"{name}-{one.axis}.svg")
        try:
            path.write_text(picture(one), encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(Problem(f"cannot write {path}: {error.strerror}", "plot")) from error
        written.append(path)
    return written


def picture(one: Explanation) -> str:
    """One vertical line per rank, time downwards, an arrow per message and a bar per collective, as SVG."""
    lanes = {rank: LEFT + index * LANE for index, rank in enumerate(_drawn_ranks(one))}
    y, drawn, total, parts = TOP + 30, 0, 0, []
    purposes: dict[str, str] = {}
    for exchange in one.exchanges:
        for number, part in enumerate(exchange.rounds):
            events: tuple[Message | Call, ...] = (*part.messages, *part.calls)
            total += len(events)
            if drawn >= MOST_DRAWN:
                continue
            title = f"{exchange.title}: {part.title}" if number == 0 else part.title
            parts.append(_label(LEFT, y, title, "start", weight="bold"))
            y += STEP
            for event in events[: MOST_DRAWN - drawn]:
                colour = purposes.setdefault(event.purpose, COLOURS[len(purposes) % len(COLOURS)])
                shape = _arrow(event, lanes, y, colour) if isinstance(event, Message) else _bar(event, lanes, y, colour)
                parts += shape
                y += STEP
            drawn += len(events)
    if total > MOST_DRAWN:
        parts.append(_label(LEFT, y, f"{total - MOST_DRAWN} more are not drawn; --json lists them", "start"))
        y += STEP
    width, height = LEFT + max(len(lanes), 5) * LANE, y + 20
    heading = f"{one.axis} axis: {one.kind}"
    lines = [f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{y}" stroke="#cbd5e0"/>' for x in lanes.values()]
    names = [_label(x, TOP - 8, f"rank {rank}", "middle", weight="bold") for rank, x in lanes.items()]
    legend = [
        _label(LEFT + index * LANE, 56, purpose.replace("_", " "), "start", colour)
        for index, (purpose, colour) in enumerate(purposes.items())
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12" role="img" aria-label="{escape(heading)}">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<text x="{LEFT}" y="28" font-size="16" font-weight="bold">{escape(heading)}</text>',
            *legend,
            *lines,
            *names,
            *parts,
            "</svg>",
            "",
        ]
    )


def _drawn_ranks(one: Explanation) -> list[int]:
    """Every rank that appears, in order."""
    found = set(one.ranks)
    for exchange in one.exchanges:
        for part in exchange.rounds:
            found |= {rank for call in part.calls for rank in call.ranks}
    return sorted(found)


def _arrow(message: Message, lanes: dict[int, int], y: int, colour: str) -> list[str]:
    start, stop = lanes[message.source], lanes[message.target]
    line = f'<line x1="{start}" y1="{y}" x2="{stop}" y2="{y}" stroke="{colour}" marker-end="url(#tip)"/>'
    what = f"{message.what}, {bytes_text(message.payload_bytes)}"
    return [line, _label(min(start, stop) + 8, y - 5, what, "start", colour)]


def _bar(call: Call, lanes: dict[int, int], y: int, colour: str) -> list[str]:
    places = [lanes[rank] for rank in call.ranks]
    line = f'<line x1="{min(places)}" y1="{y}" x2="{max(places)}" y2="{y}" stroke="{colour}" stroke-width="5"/>'
    dots = [f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>' for x in places]
    times = f"{call.calls} x " if call.calls > 1 else ""
    what = f"{times}{call.operation}: {call.what}, {bytes_text(call.payload_bytes)}"
    return [line, *dots, _label(min(places) + 8, y - 7, what, "start", colour)]


def _label(x: int, y: int, words: str, anchor: str, colour: str = "#1a202c", weight: str = "normal") -> str:
    halo = 'paint-order="stroke" stroke="white" stroke-width="3"'  # lines that cross a text stay behind it
    style = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}" {halo}'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'
