"""The sections of `parallelrun plan` that `detail=ranks|stages|schedule|traffic|data_axis|layouts` asks for."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.text import Text

from parallelrun.base.wording import COLUMNS
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.facts import alternatives
from parallelrun.planner.facts.document import axis_rows, rank_row, server_rows, stage_rows
from parallelrun.planner.facts.plan_facts import Facts
from parallelrun.planner.pieces.expert_axes import axis_views
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.simulate import Simulation
from parallelrun.planner.predict.traffic import TrafficRow
from parallelrun.report.figures import byte_unit, bytes_text, count_text, digits, evenly, ranks_text
from parallelrun.report.plans import gantt_text as timeline
from parallelrun.report.plans.alternatives import data_axis_panel, layouts_panel
from parallelrun.report.screen import FRAME, WIDEST, show_section, table

MOST_RANKS, MOST_SERVERS = 200, 16  # rows
SHORT = {"gradients": "grads", "optimizer": "optim.", "activations": "activ.", "temporary": "temp."}


def show(name: str, plan: Plan, config: Config, results: Facts, console: Console) -> None:
    """Print one section: name is one of `wording.DETAILS`."""
    sections: dict[str, tuple[str, Callable[[], RenderableType]]] = {
        "ranks": ("mesh and ranks", lambda: _ranks(plan, config)),
        "stages": ("stages and memory", lambda: _stages(plan, results)),
        "schedule": ("schedule", lambda: schedule(plan, results.simulation, width(console))),
        "traffic": ("collectives of a step", lambda: _traffic(plan, results)),
        "data_axis": ("data-parallel strategies side by side",
                      lambda: data_axis_panel(alternatives.data_axis(plan, config))),
        "layouts": ("tensor layouts side by side",
                    lambda: layouts_panel(alternatives.layouts(plan, config), plan.mesh.size("tp"))),
    }  # fmt: skip
    title, draw = sections[name]
    show_section(title, draw(), console)


def _ranks(plan: Plan, config: Config) -> Group:
    """Return the axes, then the ranks; of more than MOST_RANKS, the first and the last of them."""
    views = axis_views(plan)
    axes = table("axis", ">degree", ">groups", "first group", *(["of"] if views else []))
    for row in axis_rows(plan):
        members = ranks_text(row["first_group"]) if row["degree"] > 1 else "no communicator"
        view = [views.get(row["axis"], "")] if views else []
        axes.add_row(row["axis"], str(row["degree"]), f"{row['groups']:,}", members, *view)
    shown = [*range(plan.world)]
    left_out = plan.world - MOST_RANKS
    if left_out > 0:
        shown = [*shown[: MOST_RANKS // 2], *shown[-MOST_RANKS // 2 :]]
    rows = [rank_row(plan, rank, config.cluster) for rank in shown]
    ranks = table(*("role" if key == "role" else f">{key}" for key in rows[0]))
    for index, row in enumerate(rows):
        if left_out > 0 and index == MOST_RANKS // 2:
            ranks.add_row("..")
        ranks.add_row(*("-" if value is None else str(value) for value in row.values()))
    notes = []
    if left_out > 0:
        notes.append(f"{left_out:,} ranks between them are left out; --json has all {plan.world:,}")
    if not config.cluster.gpus_per_node and not config.cluster.nodes and plan.world > 1:
        notes.append(f"all ranks are on one host, because cluster={config.cluster.name} gives no gpus_per_node")
    return Group(axes, Text(), ranks, *(Text(note, "dim") for note in notes))


def _stages(plan: Plan, results: Facts) -> Group:
    """Return blocks, parameters and memory of the heaviest rank for each pp rank, then the servers."""
    stages, heaviest = stage_rows(plan), results.heaviest_pp_rank
    names = [SHORT.get(name, name) for name in results.memories[heaviest].parts]
    drawn = table("pp", "blocks", ">params", *(f">{name}" for name in names), ">total")
    unit, size = byte_unit(results.memories[heaviest].total)
    shown = sorted({*evenly(plan.mesh.size("pp"), timeline.MOST_ROWS), heaviest})
    for pp_rank in shown:
        mine, memory = [stage for stage in stages if stage["position"] == pp_rank], results.memories[pp_rank]
        marked = pp_rank == heaviest and len(results.memories) > 1
        drawn.add_row(
            f"{pp_rank}{' *' if marked else ''}",
            "; ".join(_block_range(stage["blocks"]) for stage in mine),
            count_text(sum(stage["parameters"] for stage in mine)),
            *(digits(num_bytes / size) for num_bytes in (*memory.parts.values(), memory.total)),
            style="bold" if marked else None,
        )
    notes = [f"weights to total: {unit} on the heaviest rank of this pp rank; *: the heaviest of all"]
    if len(results.memories) > len(shown):
        notes.append(f"{len(results.memories) - len(shown)} coordinates between them are left out; --json has all")
    notes.append(f"not counted: {', '.join(results.memories[heaviest].leaves_out)}")
    return Group(drawn, Text("\n".join(notes), "dim"), *_servers(plan))


def _block_range(blocks: list[str]) -> str:
    """`embedding..layers.3 (5)`."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]} ({len(blocks)})"


