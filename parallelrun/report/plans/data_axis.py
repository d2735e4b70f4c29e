"""The data-parallel strategies side by side: tables on screen, and a picture with the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict import data_cost as kinds
from parallelrun.planner.predict.data_axis import DataAxis, Point, StrategyCost
from parallelrun.planner.predict.data_candidates import RELATIVE, SECONDS
from parallelrun.report import chart
from parallelrun.report.figures import bytes_text, csv_text, degrees_text, digits, seconds_text
from parallelrun.report.screen import table

ALWAYS_DRAWN = (kinds.RING, kinds.HALVING, kinds.HIERARCHICAL, kinds.ONE_SERVER, kinds.SERVERS, kinds.BEST)
MOST_COLUMNS = 6  # numbers of nodes in the table
CSV_COLUMNS = ("nodes", "way", "chosen", "workers", "servers", "steps", "worker_bytes", "busiest_bytes", "time", "unit",
               "samples_per_s", "samples_per_s_overlapped")  # fmt: skip


def panel(found: DataAxis) -> Group:
    """Return the strategies on the plan's nodes, the best share of workers, and times over the number of nodes."""
    over_nodes = Text("\ntime to combine the gradients over the number of nodes, servers included")
    legend = Text("\n".join(_legend(found)), "dim")
    return Group(_head(found), _table(found), *_best(found), over_nodes, _times(found), legend)


def _head(found: DataAxis) -> Text:
    nodes = f"{found.nodes} nodes"
    if found.servers:
        nodes += f" ({counted(found.workers, 'worker')}, {counted(found.servers, 'server')})"
    text = f"D = {bytes_text(found.gradient_bytes)} of gradients per rank, combined over {nodes}; * marks the plan's"
    if found.expert_bytes:
        text += f"\nnot compared: {bytes_text(found.expert_bytes)} of the experts' gradients over expert_dp"
    if found.fabric.unit == RELATIVE:
        text += "\nthe cluster gives no link rates: times are in D/B, the time to send D once"
    return Text(text)


def _label(strategy: StrategyCost) -> str:
    return ("* " if strategy.chosen else "  ") + strategy.label


def _table(found: DataAxis) -> Table:
    rated = [
        strategy.here.samples_per_s[1] for strategy in found.strategies if strategy.here and strategy.here.samples_per_s
    ]
    thousands, size = (" k", 1e3) if max(rated, default=0.0) >= 1e3 else ("", 1.0)
    unit, seconds = _time_unit(found)
    drawn = table("strategy", ">steps", ">sends", ">busiest", f">time {unit}", *([">samples/s"] if rated else []))
    for strategy in found.strategies:
        if strategy.here is None:
            continue
        exchange, rates = strategy.here.exchange, strategy.here.samples_per_s
        drawn.add_row(
            _label(strategy),
            digits(exchange.steps),
            bytes_text(exchange.worker_bytes),
            bytes_text(exchange.busiest_bytes),
            digits(exchange.seconds / seconds),
            *([f"{digits(rates[0] / size)}..{digits(rates[1] / size)}{thousands}"] if rates else []),
            style="bold" if strategy.chosen else None,
        )
    return drawn


