"""What `plan` does once, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

from parallelrun.planner.facts import advice
from parallelrun.planner.facts import plan_facts as facts
from parallelrun.planner.resolve import resolve_config
from tests.plans import tiny_config, tiny_plan

WORDS = ["plan", "model=gpt3_175b", "strategy=ptdp", "tp=8", "pp=64", "dp=6", "cluster=a100_80gb"]
UNREAD = ("planner.search.fastest_plans", "planner.search.legal", "planner.search.no_plan")
IMPORTS = f"""
import sys
from parallelrun.cli.main import main
code = main({WORDS!r})
print(code, [name for name in {UNREAD!r} if f"parallelrun.{{name}}" in sys.modules])
"""


def test_the_plans_that_are_tried_for_advice_have_the_spec_of_the_plan(monkeypatch):
    keys = {"pp": 4, "microbatches": 4, "model.layers": 8, "global_batch": 8}
    plan, config = tiny_plan(keys), tiny_config(keys)
    found = facts.facts(plan, config)
    expected = advice.warnings(plan, config, found)
    made: list[object] = []
    monkeypatch.setattr(resolve_config, "spec_of", lambda *arguments: made.append(arguments))
    assert advice.warnings(plan, config, found) == expected and not made
    assert any("with the same batch" in text for text in expected)


def test_a_plan_that_is_not_compared_with_others_imports_no_search():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout[-300:] + done.stderr
