"""What a strategy sends, message by message: text, JSON, and a picture with a lane for every rank. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.plan.explanation import SEND, Explanation, Step, Transfer
from parallelrun.records import write_text
from parallelrun.report.chart import COLOURS, GRID, INK
from parallelrun.report.figures import bytes_text

MOST_LINES, MOST_DRAWN = 400, 300  # transfers on the screen, rows of the picture; --json has all of them
LANE, ROW, MARGIN, HEAD = 120, 22, 30, 34  # pixels: between two ranks, of a transfer, around, of a title
MOST_RANKS_NAMED = 8


def lines(explained: Sequence[Explanation]) -> list[str]:
    """The screen: each step with its transfers, one a line."""
    out: list[str] = []
    for one in explained:
        out += ["", one.title, *(f"  ({note})" for note in one.notes)]
        for number, step in enumerate(one.steps, start=1):
            repeated = f"  x {step.times}" if step.times > 1 else ""
            out.append(f"  {number}. {step.title}{repeated}")
            out += [f"       {_line(transfer)}" for transfer in step.transfers]
    if len(out) > MOST_LINES:
        out = [*out[:MOST_LINES], f"... and {len(out) - MOST_LINES} lines more: --json lists everything"]
    return out[1:]


def _line(one: Transfer) -> str:
    calls = f" in {one.calls} messages" if one.calls > 1 else ""
    size = f"{bytes_text(one.payload_bytes)}{calls}"
    if one.operation == SEND:
        effect = f", {one.effect}" if one.effect else ""
        return f"rank {one.ranks[0]} -> rank {one.ranks[1]}: {one.block} ({size}{effect})"
    return f"{one.operation.replace('_', '-')} over {one.axis}, ranks {_ranks(one.ranks)}: {one.block} ({size})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS_NAMED]))
    return shown if len(ranks) <= MOST_RANKS_NAMED else f"{shown}, ... {ranks[-1]}"


def document(explained: Sequence[Explanation]) -> dict[str, Any]:
    """All of it."""
    return {"explained": [asdict(one) for one in explained]}


def svg(explained: Sequence[Explanation], title: str) -> str:
    """A lane for every rank, time downwards: an arrow for a message, a bar over the ranks of a collective."""
    ranks = sorted({rank for one in explained for step in one.steps for t in step.transfers for rank in t.ranks})
    lane = {rank: MARGIN + LANE // 2 + index * LANE for index, rank in enumerate(ranks)}
    width = max(2 * MARGIN + LANE * len(ranks), 560)
    parts: list[str] = []
    y, drawn, left_out = HEAD + 2 * ROW, 0, 0
    for one in explained:
        y += ROW
        parts.append(_text(MARGIN, y, one.title, "start", 14, bold=True))
        for number, step in enumerate(one.steps, start=1):
            if drawn >= MOST_DRAWN:
                left_out += len(step.transfers)
                continue
            y, drawn = _draw(step, number, lane, width, y, parts), drawn + len(step.transfers)
    if left_out:
        y += ROW
        parts.append(_text(MARGIN, y, f"{left_out} transfers more: parallelrun explain --json lists all", "start", 11))
    height = y + ROW
    lanes = [
        f'<line x1="{x}" y1="{HEAD + ROW}" x2="{x}" y2="{height - 8}" stroke="{GRID}"/>'
        + _text(x, HEAD + ROW - 6, f"rank {rank}", "middle", 12)
        for rank, x in lane.items()
    ]
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(MARGIN, 22, title, "start", 15, bold=True),
    ]
    return "\n".join([*head, *lanes, *parts, "</svg>", ""])


def _draw(step: Step, number: int, lane: dict[int, int], width: int, y: int, parts: list[str]) -> int:
    """Append the step's title and its transfers below `y`; returns where they end."""
    y += ROW
    repeated = f" (x {step.times})" if step.times > 1 else ""
    parts.append(f'<line x1="{MARGIN}" y1="{y - 15}" x2="{width - MARGIN}" y2="{y - 15}" stroke="{GRID}"/>')
    parts.append(_text(MARGIN, y, f"{number}. {step.title}{repeated}", "start", 11))
    for one in step.transfers:
        y += ROW
        places = [lane[rank] for rank in one.ranks]
        colour = COLOURS[(number - 1) % len(COLOURS)]
        label = f"{one.block}, {bytes_text(one.payload_bytes)}"
        if one.operation == SEND:
            start, stop = places
            parts.append(
                f'<line x1="{start}" y1="{y}" x2="{stop}" y2="{y}" stroke="{colour}" stroke-width="1.5" '
                f'marker-end="url(#tip)"/>'
            )
            middle = (start + stop) / 2
        else:
            label = f"{one.operation.replace('_', '-')}: {label}"
            parts.append(
                f'<line x1="{min(places) - 8}" y1="{y}" x2="{max(places) + 8}" y2="{y}" stroke="{colour}" '
                f'stroke-width="5" stroke-linecap="round" opacity="0.6"/>'
            )
            parts += [f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x in places]
            middle = (min(places) + max(places)) / 2
        room = 6.0 * len(label) / 2
        parts.append(_text(min(max(middle, MARGIN + room), width - MARGIN - room), y - 5, label, "middle", 10))
    return y


def _text(x: float, y: float, text: str, anchor: str, size: int, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}"{weight} fill="{INK}">{escape(text)}</text>'


def write(explained: Sequence[Explanation], title: str, name: str) -> Path:
    """NAME.svg. Raises EnvironmentProblem where it cannot be written."""
    path = Path(f"{name.removesuffix('.svg')}.svg").expanduser()
    try:
        write_text(path, svg(explained, title))
    except OSError as error:
        what, fix = f"plot={name}: {error.strerror or error}", "a name in a folder that exists and can be written to"
        raise EnvironmentProblem(Problem(what, "plot", fix)) from error
    return path
