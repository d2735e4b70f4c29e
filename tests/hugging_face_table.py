"""The table of docs/own_module.md: which families of transformers train exactly under which plans, made by training.

python -m tests.hugging_face_table          # all cells, two minutes on two cores; writes the table
python -m tests.hugging_face_table llama t5 # these families, only shown
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError
from tests.hugging_face_families import FAMILIES, overrides
from tests.parity import parity

PAGE = Path(__file__).parents[1] / "docs" / "own_module.md"
BEGIN, END = "<!-- families: python -m tests.hugging_face_table -->\n```\n", "```\n"
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "strategy.data.kind": "ddp"},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "zero1": {"dp": 2, "strategy.data.kind": "zero1"},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "ep": {"dp": 2, "ep": 2},
}
REFUSED = "-"


def cell(family: str, plan: str) -> str:
    """The worst error of loss, gradients, norms and updates, or why there is none."""
    try:
        verdict = parity({**overrides(family), **PLANS[plan]}, timeout=120)
    except ConfigError:
        return REFUSED
    exact = verdict["passed"] and not verdict["surprises"]
    return f"{max(verdict['max_error'].values()):.0e}" if exact else "WRONG"


def row(family: str) -> str:
    """One line of the table."""
    return f"{family:<12}" + "".join(f"{cell(family, plan):>8}" for plan in PLANS)


def table_in(page: str) -> str:
    """The table that a page has."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> int:
    lines = [" " * 12 + "".join(f"{plan:>8}" for plan in PLANS)]
    print(lines[0])
    for family in sys.argv[1:] or FAMILIES:
        lines.append(row(family))
        print(lines[-1], flush=True)
    if not sys.argv[1:]:
        before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        assert mark, f"{PAGE} has no mark for the table"
        after = rest[rest.index(END) :]
        PAGE.write_text("".join((before, mark, *(f"{line}\n" for line in lines), after)), encoding="utf-8")
    return int(any("WRONG" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
