"""Conditions on a comparison, for CI: `val_loss>+1%`, `tokens_per_s<-5%`, `loss>4.2`, `loss_difference>0`.

A number with a sign is a change from the baseline, with % a relative one; without a sign it is the value itself.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import closest
from parallelrun.report.records.run_differences import RunComparison, relative

LOSS_DIFFERENCE = "loss_difference"  # the largest difference of the training losses over the common steps
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_FORM = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|>|<)\s*([+-]?)((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """One condition that must not hold. limit: with its sign; is_relative: a part of the baseline's value."""

    text: str
    measure: str
    operator: str
    limit: float
    is_change: bool
    is_relative: bool


def parse(text: str) -> Condition:
    """Return the condition of `--fail-on`. Raises ConfigError (exit 2)."""
    match = _FORM.fullmatch(text)
    if match is None:
        message = f"--fail-on {text!r}: not a condition; it is a result, >, <, >= or <=, and a number"
        raise ConfigError(Problem(message, "--fail-on", "'val_loss>+1%' or 'tokens_per_s<-5%' or 'loss>4.2'"))
    measure, sign, number, percent = match[1], match[3], float(match[4]), match[5]
    if percent and not sign:
        message = f"--fail-on {text!r}: a change in % needs a sign"
        raise ConfigError(Problem(message, "--fail-on", f"'{measure}{match[2]}+{match[4]}%'"))
    limit = -number if sign == "-" else number
    return Condition(text, measure, match[2], limit / 100 if percent else limit, bool(sign), bool(percent))


def failures(comparison: RunComparison, conditions: Sequence[Condition]) -> list[str]:
    """Return a text for every condition that holds, or cannot be checked, by column but the first.

    Raises ConfigError (exit 2) for a result that no run has.
    """
    keys = [row.key for row in comparison.measures]
    for condition in conditions:
        if condition.measure not in (*keys, LOSS_DIFFERENCE):
            near = closest(condition.measure, [*keys, LOSS_DIFFERENCE])[:3]
            raise ConfigError(
                Problem(f"--fail-on {condition.text!r}: no run has {condition.measure}", "--fail-on", ", ".join(near))
            )
    texts = [
        _failure(comparison, condition, index)
        for condition in conditions
        for index in range(1, len(comparison.columns))
    ]
    return [text for text in texts if text]


def _failure(comparison: RunComparison, condition: Condition, index: int) -> str:
    base, column = comparison.columns[0].label, comparison.columns[index].label
    if condition.measure == LOSS_DIFFERENCE:
        losses = comparison.losses[index - 1]
        if not losses.num_common:
            return f"{condition.text}: cannot be checked: {column} and {base} have no step with a loss in common"
        before, now = 0.0, abs(losses.largest)
    else:
        values = next(row.values for row in comparison.measures if row.key == condition.measure)
        first, second = values[0], values[index]
        lacking = column if second is None else base if first is None and condition.is_change else ""
        if second is None or lacking:
            return f"{condition.text}: cannot be checked: {lacking} has no {condition.measure}"
        before, now = first.mean if first else 0.0, second.mean
    change = relative(now, before) if condition.is_relative else now - before if condition.is_change else now
    if not _OPERATORS[condition.operator](change, condition.limit):
        return ""
    text = f"{condition.text}: {condition.measure} of {column} is {now:.6g}"
    return f"{text}, {relative(now, before):+.3%} from {base}'s {before:.6g}" if condition.is_change else text
