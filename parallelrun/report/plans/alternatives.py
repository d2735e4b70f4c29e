"""The strategies of one axis side by side: tables on screen, and for data strategies a picture with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.facts.alternatives import Alternative, Alternatives, Point
from parallelrun.report import chart
from parallelrun.report.figures import bytes_text, csv_text, degrees_text, digits, seconds_text
from parallelrun.report.screen import table

CSV_COLUMNS = ("nodes", "strategy", "selected", "workers", "servers", "sent_bytes", "memory_bytes", "step_time_s",
               "is_bound", "samples_per_s")  # fmt: skip
REPLAY = "replay"  # the equivalence of strategies that train otherwise than one device would
TOO_LARGE = " !"  # after a memory that a device does not have
BOUND = ">="  # before a step time that is a bound, not a prediction


def data_axis_panel(compared: Alternatives | None) -> Group | Text:
    """Return the data strategies on the plan's nodes, and the fastest by number of nodes."""
    if compared is None:
        return Text("one data replica: there is nothing to combine")
    nodes = f"{compared.nodes} nodes"
    if compared.servers:
        workers = counted(compared.nodes - compared.servers, "worker")
        nodes += f" ({workers}, {counted(compared.servers, 'server')})"
    samples = counted(compared.replica_batch, "sample")
    head = Text(f"{nodes}, {samples} per worker in every row; * marks the plan's strategy")
    name = "samples/s" if compared.is_timed else "sent by the busiest rank"
    over = Text(f"\n{name} over the number of nodes, servers included")
    return Group(head, _table(compared), *_most(compared), *_refused(compared), over, _over_nodes(compared),
                 Text("\n".join([*_legend(compared), "plot=NAME draws the lines as NAME.svg, with their numbers in "
                                 "NAME.csv"]), "dim"))  # fmt: skip


def layouts_panel(compared: Alternatives | None, tp: int) -> Group | Text:
    """Return the plan in every tensor layout, and the reasons why others are not legal."""
    if compared is None:
        return Text("this plan has no tensor layouts to compare")
    head = Text(f"the same ranks and samples in every row, tp={tp}; * marks the plan's layout")
    return Group(head, _table(compared), *_refused(compared), Text("\n".join(_legend(compared)), "dim"))


def _label(strategy: Alternative) -> str:
    return ("* " if strategy.selected else "  ") + strategy.name


def _style(strategy: Alternative) -> str | None:
    return "bold" if strategy.selected else None


def _table(compared: Alternatives) -> Table:
    drawn = table("strategy", ">memory", ">rank sends", *((">step time", ">samples/s") * compared.is_timed))
    for strategy in compared.strategies:
        if (point := strategy.here) is None:
            continue
        memory = bytes_text(point.figures["memory_bytes"]) + (TOO_LARGE if point.figures["fits"] == "no" else "")
        timed = (_step_text(point), _rate_text(point)) * compared.is_timed
        drawn.add_row(_label(strategy), memory, bytes_text(point.sent_bytes), *timed, style=_style(strategy))
    return drawn


def _step_text(point: Point) -> str:
    if point.step_s is None:
        return "-"
    return f"{BOUND} {seconds_text(point.step_s)}" if point.is_bound else seconds_text(point.step_s)


def _rate_text(point: Point) -> str:
    rate = point.figures["samples_per_s"]
    return digits(rate) if rate else "-"


def _over_nodes(compared: Alternatives) -> Table:
    """Return samples/s, or the bytes sent where no rate is known, of every strategy by number of nodes."""
    counts = sorted({point.nodes for strategy in compared.strategies for point in strategy.curve})
    drawn = table("nodes", *(f">{count}" for count in counts))
    for strategy in compared.strategies:
        cells = {
            point.nodes: _rate_text(point) if compared.is_timed else bytes_text(point.sent_bytes)
            for point in strategy.curve
        }
        drawn.add_row(_label(strategy), *(cells.get(count, "-") for count in counts), style=_style(strategy))
    return drawn


def _most(compared: Alternatives) -> list[Text]:
    """The fastest of the strategies that train as one device would."""
    rates = {
        strategy.name: strategy.here.figures["samples_per_s"]
        for strategy in compared.strategies
        if strategy.here and strategy.here.step_s and strategy.here.equivalence != REPLAY
    }
    if not rates:
        return []
    fastest = max(rates, key=lambda name: rates[name])
    return [Text(f"most samples/s on {compared.nodes} nodes: {fastest} ({digits(rates[fastest])})")]


