"""`ls cells`: the matrix of compositions, and the rules that refuse some of them."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from parallelrun.cli.argv import read
from parallelrun.cli.json_output import print_json
from parallelrun.config import compose
from parallelrun.planner.search.cells import KINDS, MODELS, MOST, WORKERS, matrix
from parallelrun.report.screen import labelled, open_console, print_command, table

READ_AS = (
    f"A cell is a model with degrees of at most {WORKERS} workers and a setting of each axis (data strategy, layout, "
    f"schedule, context, experts), of which at most {MOST} differ from the defaults. It is resolved as a run is. A "
    "rule's number is that of all cells that it refuses; a cell of several rules is counted under the leftmost kind."
)


def main(as_json: bool) -> None:
    """Print the matrix."""
    with open_console(stderr=True).status("resolving about 30,000 compositions"):
        result = resolved()
    print_json(result) if as_json else _draw(result)


def resolved(step: int = 1) -> dict[str, Any]:
    """The matrix, or every `step`th of its cells."""
    bases = {}
    for name, words in MODELS.items():
        line = read(words.split())
        composed, _ = compose.compose_once(compose.prepare(line.overrides, (), "plan", line.trust))
        bases[name] = composed.config, composed.given
    return matrix(bases, step)


def _draw(result: dict[str, Any]) -> None:
    """Print the counts by model, and every rule with its number of cells and the command of one."""
    console, drawn = open_console(), table("model", *(f">{kind}" for kind in KINDS), ">cells")
    for name, counts in result["models"].items():
        drawn.add_row(name, *(f"{count:,}" for count in (*counts.values(), sum(counts.values()))))
    console.print(drawn, Text(READ_AS, "dim"), sep="\n")
    kind = ""
    for rule in result["rules"]:
        if rule["kind"] != kind:
            kind = rule["kind"]
            console.print(Text(f"\n{kind}:", "bold"))
        console.print(labelled([(f"{rule['cells']:>9,}", Text(rule["rule"]))]))
        print_command(f"parallelrun plan {rule['example']}", console)
