"""`parallelrun plan` on screen: what would happen, from the plan's facts. Torch-free; no process, no device."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parallelrun.config.schema import Config
from parallelrun.plan import cluster_cost, prediction
from parallelrun.plan.advice import warnings
from parallelrun.plan.document import axis_rows, document, link_rows, rank_row, server_rows, stage_rows
from parallelrun.plan.expert_axes import axis_views
from parallelrun.plan.facts import Facts, facts
from parallelrun.plan.hosts import ranks_per_node
from parallelrun.plan.structure import Plan
from parallelrun.report.data_axis import panel as data_axis_panel
from parallelrun.report.experts import panel as experts_panel
from parallelrun.report.figures import byte_unit, bytes_text, count_text, digits, flops_text, seconds_text
from parallelrun.report.layouts import panel as layouts_panel
from parallelrun.report.screen import WIDEST
from parallelrun.report.timeline import draw, shown_positions
from parallelrun.wording import counted, gib

__all__ = ["document", "show"]

MOST_RANK_ROWS = 200
MOST_STAGE_ROWS = 16
MOST_SERVER_ROWS = 16


def show(plan: Plan, config: Config, console: Console, found: Facts | None = None) -> None:
    """Print a plan: panels on a terminal, plain lines elsewhere. found: of `facts`, if already computed.

    `config.ranks=all` prints every rank, as lines where a table would be too long.
    """
    found = found or facts(plan, config)
    width = min(console.width, WIDEST)
    parts: list[tuple[str, RenderableType]] = [
        ("plan", _head(plan)),
        ("mesh", _mesh(plan)),
        ("ranks", _with_host_note(_ranks(plan, config), plan, config)),
        ("batch", _batch(plan)),
        ("stages and memory", _stages(plan, config, found)),
        *([("experts", experts_panel(plan))] if plan.spec.router else []),
        *([("servers", _servers(plan))] if plan.servers else []),
        ("schedule", _schedule(plan, found, width - 4)),
        ("collectives of a step", _traffic(plan, found)),
        ("cost of a step", _cost(plan, config, found).append(_training(found))),
    ]
    if found.data_axis:
        parts.append(("ways of the data axis", data_axis_panel(found.data_axis, width - 4)))
    if found.layouts:
        parts.append(("tensor layouts side by side", layouts_panel(found.layouts)))
    texts = warnings(plan, config, found)
    if texts:
        parts.append(("warnings", Text("\n".join(f"- {text}" for text in texts), "yellow")))
    for title, part in parts:
        if console.is_terminal:
            console.print(Panel(part, title=title, title_align="left", border_style="dim", width=width))
        else:
            console.print(Text(f"{title}:", "bold"), part, "", sep="\n")


def _table(*columns: str, **options: Any) -> Table:
    """A table without frames; columns named with a leading `>` are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, **options)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _head(plan: Plan) -> Text:
    text = Text()
    strategies = [f"data {plan.data.kind}", f"tensor {plan.tensor.kind}", f"pipeline {plan.pipeline.kind}"]
    if plan.data.detail:
        strategies[0] += f" ({plan.data.detail})"
    if plan.tensor.sequence_parallel:
        strategies[1] += " with sequence parallel"
    if plan.expert:
        strategies.append(f"expert {plan.expert.kind}")
    if plan.pipeline.virtual_stages > 1:
        strategies[2] += f" ({plan.pipeline.virtual_stages} stages per rank)"
    text.append(f"{plan.spec.name}", "bold")
    text.append(f", {plan.spec.num_parameters:,} parameters ({count_text(plan.spec.num_parameters)})")
    text.append(f"\nstrategy {plan.preset}: {', '.join(strategies)}")
    text.append(f"\n{plan.precision.name}, {plan.optimizer}, recompute {plan.recompute}, on {plan.device}")
    detail = f" ({plan.equivalence.detail})" if plan.equivalence.detail else ""
    text.append(f"\nequals one device: {plan.equivalence.kind}{detail}")
    for sentence in plan.filled:
        text.append(f"\n{sentence}", "cyan")
    return text


