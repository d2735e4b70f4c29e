"""The data axis under every way: a table and a plot on screen, a picture and the numbers behind it. Torch-free."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from parallelrun.config.schema import Config
from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.plan import data_candidates as kinds
from parallelrun.plan.data_axis import DataAxis, Point, StrategyCost
from parallelrun.plan.structure import Plan
from parallelrun.records import write_text
from parallelrun.report import chart, terminal_plot
from parallelrun.report.figures import bytes_text, degrees_text, digits, seconds_text
from parallelrun.wording import counted

LETTERS = {
    kinds.RING: "r", kinds.HALVING: "d", kinds.TREES: "t", kinds.BINOMIAL: "b",
    kinds.HIERARCHICAL: "h", kinds.OWN: "o", kinds.SHARDED: "z",
    kinds.SCATTERED_AGAIN: "m", kinds.GATHERED_AGAIN: "f", kinds.HSDP: "g", kinds.ONE_SERVER: "1", kinds.SERVERS: "s",
    kinds.BEST: "b", kinds.COLOCATED: "c", kinds.HELPED: "k",
}  # fmt: skip
ALWAYS_DRAWN = (kinds.RING, kinds.HALVING, kinds.HIERARCHICAL, kinds.ONE_SERVER, kinds.SERVERS, kinds.BEST)
PLOT_ROWS = 11
CSV_COLUMNS = ("nodes", "way", "chosen", "workers", "servers", "steps", "worker_bytes", "busiest_bytes", "time", "unit",
               "samples_per_s", "samples_per_s_overlapped")  # fmt: skip


def panel(found: DataAxis, width: int) -> Group:
    """The ways on the plan's nodes, the best worker share, and the plot over the number of nodes."""
    return Group(_head(found), _table(found), *_best(found), Text(), _plot(found, width), Text(_legend(found), "dim"))


def _head(found: DataAxis) -> Text:
    nodes = f"{found.nodes} nodes"
    if found.servers:
        nodes += f" ({counted(found.workers, 'worker')}, {counted(found.servers, 'server')})"
    text = f"D = {bytes_text(found.gradient_bytes)} of gradients a rank, combined over {nodes}; * marks the plan's way"
    if found.expert_bytes:
        text += f"\nbeside it {bytes_text(found.expert_bytes)} of experts' gradients over expert_dp, not compared here"
    if found.fabric.unit == kinds.RELATIVE:
        text += "\nthe cluster gives no rates of its links: times in D/B, that of sending D once"
    return Text(text)