def _servers(plan: Plan) -> list[RenderableType]:
    """Return the shards and memory of each server; of more than MOST_SERVERS, the largest ones."""
    rows = server_rows(plan)
    if not rows:
        return []
    shown = sorted(rows, key=lambda row: -row["weights"])[:MOST_SERVERS]
    drawn = table(">server", ">rank", ">shards", ">weights", ">grads", ">optim.", ">total", ">of mean")
    for row in sorted(shown, key=lambda row: row["server"]):
        sizes = (bytes_text(row[key]) for key in ("weights", "gradients", "optimizer", "total"))
        drawn.add_row(str(row["server"]), str(row["rank"]), str(row["shards"]), *sizes, f"{row['of_mean']:.3f}")
    note = f"of mean: weights over the servers' mean; the largest is {max(row['of_mean'] for row in rows):.3f}"
    if len(rows) > len(shown):
        note += f"; {len(rows) - len(shown)} smaller servers are left out; --json has all"
    return [Text(), drawn, Text(note, "dim")]


def width(console: Console) -> int:
    """Return the columns inside the frame of a section."""
    return min(console.width, WIDEST, *([] if console.is_terminal else [COLUMNS])) - FRAME


def schedule(plan: Plan, simulation: Simulation, columns: int) -> Text:
    """Return the Gantt chart of a plan's pipeline."""
    if plan.mesh.size("pp") == 1:
        return Text("no pipeline")
    text = Text()
    if simulation.num_microbatches < plan.batch.microbatches:
        text.append(f"the first {simulation.num_microbatches} of {plan.batch.microbatches} microbatches; ", "dim")
    text.append("times follow each stage's FLOPs; messages take no time\n\n", "dim")
    chunk_of_stage = [sum(1 for s in plan.stages_of(stage.pp_rank) if s.index < stage.index) for stage in plan.stages]
    return text.append_text(timeline.draw(simulation, columns, chunk_of_stage))


def _traffic(plan: Plan, results: Facts) -> RenderableType:
    """Return every collective of the busiest rank, and the bytes that all ranks send."""
    if not results.traffic:
        return Text("none: one rank")
    drawn = table("axis", "operation", "purpose", ">calls", ">payload", ">rank sends", ">all send")
    sending = [row for row in results.traffic if row.operation != "recv"]
    rows = [row for row in sending if row.purpose != prediction.CONTROL]
    for row in rows:
        drawn.add_row(
            f"{row.axis} ({row.group_size})",
            row.operation,
            row.purpose if row.every == 1 else f"{row.purpose} (every {row.every} steps)",
            f"{row.calls:,}",
            bytes_text(row.payload_bytes) + (f" (<= {bytes_text(row.most_bytes)})" if row.most_bytes else ""),
            bytes_text(row.wire_bytes),
            bytes_text(row.total_wire_bytes),
        )
    mine, everyone = (
        bytes_text(round(sum(getattr(row, name) / row.every for row in rows)))
        for name in ("wire_bytes", "total_wire_bytes")
    )
    mean = "mean of a step" if any(row.every > 1 for row in rows) else "sum"
    drawn.add_row(mean, "", "", "", "", mine, everyone, style="bold")
    return Group(drawn, Text("\n".join(_traffic_notes(plan, results, sending)), "dim"))


def _traffic_notes(plan: Plan, results: Facts, sending: list[TrafficRow]) -> list[str]:
    if plan.role(results.busiest_rank) == "server":
        rank = "a server, in a step of every worker"
    else:
        coordinate = plan.mesh.coordinate(results.busiest_rank)
        rank = " ".join(f"{axis}={coordinate.get(axis, 0)}" for axis in ("pp", "dp", "tp"))
    notes = [
        f"calls, payload, rank sends: of the busiest rank, {results.busiest_rank} ({rank}), with bandwidth-optimal "
        "algorithms",
        "all send: the sum over all ranks",
    ]
    if any(row.most_bytes for row in sending):
        notes.append("<=: the bound, where the bytes depend on the data")
    control = [row for row in sending if row.purpose == prediction.CONTROL and row.calls]
    if control:
        calls = " and ".join(f"{row.calls} x {row.operation}" for row in control)
        notes.append(f"not listed: {sum(row.payload_bytes for row in control)} bytes of control per step ({calls})")
    return notes