def _mesh(plan: Plan) -> Group:
    product = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.mesh_dims)
    views = axis_views(plan)
    table = _table("axis", ">degree", ">groups", "first group", *(["of"] if views else []))
    for row in axis_rows(plan):
        members = ranks_text(row["first_group"]) if row["degree"] > 1 else "no communicator"
        said = [views.get(row["axis"], "")] if views else []
        table.add_row(row["axis"], str(row["degree"]), f"{row['groups']:,}", members, *said)
    beside = f" + {counted(plan.servers, 'server')}" if plan.servers else ""
    return Group(Text(f"{counted(plan.world, 'rank')} = {product}{beside}, slowest axis first"), table)


def _ranks(plan: Plan, config: Config) -> Table | Group | Text:
    """All ranks; above 200 the first and the last host, or with ranks=all a plain line per rank."""
    per_node = ranks_per_node(config.cluster, plan.world)
    everyone = range(plan.world)
    if plan.world <= MOST_RANK_ROWS and (config.ranks == "all" or plan.world <= 32):
        return _rank_table(plan, config, [*everyone])
    if config.ranks == "all":
        rows = [rank_row(plan, rank, config.cluster) for rank in everyone]
        return Text("\n".join(" ".join(f"{key}={'-' if v is None else v}" for key, v in row.items()) for row in rows))
    shown = min(per_node, 8)
    first, last = [*everyone[:shown]], [*everyone[-shown:]]
    left = plan.world - len(first) - len(last)
    note = f"{left:,} ranks between are left out: ranks=all or --json prints every rank"
    return Group(_rank_table(plan, config, first), Text(note, "dim"), _rank_table(plan, config, last, header=False))


def _with_host_note(part: RenderableType, plan: Plan, config: Config) -> RenderableType:
    if config.cluster.gpus_per_node or config.cluster.nodes or plan.world == 1:
        return part
    return Group(part, Text(f"all on one host: cluster={config.cluster.name} gives no gpus_per_node", "dim"))


def _rank_table(plan: Plan, config: Config, ranks: list[int], header: bool = True) -> Table:
    rows = [rank_row(plan, rank, config.cluster) for rank in ranks]
    table = _table(show_header=header)
    for key in rows[0]:
        table.add_column(key, justify="left" if key == "role" else "right", min_width=len(str(plan.world)))
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    return table


def _batch(plan: Plan) -> Text:
    batch, dp = plan.batch, plan.mesh.size("dp")
    unit = f" of {plan.spec.seq:,} tokens" if plan.spec.kind == "tokens" and plan.spec.seq else ""
    if plan.spec.kind == "images":
        unit = f" of {' x '.join(map(str, plan.spec.sample_shape))}"
    return Text(
        f"{counted(batch.global_batch, 'sample')}{unit} = dp {dp} x {counted(batch.microbatches, 'microbatch', 'es')} "
        f"x {counted(batch.micro_batch, 'sample')}; {counted(batch.replica_batch, 'sample')} a data replica"
    )


def _stages(plan: Plan, config: Config, found: Facts) -> Group:
    """Per pp rank: its blocks, parameters and the bytes of its rank that holds most."""
    table = _table("pp", "blocks", ">params", ">weights", ">grads", ">optim.", ">activ.", ">temp.", ">total")
    stages = stage_rows(plan)
    heaviest = found.heaviest_pp_rank
    unit, size_of_unit = byte_unit(found.memories[heaviest].total)
    pp_ranks = sorted({*shown_positions(plan.mesh.size("pp")), heaviest})
    for pp_rank in pp_ranks:
        mine = [stage for stage in stages if stage["position"] == pp_rank]
        memory = found.memories[pp_rank]
        state = (memory.weights, memory.gradients, memory.optimizer)
        sizes = (*state, memory.activations, memory.temporary, memory.total)
        mark = pp_rank == heaviest and len(found.memories) > 1
        table.add_row(
            f"{pp_rank}{' *' if mark else ''}",
            "; ".join(_block_range(stage["blocks"]) for stage in mine),
            count_text(sum(stage["parameters"] for stage in mine)),
            *(digits(size / size_of_unit) for size in sizes),
            style="bold" if mark else None,
        )
    worst = found.memories[heaviest]
    fits = cluster_cost.fits(worst, config.cluster)
    verdict = Text.assemble("fits: ", (fits, {"yes": "bold green", "no": "bold red"}.get(fits, "bold yellow")))
    need = gib(worst.total) if config.cluster.memory_gb else bytes_text(worst.total)
    verdict.append(f" (the heaviest rank needs {need}; {cluster_cost.why_fits(worst, config.cluster)})")
    marks = "; * marks the heaviest" if len(found.memories) > 1 else ""
    notes = [f"weights to total: {unit} of the rank of each pp rank that holds most{marks}"]
    left_out = len(found.memories) - len(pp_ranks)
    if left_out:
        notes.append(f"{left_out} coordinates between are left out (--json has all)")
    notes.append(f"not counted: {', '.join(worst.leaves_out)}")
    return Group(table, verdict, Text("\n".join(notes), "dim"))


