"""A schedule as a terminal Gantt: one row per pp rank, legible in colour, without colour and in a log file."""

from __future__ import annotations

from bisect import bisect_right

from rich.text import Text

from parallelrun.plan.simulate import Event, Simulation

FILLERS = {"F": "-", "B": "=", "I": "=", "W": "~"}
STYLES = {
    "F": ("white on blue", "white on dark_blue"),
    "B": ("black on green", "black on dark_green"),
    "I": ("black on green", "black on dark_green"),
    "W": ("black on yellow", "black on dark_goldenrod"),
}
INKS = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}
SHADES = " .:=#"
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MOST_ROWS = 12


def draw(simulation: Simulation, width: int, chunk_of_stage: list[int]) -> Text:
    """Rows of at most `width` columns; a run of one action carries its microbatch's number where that fits.

    Where an action is shorter than a column, a column shows the part of its time that is busy instead. Above 12
    coordinates, 12 of them from first to last are drawn. chunk_of_stage: shades every other chunk.
    """
    pp_ranks = shown_positions(len(simulation.orders))
    label_width = len(f"pp {pp_ranks[-1]} ")
    columns = max(20, width - label_width)
    end = max(ends[-1] for ends in simulation.ends)
    shortest = min(
        t for kind in {a.kind for order in simulation.orders for a in order} for t in _positive(simulation, kind)
    )
    whole = end / shortest  # the step in shortest actions: whole columns for each, where they fit
    if whole <= columns and abs(whole - round(whole)) < 1e-6:
        columns = columns // round(whole) * round(whole)
    dense = whole > columns
    text = Text()
    for pp_rank in pp_ranks:
        text.append(f"pp {pp_rank}".ljust(label_width), "bold")
        if dense:
            text.append_text(_dense_row(simulation, pp_rank, columns, end))
        else:
            text.append_text(_row(simulation.events(pp_rank), columns, end, chunk_of_stage))
        text.append("\n")
    text.append(" " * label_width)
    text.append_text(_dense_legend() if dense else _legend(simulation))
    return text


def _positive(simulation: Simulation, kind: str) -> list[float]:
    return [time for time in simulation.times[kind] if time > 0]


def shown_positions(count: int) -> list[int]:
    """The coordinates that get a row: all, or 12 spread from the first to the last."""
    if count <= MOST_ROWS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})


def _row(events: list[Event], columns: int, end: float, chunk_of_stage: list[int]) -> Text:
    """Each column shows what runs at its middle; neighbouring columns of one event make one labelled cell."""
    begins = [event.begin for event in events]
    cells: list[tuple[Event | None, int]] = []
    for column in range(columns):
        moment = (column + 0.5) * end / columns
        index = bisect_right(begins, moment) - 1
        event = events[index] if index >= 0 and moment < events[index].end else None
        if cells and cells[-1][0] is event:
            cells[-1] = event, cells[-1][1] + 1
        else:
            cells.append((event, 1))
    text = Text()
    for event, length in cells:
        if event is None:
            text.append(" " * length)
            continue
        label = str(event.microbatch)
        cell = label if len(label) <= length else ""
        style = STYLES[event.kind][chunk_of_stage[event.stage] % 2]
        text.append(cell.ljust(length, FILLERS[event.kind]), style)
    return text


def _dense_row(simulation: Simulation, pp_rank: int, columns: int, end: float) -> Text:
    """Per column the busy part of its time as a shade, in the colour of what takes most of it."""
    spent = {kind: [0.0] * columns for kind in NAMES}
    scale = columns / end
    lengths = {kind: [time * scale for time in times] for kind, times in simulation.times.items()}
    for action, ended in zip(simulation.orders[pp_rank], simulation.ends[pp_rank]):
        stop = ended * scale
        begin = stop - lengths[action.kind][action.stage]
        row = spent[action.kind]
        first, last = int(begin), min(int(stop), columns - 1)
        if first == last:
            row[first] += stop - begin
            continue
        row[first] += first + 1 - begin
        for column in range(first + 1, last):
            row[column] += 1
        row[last] += min(stop, columns) - last
    text = Text()
    for column in range(columns):
        kind = max(spent, key=lambda kind: spent[kind][column])
        busy = sum(row[column] for row in spent.values())
        shade = SHADES[min(len(SHADES) - 1, round(busy * (len(SHADES) - 1)))]
        text.append(shade, INKS[kind])
    return text


def _dense_legend() -> Text:
    return Text(f"busy part of the time: {', '.join(f'{s!r} {i * 25} %' for i, s in enumerate(SHADES))}")


def _legend(simulation: Simulation) -> Text:
    kinds = sorted({action.kind for order in simulation.orders for action in order}, key="FBIW".index)
    text = Text("microbatch number, then ")
    for index, kind in enumerate(kinds):
        text.append(", " if index else "")
        text.append(FILLERS[kind] * 2, STYLES[kind][0])
        text.append(f" {NAMES[kind]}")
    return text.append(", blank idle")
