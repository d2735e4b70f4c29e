"""The violations that need no plan: each value by itself, and a few combinations of keys."""

from __future__ import annotations

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.pieces import batch
from parallelrun.planner.resolve import filling, rules, shorthands


def violations(config: Config, user_keys: frozenset[str]) -> list[Problem]:
    """Return them, the numbers that are too large to plan with first. config: with the keys of all strategies."""
    problems = rules.too_large(config)
    folded, found = shorthands.fold(config, user_keys)
    problems += found + rules.check(folded)
    filling.read(config, problems)
    return list(dict.fromkeys(problems + batch.check(config)))
