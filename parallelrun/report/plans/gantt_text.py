"""A schedule as a Gantt chart in text: a row per pp rank, legible in colour, without colour and in a log."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from parallelrun.planner.predict.simulate import Event, Simulation
from parallelrun.report.figures import evenly

# Per kind of action: its name, the character that fills its cells, its ink, and its background for even and odd chunks.
KINDS = {
    "F": ("forward", "-", "blue", ("white on blue", "white on dark_blue")),
    "B": ("backward", "=", "green", ("black on green", "black on dark_green")),
    "I": ("input gradient", "=", "green", ("black on green", "black on dark_green")),
    "W": ("weight gradient", "~", "yellow", ("black on yellow", "black on dark_goldenrod")),
}
SHADES = " .:=#"  # of the busy share of a column
MOST_ROWS = 12


def draw(simulation: Simulation, width: int, chunk_of_stage: list[int]) -> Text:
    """Draw rows of at most `width` columns; cells carry the number of their microbatch where it fits.

    Where an action is shorter than a column, columns show the busy share of their time instead. chunk_of_stage: every
    other chunk of a rank has the darker background.
    """
    ranks = evenly(len(simulation.orders), MOST_ROWS)
    label_width = len(f"pp {ranks[-1]} ")
    columns = max(20, width - label_width)
    kinds = sorted({action.kind for order in simulation.orders for action in order}, key=[*KINDS].index)
    end = max(ends[-1] for ends in simulation.ends)
    actions = end / min(time for kind in kinds for time in simulation.times[kind] if time > 0)
    if actions <= columns and abs(actions - round(actions)) < 1e-6:  # then every action gets as many columns
        columns = columns // round(actions) * round(actions)
    text = Text()
    for pp_rank in ranks:
        text.append(f"pp {pp_rank}".ljust(label_width), "bold")
        events = simulation.events(pp_rank)
        dense = actions > columns
        text.append_text(_shares(events, columns, end) if dense else _cells(events, columns, end, chunk_of_stage))
        text.append("\n")
    text.append(" " * label_width)
    if dense:
        return text.append(f"busy share of the time: {', '.join(f'{s!r} {i * 25} %' for i, s in enumerate(SHADES))}")
    text.append("number of the microbatch, then ")
    for kind in kinds:
        name, fill, _, styles = KINDS[kind]
        text.append(fill * 2, styles[0]).append(f" {name}, ")
    return text.append("blank idle")


def _cells(events: list[Event], columns: int, end: float, chunk_of_stage: list[int]) -> Text:
    """Each column shows the event at its middle; neighbouring columns of one event make one labelled cell."""
    at: list[int | None] = [None] * columns
    for index, event in enumerate(events):
        first, last = (round(moment / end * columns) for moment in (event.begin, event.end))
        at[first:last] = [index] * (last - first)
    text = Text()
    for cell, same in groupby(at):
        length = len(list(same))
        if cell is None:
            text.append(" " * length)
            continue
        event, label = events[cell], str(events[cell].microbatch)
        _, fill, _, styles = KINDS[event.kind]
        text.append(
            (label if len(label) <= length else "").ljust(length, fill), styles[chunk_of_stage[event.stage] % 2]
        )
    return text


def _shares(events: list[Event], columns: int, end: float) -> Text:
    """Each column shows the busy share of its time, in the colour of the kind that takes most of it."""
    spent = {kind: [0.0] * columns for kind in KINDS}
    for event in events:
        begin, stop, row = event.begin / end * columns, event.end / end * columns, spent[event.kind]
        for column in range(int(begin), min(int(stop), columns - 1) + 1):
            row[column] += min(stop, column + 1) - max(begin, column)
    text = Text()
    for column in range(columns):
        kind = max(spent, key=lambda kind: spent[kind][column])
        busy = sum(row[column] for row in spent.values())
        text.append(SHADES[min(len(SHADES) - 1, round(busy * (len(SHADES) - 1)))], KINDS[kind][2])
    return text