def _times(found: DataAxis) -> Table:
    """Return the time of every drawn strategy on a few numbers of nodes."""
    known = [n for n in _ticks(found) if n >= 2]
    step = -(-(len(known) - 1) // (MOST_COLUMNS - 1)) or 1
    shown = sorted({*known[::-step][:MOST_COLUMNS], found.nodes} & {*known})
    drawn = table("nodes", *(f">{n:g}" for n in shown))
    text = _time_text(found)
    for strategy in drawn_strategies(found):
        times = {point.nodes: text(point.exchange.seconds) for point in strategy.curve}
        drawn.add_row(
            _label(strategy), *(times.get(int(n), "-") for n in shown), style="bold" if strategy.chosen else None
        )
    return drawn


def _time_unit(found: DataAxis) -> tuple[str, float]:
    """Return the unit of the column of times: its name, and how many of the fabric's units it is."""
    if found.fabric.unit == RELATIVE:
        return RELATIVE, 1.0
    slowest = max(strategy.here.exchange.seconds for strategy in found.strategies if strategy.here)
    return ("s", 1.0) if slowest >= 1 else ("ms", 1e-3)


def _time_text(found: DataAxis) -> Callable[..., str]:
    if found.fabric.unit == SECONDS:
        return seconds_text
    return lambda value, significant=3: f"{digits(value, significant)} D/B"


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
    return [Text(text), Text(f"most samples/s on equal nodes, without overlap: {fastest} ({digits(rate)})")]


def _split(workers: int, found: DataAxis) -> str:
    return f"{counted(workers, 'worker')} + {counted(found.nodes - workers, 'server')}"


def drawn_strategies(found: DataAxis) -> list[StrategyCost]:
    """Return those with a curve: those whose curves differ in shape, and the plan's own."""
    return [
        strategy
        for strategy in found.strategies
        if (strategy.chosen or strategy.name in ALWAYS_DRAWN) and strategy.curve
    ]


def _legend(found: DataAxis) -> list[str]:
    lines = [
        "closed forms for full-duplex links; not counted: additions, incast, buckets",
        "steps: consecutive messages; sends: the busiest worker; busiest: the node that sends or receives most",
    ]
    if found.compute_s is not None:
        samples = counted(found.worker_batch, "sample")
        lines.append(
            f"samples/s: without overlap..with full overlap; computing {samples} per worker takes "
            f"{seconds_text(found.compute_s)} at the peak rate"
        )
    if found.servers:
        lines.append("ps: pushes, then pulls; if shards overlap, it takes half of the time")
    return [*lines, "plot=NAME draws the curves as NAME.svg, with their numbers in NAME.csv"]


def to_csv(found: DataAxis) -> str:
    """Return a row per strategy and number of nodes; times are in `unit`."""
    rows = [
        (point.nodes, strategy.label, int(strategy.chosen), point.workers, point.servers, point.exchange.steps,
         point.exchange.worker_bytes, point.exchange.busiest_bytes, point.exchange.seconds, found.fabric.unit,
         *(point.samples_per_s or ("", "")))
        for strategy in found.strategies
        for point in strategy.curve
    ]  # fmt: skip
    return csv_text([CSV_COLUMNS, *rows])


def to_svg(found: DataAxis, title: str) -> str:
    """Draw time and, where the cluster says how fast a device computes, samples/s over the number of nodes."""
    curves: list[tuple[str, Callable[[Point], float], Callable[..., str]]] = [
        ("time to combine the gradients", lambda point: point.exchange.seconds, _time_text(found))
    ]
    if found.compute_s is not None:
        curves.append(("samples/s without overlap", _rate, digits))
    strategies = drawn_strategies(found)
    drawn, panels = chart.panels(title, [name for name, _, _ in curves])
    for axes, (_, value, text) in zip(panels, curves, strict=True):
        for style, strategy in enumerate(strategies):
            chart.line(axes, style, [(point.nodes, value(point)) for point in strategy.curve], thick=strategy.chosen)
        chart.scale(axes, "x", "{:g}".format, log=True, ticks=_ticks(found), label="nodes, servers included")
        chart.scale(axes, "y", text, log=True)
    size = bytes_text(found.gradient_bytes)
    notes = [f"D = {size} per rank; the thick line is the plan's strategy; closed forms, whose numbers are in the CSV"]
    return chart.svg(drawn, [strategy.label for strategy in strategies], notes)


def _rate(point: Point) -> float:
    return point.samples_per_s[0] if point.samples_per_s else 0.0


def _ticks(found: DataAxis) -> list[int]:
    """Return the powers of two and the plan's own number of nodes."""
    nodes = sorted({point.nodes for strategy in found.strategies for point in strategy.curve})
    return [n for n in nodes if n & (n - 1) == 0 or n == found.nodes]


def title(plan: Plan, config: Config) -> str:
    """Return the picture's title."""
    servers = f" + {counted(plan.servers, 'server')}" if plan.servers else ""
    return f"{plan.spec.name}: {plan.preset} on cluster {config.cluster.name}, {degrees_text(plan.degrees)}{servers}"


def write(found: DataAxis, title: str, name: str, point: int | None = None) -> list[Path]:
    """Write NAME.svg and NAME.csv (an ending .svg or .csv of `name` is ignored), or NAME-3.* for point 3 of a sweep.

    Raises EnvironmentProblem."""
    chart.require(f"plot={name}")
    path = Path(name).expanduser()
    stem = path.stem if path.suffix in (".svg", ".csv") else path.name
    stem += "" if point is None else f"-{point}"
    texts = {path.with_name(f"{stem}.svg"): to_svg(found, title), path.with_name(f"{stem}.csv"): to_csv(found)}
    return chart.write(name, texts)
