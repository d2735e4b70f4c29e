"""Tiny configs and plans for tests: a GPT of a few thousand parameters, legal for most small plans. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed, narrowed
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.definitions import Split
from parallelrun.planner.resolve.resolve_config import resolve

TINY: dict[str, Any] = {
    "model.layers": 4,
    "model.hidden": 16,
    "model.heads": 4,
    "model.seq": 8,
    "model.vocab": 32,
    "dataset.name": "synthetic",
    "dataset.samples": 64,
    "dataset.vocab": 32,
    "global_batch": 8,
    "dp": 1,
    "tp": 1,
    "pp": 1,
    "optimizer.lr": 0.01,
    "optimizer.warmup": 0,
    "steps": 3,
}


def tiny_config(overrides: dict[str, Any] | None = None, /, **more: Any) -> Config:
    """The tiny Config with `more` set: keys dotted (in a dict) or with a double underscore for the dot.

    `tiny_config(dp=2, model__vocab=50)` is `tiny_config({"dp": 2, "model.vocab": 50})`. The degrees default to 1;
    `dp=None` leaves one to `resolve`. Raises KeyError for a key the schema does not have.
    """
    config = completed(Config())
    given = {**(overrides or {}), **more}
    values = {**TINY, **{key.replace("__", "."): value for key, value in given.items()}}
    if "local_batch" in given and "global_batch" not in given:
        values["global_batch"] = None
    for key, value in values.items():
        *sections, last = key.split(".")
        node: Any = config
        for section in sections:
            node = getattr(node, section)
        if not is_dataclass(node) or last not in {item.name for item in fields(node)}:
            raise KeyError(f"the schema has no key {key}")
        setattr(node, last, value)
    return config


def llama(**overrides: Any) -> dict[str, Any]:
    """Overrides that make the tiny gpt a llama; names take `__` for the dot."""
    options = {
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.position": "rope",
        "model.bias": False,
        "model.tied_embeddings": False,
        "model.kv_heads": 2,
    }
    return {**options, **{key.replace("__", "."): value for key, value in overrides.items()}}


def narrow_config(overrides: dict[str, Any] | None = None, /, **more: Any) -> Config:
    """`tiny_config` with the keys of the chosen strategies alone, as strategies and models see it."""
    return narrowed(tiny_config(overrides, **more))


def tiny_plan(overrides: dict[str, Any] | None = None, /, **more: Any) -> Plan:
    """The resolved Plan of `tiny_config` with the same overrides. Raises ConfigError when it is not legal."""
    return resolve(tiny_config(overrides, **more))


def collate(split: Split, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) of several samples, stacked along a new first dim."""
    inputs, targets = zip(*(split.sample(int(index)) for index in indices))
    return np.stack(inputs), np.stack(targets)


def pairs(suggestion: str) -> Iterator[tuple[str, str]]:
    """Every (key, value) of a problem's suggestion, as a user would type it."""
    for alternative in re.split(r",? or ", suggestion):
        if match := re.fullmatch(r"([a-z_][a-z_.]*)=([\w.+-]+)", alternative):
            yield match[1], match[2]
