"""`about:` of a recipe: what it is for, what it needs and what to expect. The run ignores it.

The expected results are those of the run's summary.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

from parallelrun.config.keys import Key, leaves
from parallelrun.config.schema.field import COUNT, key

KEY = "about"
BASES = ("measured", "published", "predicted")


@dataclass
class Expected:
    """Results of the run's summary.json, each as [least, most]. A recipe that trains names at least one."""

    loss: list[float] | None = key(None, "loss of the last step")
    val_loss: list[float] | None = key(None, "loss of the last evaluation")
    tokens_per_s: list[float] | None = key(None, "tokens a second, over all devices")


@dataclass
class About:
    """A recipe's description of itself: purpose, devices, duration, expected results and their source."""

    purpose: str | None = key(None, "what the recipe is for, in one line")
    devices: int | None = key(None, "number of devices, one for each rank", least=1, most=COUNT)
    device: str | None = key(None, "what one of them is, such as H100 80 GB, or laptop")
    minutes: list[float] | None = key(None, "time of the run on these devices, as [least, most]")
    expected: Expected = field(default_factory=Expected)
    basis: str | None = key(None, "where the expected results come from", choices=BASES)
    source: str | None = key(None, "paper, page or command behind the plan and the expected results")

    def results(self) -> dict[str, list[float]]:
        """The expected results that are given, by their names in summary.json."""
        return {name: pair for name, pair in asdict(self.expected).items() if pair is not None}

    def missing(self, trains: bool) -> list[str]:
        """The keys that a recipe of the gallery needs, and this one does not have. trains: the run has a loss."""
        names = [f"{KEY}.{item.name}" for item in fields(self) if getattr(self, item.name) is None]
        return names + ([] if self.results() or not trains else [f"{KEY}.expected"])


@lru_cache(maxsize=1)
def known() -> dict[str, Key]:
    """The keys of `about`, by dotted name."""
    return {item.name: item for item in leaves(About, f"{KEY}.")}


def sections() -> tuple[str, ...]:
    """The dotted names that hold keys of `about`."""
    return KEY, f"{KEY}.expected"


def build(values: Mapping[str, Any]) -> About:
    """The values of `about:` whose structure `recipe_check` has checked. Numbers written as 1e6 are numbers."""
    expected = {name: _pair(pair) for name, pair in (values.get("expected") or {}).items()}
    rest = {name: value for name, value in values.items() if name != "expected"}
    if "minutes" in rest:
        rest["minutes"] = _pair(rest["minutes"])
    return About(**rest, expected=Expected(**expected))


def problems(described: About) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with its value) for every value that is not what its key says."""
    pairs = {f"{KEY}.minutes": described.minutes, **{f"{KEY}.expected.{k}": v for k, v in described.results().items()}}
    for name, pair in pairs.items():
        if pair is not None and not (len(pair) == 2 and all(map(_is_amount, pair)) and pair[0] <= pair[1]):
            yield name, "two numbers [least, most], the smaller one first"
    if described.devices is not None and not 1 <= described.devices <= COUNT:
        yield f"{KEY}.devices", f"a whole number from 1 to {COUNT}"
    if described.basis is not None and described.basis not in BASES:
        yield f"{KEY}.basis", f"one of {', '.join(BASES)}"


def _is_amount(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def _pair(values: Any) -> list[Any] | None:
    return None if values is None else [_number(value) for value in values]


def _number(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return value