def _block_range(blocks: list[str]) -> str:
    """`embedding..layers.3 (5)`."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]} ({len(blocks)})"


def _servers(plan: Plan) -> Group:
    """What every server owns and holds, above 16 the fullest ones, and how even that is."""
    rows = server_rows(plan)
    shown = sorted(rows, key=lambda row: -row["weights"])[:MOST_SERVER_ROWS]
    table = _table(">server", ">rank", ">shards", ">weights", ">grads", ">optim.", ">total", ">of mean")
    for row in sorted(shown, key=lambda row: row["server"]):
        sizes = (bytes_text(row[key]) for key in ("weights", "gradients", "optimizer", "total"))
        table.add_row(str(row["server"]), str(row["rank"]), str(row["shards"]), *sizes, f"{row['of_mean']:.3f}")
    note = f"weights of the fullest over the mean: {max(row['of_mean'] for row in rows):.3f}"
    if len(rows) > len(shown):
        note += f"; {len(rows) - len(shown)} servers that own less are left out (--json has all)"
    return Group(table, Text(note, "dim"))


def _schedule(plan: Plan, found: Facts, width: int) -> Group | Text:
    if plan.mesh.size("pp") == 1:
        count = plan.batch.microbatches
        accumulated = (
            f"{count} microbatches accumulate gradients one after the other" if count > 1 else "one microbatch"
        )
        return Text(f"no pipeline: {accumulated}, no bubble")
    simulation = found.simulation
    text = Text.assemble(
        f"{plan.pipeline.kind}: bubble ",
        (f"{simulation.bubble_of_total:.1%}", "bold"),
        f" of the step's time, {simulation.bubble_of_ideal:.1%} of ideal time (all coordinates busy)",
    )
    if simulation.num_microbatches < plan.batch.microbatches:
        text.append(
            f"\ndrawn with {simulation.num_microbatches} of {plan.batch.microbatches} microbatches; the rest repeats"
        )
    text.append("\nby the stages' own FLOPs, so uneven stages idle too; messages take no time\n")
    chunk_of_stage = [sum(1 for s in plan.stages_of(stage.pp_rank) if s.index < stage.index) for stage in plan.stages]
    return Group(text, draw(simulation, width, chunk_of_stage))


def _traffic(plan: Plan, found: Facts) -> Table | Group | Text:
    if not found.traffic:
        return Text("none: one rank")
    table = _table("axis", "operation", "purpose", ">calls", ">payload", ">must send", ">all send")
    rows = [row for row in found.traffic if row.purpose != prediction.CONTROL and row.operation != "recv"]
    for row in rows:
        table.add_row(
            f"{row.axis} ({row.group_size})",
            row.operation,
            row.purpose if row.every == 1 else f"{row.purpose} (every {row.every} steps)",
            f"{row.calls:,}",
            bytes_text(row.payload_bytes) + (f" (<= {bytes_text(row.most_bytes)})" if row.most_bytes else ""),
            bytes_text(row.wire_bytes),
            bytes_text(row.total_wire_bytes),
        )
    total = (
        round(sum(row.wire_bytes / row.every for row in rows)),
        round(sum(row.total_wire_bytes / row.every for row in rows)),
    )
    mean = "mean of a step" if any(row.every > 1 for row in rows) else "sum"
    table.add_row(mean, "", "", "", "", bytes_text(total[0]), bytes_text(total[1]), style="bold")
    control = [
        row for row in found.traffic if row.purpose == prediction.CONTROL and row.operation != "recv" and row.calls
    ]
    if plan.role(found.busiest_rank) == "server":
        where = "a server, in a step of every worker"
    else:
        coordinate = plan.mesh.coordinate(found.busiest_rank)
        where = " ".join(f"{axis}={coordinate.get(axis, 0)}" for axis in ("pp", "dp", "tp"))
    sent = " and ".join(f"{'one' if row.calls == 1 else row.calls} {row.operation}" for row in control)
    note = (
        f"calls, payload and must send: the busiest rank, {found.busiest_rank} ({where}), under bandwidth-optimal "
        f"algorithms; all send: all ranks together; apart from that, {sent} of "
        f"{sum(row.payload_bytes for row in control)} bytes of control a step"
        + ("; <=: the most, where bytes depend on the data" if any(row.most_bytes for row in rows) else "")
    )
    return Group(table, Text(note, "dim"), *_links(plan))


def _links(plan: Plan) -> list[Text]:
    """Who sends gradients to whom, where the data strategy itself decides it."""
    rows = link_rows(plan)
    if not rows:
        return []
    busiest = max(rows, key=lambda row: row["bytes"])
    most = f"{bytes_text(busiest['bytes'])} over one (rank {busiest['from']} to {busiest['to']})"
    return [Text(f"{len(rows)} links of dp, at most {most}; --json lists them", "dim")]


def _cost(plan: Plan, config: Config, found: Facts) -> Text:
    cost = found.cost
    text = Text(f"{flops_text(cost.model_flops)} by the model (72-form: forward, and twice that backward)")
    if cost.hardware_flops > cost.model_flops:
        text.append(f", {flops_text(cost.hardware_flops)} with what recompute={plan.recompute} repeats")
    name = plan.precision.name
    if cost.compute_s is None:
        given = f"no peak rate of {name} (cluster.peak_tflops.{name})" if config.cluster.peak_tflops else "no rates"
        return text.append(f"\ntime: unknown, the cluster gives {given}; try cluster=a100_80gb")
    peak = f"{(cluster_cost.peak_flops(config.cluster, name) or 0) / 1e12:g} TFLOP/s"
    text.append(f"\ncompute {seconds_text(cost.compute_s)} at the peak rate of {name}, {peak}, bubble included")
    if cost.communication_s is None:
        return text.append("; communication: unknown, the cluster gives no link rates")
    high, low = cost.step_s or (0.0, 0.0)
    text.append(f"; communication {seconds_text(cost.communication_s)} of the busiest rank at the links' rates")
    return text.append(
        f"\na step takes {seconds_text(low)} (all of it overlapped) to {seconds_text(high)} (none), "
        f"{digits(plan.batch.global_batch / high)}..{digits(plan.batch.global_batch / low)} samples/s, or longer: no "
        "kernel reaches the peak rate"
    )


def _training(found: Facts) -> str:
    """Days for the tokens of the training, where they are given."""
    training = found.training
    if training is None:
        return ""
    text = f"\n{count_text(training.tokens)} tokens are {training.steps:,} steps: "
    if training.sustained is None:
        return text + "days unknown, the cluster gives no rates"
    if training.at_peak is not None:
        longest, shortest = (digits(days) for days in training.at_peak)
        text += f"{shortest} (all of it overlapped) to {longest} days (none) at the peak rate, "
    return text + (
        f"{digits(training.sustained)} days at {cluster_cost.SUSTAINED:.1%} of it, the median of SC21's trainings"
    )


def ranks_text(ranks: list[int]) -> str:
    """`0 8 16 .. 504`."""
    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "..", ranks[-1]]
    return " ".join(map(str, shown))
