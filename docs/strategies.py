"""Writes README's table of strategies from the strategies' own docstrings: `python docs/strategies.py`.

A strategy is described by the docstring of its package, `strategies/<axis>/<kind>/__init__.py`. The first line is
`Name: one sentence.`; the fields `Paper:`, `Costs:` and `Proof:` follow, and `Read` names the file to read first. Where
several strategies share a package, each class names its own paper. A test holds README's table equal to this one.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base import registry
from parallelrun.config import presets
from parallelrun.planner.contract import classes

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
START, END = "<!-- strategies: python docs/strategies.py -->", "<!-- end -->"
CITATION = re.compile(r"(?:van de )?[A-Z][\w-]+(?: et al\.| and [A-Z]\w+(?: [A-Z]\w+)*)? \d{4}(?:, \d{4})*")
CLASSES = {
    "data": classes.data_strategy,
    "tensor": classes.tensor_strategy,
    "pipeline": classes.pipeline_schedule,
    "expert": classes.expert_dispatcher,
    "context": classes.context_strategy,
}

SHORT = {"pipeline": "schedule", "context": "strategy.context.kind"}  # the key that names a kind


@dataclass(frozen=True)
class Row:
    """One strategy. presets: the values of `strategy=` that choose it."""

    axis: str
    kind: str
    presets: tuple[str, ...]
    papers: tuple[str, ...]
    file: Path
    proof: str

    def cells(self) -> tuple[str, ...]:
        """Return the row's cells in Markdown."""
        path = self.file.relative_to(ROOT)
        chosen = " ".join(f"`{name}`" for name in self.presets) or f"(`{SHORT.get(self.axis, self.axis)}={self.kind}`)"
        read = f"[{path.relative_to('strategies')}]({path})"
        return self.axis, chosen, "; ".join(self.papers) or "-", read, self.proof


def rows() -> list[Row]:
    """Return every built-in strategy that does something."""
    found = [_row(name.partition(".")[0], name.partition(".")[2], path) for name, path in registry.STRATEGIES.items()]
    return [row for row in found if row.kind != "none"]


def _row(axis: str, kind: str, path: str) -> Row:
    folder = ROOT / path.removeprefix("parallelrun.").replace(".", "/")
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    is_ours = list(registry.STRATEGIES.values()).count(path) > 1
    paper = _paper_of_class(CLASSES[axis](kind)) if is_ours else _field(text, "Paper")
    read = re.search(r"^Read `([\w/]+\.py)`", text, re.M)
    proof = re.split(r"\. |\.$| \(", _field(text, "Proof"), maxsplit=1)[0]
    papers = tuple(dict.fromkeys(CITATION.findall(paper)))
    return Row(axis, kind, _presets(axis, kind), papers, folder / (read.group(1) if read else "plan.py"), proof)


def _field(text: str, name: str) -> str:
    """Return a field of a docstring on one line: until the next field or an empty line."""
    found = re.search(rf"^{name}: (.*?)(?=\n\n|\n[A-Z]\w+: |\nRead `|\Z)", text, re.M | re.S)
    assert found, f"no line `{name}: ...` in the docstring that begins with {text[:60]!r}"
    return " ".join(found.group(1).split())


def _paper_of_class(strategy: Any) -> str:
    text: str = getattr(strategy, "source", None) or strategy.explained[1]
    return text


def _presets(axis: str, kind: str) -> tuple[str, ...]:
    """Return the presets of this axis alone that choose the kind. Those with experts choose an expert dispatcher."""
    names = []
    for name in presets.options("strategy"):
        values = presets.values("strategy", name)
        chosen = {other: values[other].get("kind", "capacity") for other in CLASSES if other in values}
        if "expert" in chosen:
            del chosen["data"]
        names += [name] if chosen == {axis: kind} else []
    return tuple(names)


def table() -> str:
    """Return the table in Markdown."""
    header = ("axis", "`strategy=`", "paper", "file to read", "proof")
    lines = [header, ("---",) * len(header), *(row.cells() for row in rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str) -> str:
    """Return README's text with the table between its markers replaced."""
    before, _, rest = text.partition(START)
    _, end, after = rest.partition(END)
    assert end, f"README.md has no {START} ... {END}"
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(page(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {README}")
