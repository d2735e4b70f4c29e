"""The violations that need no plan: each value by itself, and a few combinations of keys."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.plan import batch, filling, rules, shorthands


def violations(config: Config, given: frozenset[str]) -> list[Problem]:
    """Return them, the numbers that are too large to plan with first. config: with the keys of all strategies."""
    problems = rules.too_large(config)
    folded, found = shorthands.fold(config, given)
    problems += found + rules.check(folded)
    filling.read(config, problems)
    return list(dict.fromkeys(problems + batch.check(config)))
