"""`parallelrun plan` on screen: a summary of at most 40 lines, then the sections that `detail` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallelrun.base.wording import DETAILS, counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.stack_schema import OWN
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.facts.advice import warnings
from parallelrun.planner.facts.document import backends, context, experts, mixture, server_rows
from parallelrun.planner.facts.plan_facts import Facts, facts
from parallelrun.planner.model.definitions import Packing, PartUse
from parallelrun.planner.pieces.hosts import ranks_per_node
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.traffic import TrafficRow
from parallelrun.report.figures import byte_unit, bytes_text, count_text, degrees_text, digits
from parallelrun.report.plans.plan_cost import corruption_text, cost_text, time_text
from parallelrun.report.screen import framed, labelled, show_section, table, under_one_label

MOST_LINES = 40  # of the summary
BACKENDS = {"nccl": "nccl", "shm": "shared memory", "gloo": "gloo"}
FITS_STYLE = {"yes": "bold green", "no": "bold red"}
HINT = f"More: detail={'|'.join(DETAILS)}|all (several with commas); explain=true; --json prints every fact."
Row = tuple[str, RenderableType]  # label and value


def show(plan: Plan, config: Config, console: Console, results: Facts | None = None, more: Sequence[Row] = ()) -> None:
    """Print a plan: panels on a terminal, plain lines elsewhere. more: rows after those about time."""
    results = results or facts(plan, config)
    title = f"plan: {plan.spec.name} · {plan.preset} · {degrees_text(plan.degrees)} · as {plan.stack.name} runs it"
    show_section(title, summary(plan, config, results, console, more), console)
    if not config.detail:
        return
    from parallelrun.report.plans import plan_details

    for name in config.detail.split(","):
        for section in DETAILS if name == "all" else (name,):
            plan_details.show(section, plan, config, results, console)


def summary(plan: Plan, config: Config, results: Facts, console: Console, more: Sequence[Row] = ()) -> Group:
    """Return the summary, with fewer warnings, filled-in values and axes where more than MOST_LINES lines result."""
    texts = warnings(plan, config, results)  # once: it plans what it advises, which takes a second at 3,072 ranks
    for most in (12, 6, 4, 3, 2, 1):
        rows = [*_rows(plan, config, results, texts, most), *more, ("", "")]
        drawn = Group(labelled(rows), Text(HINT, "dim"))
        measured = framed("", drawn, console) if console.is_terminal else drawn
        lines = len(console.render_lines(measured, pad=False))
        if lines + (0 if console.is_terminal else 2) <= MOST_LINES:  # two: the title and the blank line at the end
            break
    return drawn


def _rows(plan: Plan, config: Config, results: Facts, texts: list[str], most: int) -> list[Row]:
    """texts: the warnings. most: how many warnings, filled-in values and axes of traffic are shown."""
    rows: list[Row] = [*under_one_label("warning", texts[:most], "yellow")]
    if len(texts) > most:
        rows.append(("", Text(f"and {counted(len(texts) - most, 'more warning')}: see --json", "yellow")))
    return [
        *rows,
        *([("program", Text(_program(plan)))] if plan.stack.name != OWN else []),
        ("model", Text(_model(plan))),
        ("strategy", Text(_strategy(plan))),
        ("mesh", Text(_mesh(plan, config))),
        ("batch", Text(_batch(plan))),
        *([("packing", Text(_packing(plan, results.packing)))] if plan.spec.packed else []),
        *([("data", _mixture(parts, plan, most))] if (parts := mixture(plan, config)) else []),
        *([("backend", Text(_backend(plan, config)))] if plan.world > 1 and most > 1 else []),
        *([("filled in", Text(_filled(plan, most), "cyan"))] if plan.filled else []),
        *([("experts", Text(_experts(plan)))] if plan.spec.router else []),
        *([("context", Text(_context(plan, results.packing)))] if plan.context else []),
        ("", ""),
        *_memory(results, config),
        *([("", _copies(copied))] if (copied := prediction.copied_bytes(config, plan)) else []),
        *([("servers", Text(_servers(plan)))] if plan.servers else []),
        ("", ""),
        ("schedule", Text(_schedule(plan, results))),
        ("traffic", _traffic(results, most)),
        ("", ""),
        ("cost", Text(cost_text(plan, config, results))),
        *([("time", Text(time_text(plan, config, results)))] if results.cost.compute_s else []),
        *([("sdc", Text(looking))] if (looking := corruption_text(plan, config)) else []),
        *(_training(results, most) if results.training or results.goodput else []),
    ]


def _training(results: Facts, most: int) -> list[Row]:
    from parallelrun.report.plans import training

    rows: list[Row] = [("training", Text(training.text(results)))] if results.training else []
    if results.goodput:
        text = training.goodput_text(results.goodput, training.training_s(results), most == 1)
        rows.append(("goodput", Text(text)))
    return rows


def _program(plan: Plan) -> str:
    return f"{plan.stack.name} ({plan.stack.description}), which is only predicted; runs need stack={OWN}"


def _model(plan: Plan) -> str:
    return f"{plan.spec.name}: {count_text(plan.spec.num_parameters)} parameters ({plan.spec.num_parameters:,})"


def _strategy(plan: Plan) -> str:
    data = plan.data.kind + (f" ({plan.data.detail})" if plan.data.detail else "")
    tensor = plan.tensor.kind + (" with sequence parallelism" if plan.tensor.sequence_parallel else "")
    pipeline = plan.pipeline.kind + (
        f" ({plan.pipeline.virtual_stages} stages per rank)" if plan.pipeline.virtual_stages > 1 else ""
    )
    text = f"{plan.preset}: data {data}, tensor {tensor}, pipeline {pipeline}"
    if plan.expert:
        text += f", expert {plan.expert.kind}"
    if plan.context:
        text += f", context {plan.context.kind}"
    detail = f" ({plan.equivalence.detail})" if plan.equivalence.detail else ""
    others = f" products, else {plan.precision.others}" if plan.precision.others else ""
    text += f"\n{plan.precision.name}{others}, {plan.optimizer}, recompute {plan.recompute}, on {plan.device}; "
    return f"{text}against one device: {plan.equivalence.kind}{detail}"


def _mesh(plan: Plan, config: Config) -> str:
    product = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.mesh_dims)
    servers = f" + {counted(plan.servers, 'server')}" if plan.servers else ""
    per_host = ranks_per_node(config.cluster, plan.world)
    hosts = f"{counted(-(-plan.world // per_host), 'host')}, slowest axis first"
    return f"{counted(plan.world, 'rank')} = {product}{servers} on {hosts}"


def _batch(plan: Plan) -> str:
    batch = plan.batch
    shape = f" of {' x '.join(map(str, plan.spec.sample_shape))}" if plan.spec.kind == "images" else ""
    unit = f" of {plan.spec.seq:,} tokens" if plan.spec.kind == "tokens" and plan.spec.seq else shape
    return (
        f"{counted(batch.global_batch, 'sample')}{unit} = dp {plan.mesh.size('dp')} "
        f"x {counted(batch.microbatches, 'microbatch', 'es')} x {counted(batch.micro_batch, 'sample')}"
    )


def _packing(plan: Plan, packing: Packing | None) -> str:
    if packing is None:
        return "not tokenized yet: attention is counted over whole samples, which is an upper bound"
    seq = plan.spec.seq
    cut = f"{counted(packing.cut, 'document')} longer than a sample are cut; " if packing.cut else ""
    return (
        f"{packing.documents:.1f} documents and {1 - packing.tokens / seq:.1%} padding per sample; {cut}"
        f"attention has {packing.squares / seq**2:.1%} of the work of whole samples"
    )


def _mixture(parts: Sequence[PartUse], plan: Plan, most: int) -> Table:
    """Return a row per part of a mixture: its share of a batch, its size, and how often the run reads it."""
    drawn = table("part", ">share", ">tokens" if plan.spec.kind == "tokens" else ">samples", ">read", ">epochs",
                  rule=False, padding=(0, 2, 0, 0))  # fmt: skip
    each = plan.spec.targets_per_sample
    for part in parts[:most]:
        size = "unknown" if part.num_samples is None else f"{part.num_samples * each:,}"
        epochs = "not tokenized yet" if part.epochs is None else f"{part.epochs:.2f}"
        drawn.add_row(part.label, f"{part.share:.1%}", size, f"{part.used * each:,}", epochs)
    if len(parts) > most:
        drawn.add_row(f"and {len(parts) - most} more: see --json")
    return drawn


def _backend(plan: Plan, config: Config) -> str:
    """Return what carries the collectives, by axis where the axes differ."""
    by_backend: dict[str, list[str]] = {}
    for axis, backend in backends(plan, config).items():
        by_backend.setdefault(backend, []).append(axis)
    if len(by_backend) == 1:
        return BACKENDS[next(iter(by_backend))]
    return "; ".join(f"{', '.join(axes)}: {BACKENDS[backend]}" for backend, axes in by_backend.items())


def _filled(plan: Plan, most: int) -> str:
    more = [f"{len(plan.filled) - most} more in --json"] if len(plan.filled) > most else []
    texts = [text.replace("(filled: ", "(") for text in plan.filled[:most]]
    return ("; " if most == 1 else "\n").join([*texts, *more])


def _context(plan: Plan, packing: Packing | None) -> str:
    """The positions of a rank, and the imbalance of each order."""
    assert plan.context is not None
    cp, order, ordering = plan.mesh.size("cp"), plan.context.order, context(plan, packing)
    assert ordering is not None
    text = f"{plan.spec.seq:,} positions = cp {cp} x {plan.seq:,}"
    if len(ordering["imbalance"]) < 2:
        return f"{text}; attention is balanced"
    others = [f"{name} {each:.3g}" for name, each in ordering["imbalance"].items() if name != order]
    text += f", {order}: the slowest rank's attention is {ordering['imbalance'][order]:.3g} times the mean"
    return f"{text} ({', '.join(others)})"


def _experts(plan: Plan) -> str:
    described, router, ep = experts(plan), plan.spec.router, plan.mesh.size("ep")
    assert described is not None and router is not None
    layers = described["layers"]
    shown = layers if len(layers) <= 4 else [*layers[:3], "..", layers[-1]]
    number = f"{len(layers)} of {plan.spec.num_layers or len(layers)} layers"
    text = f"{counted(described['experts'], 'expert')} in {', '.join(shown)} ({number}); {router.choice}"
    text += f"\nrouting group: {counted(router.group_samples, 'sample')} ({described['group_tokens']:,} tokens); "
    if described["capacity"] is None:
        text += "no limit on the tokens of an expert"
    else:
        limit, in_evaluation = f"{described['capacity']:,}", f"{described['eval_capacity']:,}"
        text += f"an expert takes at most {limit} of them, {in_evaluation} in evaluation"
    if plan.expert is None:
        return f"{text}\nevery rank holds all experts"
    levels = f" in two levels ({plan.expert.group_size} ranks per inner group)" if plan.expert.group_size > 1 else ""
    chunks = f", in {plan.expert.chunks} consecutive parts" if plan.expert.chunks > 1 else ""
    own = counted(described["held"], "expert")
    over = " over dp x tp" if plan.ep_spans_tp else ""
    return f"{text}\nep {ep}{over}: each rank holds {own} of every layer; dispatch: {plan.expert.kind}{levels}{chunks}"


def _memory(results: Facts, config: Config) -> list[Row]:
    worst = results.memories[results.heaviest_pp_rank]
    fits, why = cluster_cost.fits(worst, config.cluster), cluster_cost.why_fits(worst, config.cluster)
    rank = f" (pp={results.heaviest_pp_rank})" if len(results.memories) > 1 else ""
    verdict = Text.assemble("fits: ", (fits, FITS_STYLE.get(fits, "bold yellow")))
    verdict.append(f"; the heaviest rank{rank} needs {bytes_text(worst.total)}, {why}")
    verdict.append(f"; {bytes_text(worst.host)} of host memory for what is offloaded" if worst.host else "")
    unit, size = byte_unit(worst.total)
    parts = " + ".join(f"{kind} {digits(num_bytes / size)}" for kind, num_bytes in worst.parts.items())
    return [("memory", verdict), ("", Text(f"= {parts} {unit}"))]


def _copies(num_bytes: int) -> str:
    return f"besides {bytes_text(num_bytes)} of host memory, over all ranks, for copies of checkpoints"


def _servers(plan: Plan) -> str:
    rows = server_rows(plan)
    most = max(rows, key=lambda row: row["total"])
    return (
        f"{counted(plan.servers, 'server')}; the largest holds {bytes_text(most['total'])}; "
        f"it owns {most['of_mean']:.3f} times the mean of the weights"
    )


def _schedule(plan: Plan, results: Facts) -> str:
    if plan.mesh.size("pp") == 1:
        count = plan.batch.microbatches
        return "no pipeline, no bubble" + (f"; {count} microbatches accumulate gradients" if count > 1 else "")
    simulation = results.simulation
    return (
        f"{plan.pipeline.kind}: the bubble is {simulation.bubble_of_total:.1%} of the step's time "
        f"({simulation.bubble_of_ideal:.1%} of the ideal time)"
    )


def _traffic(results: Facts, most: int) -> Table | Text:
    """Return a row per axis: the purposes of its traffic, and the mean bytes of a step."""
    by_axis: dict[tuple[str, int], list[TrafficRow]] = {}
    for row in results.traffic:
        if row.purpose != prediction.CONTROL and row.operation != "recv":
            by_axis.setdefault((row.axis, row.group_size), []).append(row)
    if not by_axis:
        return Text("none: one rank")
    rows = [
        (
            f"{axis} ({size})",
            ", ".join(dict.fromkeys(row.purpose for row in alike)),
            sum(row.wire_bytes / row.every for row in alike),
            sum(row.total_wire_bytes / row.every for row in alike),
        )
        for (axis, size), alike in by_axis.items()
    ]
    if len(rows) > most:
        rows.sort(key=lambda row: -row[3])
        rest = rows[most:]
        others = (f"{len(rest)} other axes", "", sum(row[2] for row in rest), sum(row[3] for row in rest))
        rows = [*rows[:most], others]
    titles = ("axis", "sent per step", f">rank {results.busiest_rank} (busiest)", ">all ranks")
    drawn = table(*titles, rule=False, padding=(0, 2, 0, 0))
    for axis, purposes, mine, everyone in rows:
        drawn.add_row(axis, purposes, bytes_text(round(mine)), bytes_text(round(everyone)))
    if len(rows) > 1:
        mine, everyone = sum(row[2] for row in rows), sum(row[3] for row in rows)
        drawn.add_row("sum", "", bytes_text(round(mine)), bytes_text(round(everyone)), style="bold")
    return drawn
