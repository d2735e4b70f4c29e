"""The table of `parallelrun verify`, from verify.json's document."""

from __future__ import annotations

from typing import Any

from parallelrun.base.wording import counted
from parallelrun.report.figures import degrees_text
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


def show(document: dict[str, Any]) -> None:
    """Print the comparison."""
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
