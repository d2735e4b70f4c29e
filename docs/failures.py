"""Puts the newest results of `python -m benchmarks.faults` on the page: `PYTHONPATH=. python docs/failures.py`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fault_report import show

HERE = Path(__file__).resolve().parent
PAGE = HERE / "measured.md"
START, END = "<!-- faults: PYTHONPATH=. python docs/failures.py -->", "<!-- end -->"


def page(text: str) -> str:
    """Return the page with the tables between its markers replaced."""
    newest = max((HERE.parent / "benchmarks" / "results").glob("*-faults.json"))
    tables = show(json.loads(newest.read_text())).partition("\n\n| strategy")[0]  # the results have more
    before, _, rest = text.partition(START)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has no {START} ... {END}"
    return f"{before}{START}\n{tables}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {PAGE}")