def _table(found: DataAxis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    timed = found.compute_s is not None
    fastest = max(
        (
            strategy.here.samples_per_s[1]
            for strategy in found.strategies
            if strategy.here and strategy.here.samples_per_s
        ),
        default=0.0,
    )
    thousands, size = (" k", 1e3) if fastest >= 1e3 else ("", 1.0)
    unit, seconds = _time_unit(found)
    for column in ("way", ">steps", ">sends", ">busiest", f">time {unit}", *((">samples/s",) if timed else ())):
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for strategy in found.strategies:
        point = strategy.here
        if point is None:
            continue
        rates = point.samples_per_s
        table.add_row(
            ("* " if strategy.chosen else "  ") + strategy.label,
            digits(point.exchange.steps),
            bytes_text(point.exchange.worker_bytes),
            bytes_text(point.exchange.busiest_bytes),
            digits(point.exchange.seconds / seconds),
            *([f"{digits(rates[0] / size)}..{digits(rates[1] / size)}{thousands}"] if rates else []),
            style="bold" if strategy.chosen else None,
        )
    return table


def _time_unit(found: DataAxis) -> tuple[str, float]:
    """(name, how many of the fabric's units) in which the column of times is written."""
    if found.fabric.unit == kinds.RELATIVE:
        return kinds.RELATIVE, 1.0
    slowest = max(strategy.here.exchange.seconds for strategy in found.strategies if strategy.here)
    return ("s", 1.0) if slowest >= 1 else ("ms", 1e-3)


def _time_text(found: DataAxis) -> Callable[[float], str]:
    return seconds_text if found.fabric.unit == kinds.SECONDS else lambda value: f"{digits(value)} D/B"


def _best(found: DataAxis) -> list[Text]:
    best = found.best
    if best is None:
        return []
    text = (
        f"best worker share e* = {best.share:.2f} without overlap: {_split(best.workers, found)}; "
        f"{best.share_overlapped:.2f} with full overlap: {_split(best.workers_overlapped, found)} "
        f"(r = 2D/(B x compute) = {digits(best.ratio)})"
    )
    equal = [
        (_rate(strategy.here), strategy.label)
        for strategy in found.strategies
        if strategy.here and strategy.name != kinds.HELPED
    ]
    rate, fastest = max(equal, key=lambda entry: entry[0])
    return [Text(text), Text(f"most samples a second on equal nodes, without overlap: {fastest} ({digits(rate)})")]


def _split(workers: int, found: DataAxis) -> str:
    return f"{counted(workers, 'worker')} + {counted(found.nodes - workers, 'server')}"


def drawn(found: DataAxis) -> list[StrategyCost]:
    """The ways that get a curve: those that differ in shape, and the plan's own."""
    return [
        strategy
        for strategy in found.strategies
        if (strategy.chosen or strategy.name in ALWAYS_DRAWN) and strategy.curve
    ]


def _plot(found: DataAxis, width: int) -> Text:
    curves = [
        terminal_plot.Curve(
            LETTERS[strategy.name],
            strategy.label,
            tuple((point.nodes, point.exchange.seconds) for point in strategy.curve),
            strategy.chosen,
        )
        for strategy in drawn(found)
    ]
    head = Text("time to combine the gradients over the number of nodes, servers among them\n")
    return head.append_text(terminal_plot.draw(curves, width, PLOT_ROWS, "{:g}".format, _time_text(found)))


def _legend(found: DataAxis) -> str:
    text = (
        "closed forms, every node's link full duplex; steps: messages one after the other; sends: the busiest worker; "
        "busiest: what the node with most to do sends, or receives; not counted: adding, incast, buckets"
    )
    if found.compute_s is not None:
        text += (
            f"; samples/s: nothing overlapped..all of it, computing {seconds_text(found.compute_s)} at the peak rate "
            f"for each worker's {found.worker_batch} sample{'s' * (found.worker_batch > 1)}"
        )
    if found.servers:
        text += "; ps: pushes, then pulls; shard by shard under each other they take half of the time"
    return text + "; plot=NAME writes NAME.svg and NAME.csv"


def to_csv(found: DataAxis) -> str:
    """Every way on every number of nodes drawn, a row each; times in `unit`."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for strategy in found.strategies:
        for point in strategy.curve:
            exchange, rates = point.exchange, point.samples_per_s or ("", "")
            writer.writerow(
                (point.nodes, strategy.label, int(strategy.chosen), point.workers, point.servers, exchange.steps,
                 exchange.worker_bytes, exchange.busiest_bytes, exchange.seconds, found.fabric.unit, *rates)
            )  # fmt: skip
    return text.getvalue()


def to_svg(found: DataAxis, title: str) -> str:
    """Time and, where the cluster says how fast a device computes, samples a second over the number of nodes."""
    strategies = drawn(found)
    nodes = chart.Axis("nodes of the data axis, servers among them", "{:g}".format, log=True, ticks=_ticks(found))

    def plotted(title: str, value: Callable[[Point], float], text: Callable[[float], str]) -> chart.Panel:
        lines = [
            chart.Line(style, tuple((point.nodes, value(point)) for point in strategy.curve), strategy.chosen)
            for style, strategy in enumerate(strategies)
        ]
        return chart.Panel(title, nodes, chart.Axis("", text, log=True), tuple(lines))

    panels = [plotted("time to combine the gradients", lambda point: point.exchange.seconds, _time_text(found))]
    if found.compute_s is not None:
        panels.append(plotted("samples a second, nothing overlapped", _rate, digits))
    notes = [
        f"D = {bytes_text(found.gradient_bytes)} a rank; thick: the plan's way; closed forms, the numbers in the CSV"
    ]
    return chart.draw(title, panels, [strategy.label for strategy in strategies], notes)


def _rate(point: Point) -> float:
    return point.samples_per_s[0] if point.samples_per_s else 0.0


def _ticks(found: DataAxis) -> tuple[float, ...]:
    nodes = sorted({point.nodes for strategy in found.strategies for point in strategy.curve})
    return tuple(n for n in nodes if n & (n - 1) == 0 or n == found.nodes)


def title(plan: Plan, config: Config) -> str:
    """What the picture is of."""
    beside = f" + {counted(plan.servers, 'server')}" if plan.servers else ""
    return f"{plan.spec.name}: {plan.preset} on cluster {config.cluster.name}, {degrees_text(plan.degrees)}{beside}"


def write(found: DataAxis, title: str, place: str, point: int | None = None) -> list[Path]:
    """NAME.svg and NAME.csv for `place` NAME (an ending .svg or .csv is left off); NAME-3 for a sweep's point 3.

    Files of those names are replaced. Raises EnvironmentProblem."""
    path = Path(place).expanduser()
    name = path.stem if path.suffix in (".svg", ".csv") else path.name
    name += "" if point is None else f"-{point}"
    picture, numbers = path.with_name(f"{name}.svg"), path.with_name(f"{name}.csv")
    try:
        write_text(picture, to_svg(found, title))
        write_text(numbers, to_csv(found))
    except OSError as error:
        what = f"plot={place}: {error.strerror or error}"
        raise EnvironmentProblem(
            Problem(what, "plot", "a name in a folder that exists and can be written to")
        ) from error
    return [picture, numbers]
