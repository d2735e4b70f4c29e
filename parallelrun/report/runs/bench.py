"""The tables of `parallelrun bench` and `verify`, from the documents bench.json and verify.json."""

from __future__ import annotations

from typing import Any

from parallelrun.base.wording import counted
from parallelrun.report.figures import degrees_text, seconds_text
from parallelrun.report.screen import open_console, table

MEANING = {
    "initial": "initial weights",
    "loss": "losses",
    "grads": "every gradient",
    "grad_norm": "gradient norms",
    "params": "weight updates",
    "val_loss": "validation loss",
    "router_scores": "router scores",
}
PARTS = {
    "compute_s": "computing", "comm_exposed_s": "waiting to communicate", "bubble_s": "bubble",
}  # fmt: skip


def show_bench(document: dict[str, Any]) -> None:
    """Print median and spread of `bench`."""
    console = open_console()
    degrees = degrees_text(document["degrees"])
    title = f"bench: {document['model']} {document['preset']} {degrees} ({document['precision']})"
    drawn = table("step time", ">", "rate", ">", title=title, padding=(0, 2, 0, 0))
    ms = {name: document[f"{name}_s"] * 1e3 for name in ("median", "lower_quartile", "upper_quartile", "min", "p95")}
    drawn.add_row("median", f"{ms['median']:.1f} ms", "tokens/s", f"{document['tokens_per_s']:,.0f}")
    quartiles = f"{ms['lower_quartile']:.1f} - {ms['upper_quartile']:.1f} ms"
    drawn.add_row("quartiles", quartiles, "samples/s", f"{document['samples_per_s']:,.1f}")
    flops = f"{document['model_flops_per_s'] / 1e9:,.1f}"
    drawn.add_row("fastest", f"{ms['min']:.1f} ms", "model GFLOP/s", flops)
    payload = f"{document['payload_bytes_rank_0'] / 2**20:,.2f} MiB"
    drawn.add_row("95th percentile", f"{ms['p95']:.1f} ms", "payload of rank 0 per step", payload)
    console.print(drawn)
    console.print(f"{counted(document['steps'], 'step')} after {document['warmup']} of warm-up, {document['device']}")
    if document["predicted"]:
        console.print(f"predicted: {predicted_text(document['predicted'], document['median_s'])}", soft_wrap=True)
    if document["device"] == "cpu" and document["world"] > document["cores"]:
        crowd = f"{counted(document['world'], 'rank')} on {counted(document['cores'], 'core')}"
        console.print(f"step time is no scaling measurement: {crowd}")


def show_verify(document: dict[str, Any]) -> None:
    """Print the comparison of `verify`."""
    console = open_console()
    degrees = degrees_text(document["degrees"])
    title = f"{document['preset']} {degrees} against {document['against']} ({document['precision']})"
    drawn = table("compared", ">largest error", ">bound", "where", "", title=title, padding=(0, 2, 0, 0))
    for kind, error in document["max_error"].items():
        good = error is not None and error <= document["tolerance"]
        shown = "not finite" if error is None else f"{error:.1e}"
        mark = "[green]equal[/]" if good else "[yellow]differs[/]" if document["reports_only"] else "[red]DIFFERS[/]"
        drawn.add_row(MEANING[kind], shown, f"{document['tolerance']:.0e}", document["worst"][kind], mark)
    console.print(drawn)
    for name in document["copies_that_disagree"]:
        console.print(f"[red]copies of {name} differ between ranks[/]")
    if document["routing_held"]:
        console.print(
            "Both trainings use the plan's routing decisions, because rounding may reorder nearly equal scores. The "
            "scores themselves are compared."
        )
    count, steps = counted(document["parameters_compared"], "parameter"), counted(document["steps"], "step")
    verdict = "[green]verified[/]" if document["passed"] else "[red]NOT EQUAL[/]"
    if document["reports_only"]:
        verdict = "reported (verify.optimizer=same is not checked)"
    detail = f" ({document['equivalence_detail']})" if document["equivalence_detail"] else ""
    console.print(f"{verdict}: {document['equivalence']}{detail}, {count}, {steps}")


def predicted_text(predicted: dict[str, Any], measured_s: float | None) -> str:
    """Return the predicted step of summary.json or bench.json, its parts where they compare, and how far it is off."""
    low, high = (seconds_text(predicted[name]) for name in ("p10_s", "p90_s"))
    sentence = f"{seconds_text(predicted['step_s'])} a step ({low} to {high})"
    if measured_s:
        off = measured_s / predicted["step_s"] - 1
        sentence += f": measured is {abs(off):.0%} {'longer' if off > 0 else 'shorter'}"
    if predicted["compares_parts"]:
        parts = [f"{name} {seconds_text(predicted[key])}" for key, name in PARTS.items() if predicted[key]]
        sentence += f"\n{', '.join(parts)}"
    return sentence
