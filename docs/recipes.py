"""Writes the table of recipes from what each says about itself: `python docs/recipes.py`. A test holds it current."""

from __future__ import annotations

from pathlib import Path

from parallelrun.cli.tools.gallery import cells, rows

PAGE = Path(__file__).resolve().parent / "recipes.md"
START, END = "<!-- recipes: python docs/recipes.py -->", "<!-- end -->"


def table() -> str:
    """Return the table in Markdown."""
    header = ("recipe", "what for", "devices")
    lines = [header, ("---",) * len(header)]
    for row in rows():
        about = row["about"]
        if row["source"] == "built-in":
            link = f"[`{row['name']}`](../recipes/{row['name']}.yaml)"
            lines.append((link, about["purpose"], cells(about)[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str) -> str:
    """Return the page with the table between its markers replaced."""
    before, _, rest = text.partition(START)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has no {START} ... {END}"
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {PAGE}")