def _refused(compared: Alternatives) -> list[Text]:
    refused = [strategy for strategy in compared.strategies if strategy.reason]
    return [Text(f"{strategy.name}: {strategy.reason}", "yellow") for strategy in refused]


def _legend(compared: Alternatives) -> list[str]:
    lines = ["every row is a plan of its own; memory: of the rank that needs most; rank sends: the busiest, in a step"]
    here = {strategy.name: strategy.here for strategy in compared.strategies if strategy.here}
    if any(point.is_bound for strategy in compared.strategies for point in [strategy.here, *strategy.curve] if point):
        lines.append(f"{BOUND}: not predicted; computation at the peak rate, then communication at the links' rates")
    if any(point.figures["fits"] == "no" for point in here.values()):
        lines.append(f"{TOO_LARGE.strip()}: does not fit a device")
    others = [name for name, point in here.items() if point.equivalence == REPLAY]
    if others:
        lines.append(f"not equal to training on one device: {', '.join(others)}")
    if not compared.is_timed:
        lines.append("the cluster gives no rates: step times are unknown")
    return lines


def to_csv(compared: Alternatives) -> str:
    """Return a row per strategy and number of nodes."""
    rows = [
        (point.nodes, strategy.name, int(strategy.selected), point.nodes - point.servers, point.servers,
         point.sent_bytes, point.figures["memory_bytes"], point.step_s or "", int(point.is_bound),
         point.figures["samples_per_s"] or "")
        for strategy in compared.strategies
        for point in strategy.curve
    ]  # fmt: skip
    return csv_text([CSV_COLUMNS, *rows])


def to_svg(compared: Alternatives, title: str) -> str:
    """Draw the bytes that the busiest rank sends and, where the cluster gives rates, samples/s over the nodes."""
    curves: list[tuple[str, Callable[[Point], float], Callable[..., str]]] = [
        ("bytes that the busiest rank sends in a step", lambda point: point.sent_bytes, bytes_text)
    ]
    if compared.is_timed:
        curves.append(("samples/s", lambda point: point.figures["samples_per_s"] or 0.0, digits))
    strategies = drawn_strategies(compared)
    drawn, panels = chart.panels(title, [name for name, _, _ in curves])
    ticks = sorted({point.nodes for strategy in strategies for point in strategy.curve})
    for axes, (_, value, text) in zip(panels, curves, strict=True):
        for style, strategy in enumerate(strategies):
            chart.line(axes, style, [(point.nodes, value(point)) for point in strategy.curve], thick=strategy.selected)
        chart.scale(axes, "x", "{:g}".format, log=True, ticks=ticks, label="nodes, servers included")
        chart.scale(axes, "y", text, log=True)
    notes = [f"{counted(compared.replica_batch, 'sample')} per worker; the thick line is the plan's strategy"]
    return chart.svg(drawn, [strategy.name for strategy in strategies], notes)


def drawn_strategies(compared: Alternatives) -> list[Alternative]:
    """Return those with a line: the first of each kind, and the plan's own."""
    first = {strategy.kind: strategy for strategy in reversed(compared.strategies) if strategy.curve}
    return [strategy for strategy in compared.strategies if strategy.selected or strategy is first.get(strategy.kind)]


def title(plan: Plan, config: Config) -> str:
    """Return the picture's title."""
    servers = f" + {counted(plan.servers, 'server')}" if plan.servers else ""
    return f"{plan.spec.name}: {plan.preset} on cluster {config.cluster.name}, {degrees_text(plan.degrees)}{servers}"


def write(compared: Alternatives, title: str, name: str, point: int | None = None) -> list[Path]:
    """Write NAME.svg and NAME.csv (an ending .svg or .csv of `name` is ignored), or NAME-3.* for point 3 of a sweep.

    Raises EnvironmentProblem."""
    path = Path(name).expanduser()
    stem = path.stem if path.suffix in (".svg", ".csv") else path.name
    stem += "" if point is None else f"-{point}"
    texts = {path.with_name(f"{stem}.svg"): to_svg(compared, title), path.with_name(f"{stem}.csv"): to_csv(compared)}
    return chart.write(name, texts)
