"""The keys a configuration may have, read from the schema, and the names nearest to a wrong one. No Hydra, no torch."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from parallelrun.config.schema import Config

GROUPS = ("model", "dataset", "strategy", "optimizer", "precision", "cluster", "recipe")
PATH_KEYS = frozenset({"path", "dataset.path", "resume", "runs", "name", "recipe", "model.source", "sweep.resume"}) | {
    "sweep.directory",
    "plot",
}
# Open mappings of the schema: a user's own keys are allowed below them.
MAPPINGS = ("model.roles", "model.arguments", "strategy.demo", "cluster.peak_tflops")

# What other tools call the same thing.
_ELSEWHERE = {
    "batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation": "microbatches",
    "learning_rate": "optimizer.lr",
    "warmup_steps": "optimizer.warmup",
    "num_layers": "model.layers",
    "n_layers": "model.layers",
    "num_heads": "model.heads",
    "hidden_size": "model.hidden",
    "seq_len": "model.seq",
    "sequence_length": "model.seq",
    "max_steps": "steps",
    "world_size": "world",
    "num_gpus": "world",
    "nproc": "world",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "data_parallel": "dp",
    "chunks": "virtual_stages",
    "virtual_pipeline_size": "virtual_stages",
    "output_dir": "runs",
    "grad_clip": "optimizer.clip",
    "activation_checkpointing": "recompute",
}


@dataclass(frozen=True)
class Key:
    """One leaf of the schema. kind: int | float | bool | str | list | dict; optional: null is allowed."""

    name: str
    kind: str
    optional: bool


def _leaves(node: type, prefix: str) -> Iterable[Key]:
    hints = typing.get_type_hints(node)
    for field in dataclasses.fields(node):
        hint, optional = hints[field.name], False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
            hint, optional = inner[0], True
        optional = optional or hint is typing.Any
        name = prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), name + ".")
        else:
            yield Key(name, (typing.get_origin(hint) or hint).__name__, optional)


@lru_cache(maxsize=1)
def known_keys() -> dict[str, Key]:
    """Every dotted key of the schema (`tp`, `model.layers`, `strategy.data.shard`, ...)."""
    return {key.name: key for key in _leaves(Config, "")}


@lru_cache(maxsize=1)
def sections() -> frozenset[str]:
    """Dotted names that hold keys but are no leaf: `model`, `strategy.data`, `eval`, ..."""
    return frozenset(name.rsplit(".", depth)[0] for name in known_keys() for depth in range(1, name.count(".") + 1))


def in_mapping(name: str) -> bool:
    """Whether `name` lies below an open mapping (`model.roles.fc1`)."""
    return any(name.startswith(mapping + ".") for mapping in MAPPINGS)


def nearest(word: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `word`, best first; an equal last part (`lr` of `optimizer.lr`) counts most."""
    names = list(names)
    last_part = [name for name in names if name.rpartition(".")[2] == word.rpartition(".")[2] and name != word]
    similar = difflib.get_close_matches(word, names, n=count, cutoff=0.6)
    by_last_part = difflib.get_close_matches(word, [name.rpartition(".")[2] for name in names], n=count, cutoff=0.75)
    similar += [name for name in names if name.rpartition(".")[2] in by_last_part]
    prefixed = [name for name in names if len(word) > 1 and name.startswith(word)]
    return list(dict.fromkeys(last_part + similar + prefixed))[:count]


def nearest_keys(word: str, count: int = 3) -> list[str]:
    """The keys and groups most like `word`."""
    found = nearest(word, [*known_keys(), *GROUPS], count)
    elsewhere = nearest(word, _ELSEWHERE, 1) if word not in _ELSEWHERE else [word]
    return list(dict.fromkeys([_ELSEWHERE[name] for name in elsewhere] + found))[:count]
