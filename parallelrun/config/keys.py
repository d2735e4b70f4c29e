"""The keys of a configuration, read from the schema, and the names closest to a wrong one. No Hydra, no torch."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from parallelrun.config.schema import Config
from parallelrun.config.strategy_keys import complete_class, completed

GROUPS = ("model", "dataset", "strategy", "optimizer", "precision", "cluster", "recipe")
PATH_KEYS = {
    "path", "dataset.path", "tokenizer", "dataset.tokenizer", "dataset.cache",
    "resume", "runs", "name", "recipe", "model.source", "model.from_hf", "plot",
    "init.weights",
    "sweep.resume", "sweep.directory",
}  # fmt: skip
# Open mappings of the schema: users may add keys of their own below them.
LIST_TEXTS = {"detail"}  # text keys whose commas separate parts of one value, not the points of a sweep
MAPPINGS = ("model.roles", "model.arguments", "strategy.demo", "cluster.peak_tflops")
_OF_PRESETS = ("name", "preset", "description", "verb", "demo", "own_axis", "router", "searches")

# The names that other tools use for our keys.
_ELSEWHERE = {
    "ranks": "detail",
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
    "num_gpus": "gpus",
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
    """One leaf of the schema. kind: int | float | bool | str | list | dict | Any; optional: null is allowed. item:
    the kind of a list's items, or empty.

    The other fields are the arguments of `field.key`.
    """

    name: str
    kind: str
    optional: bool
    item: str = ""
    help: str = field(default="", compare=False)
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    plausible: tuple[float, float] | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    of_degrees: bool = False

    @property
    def is_of_presets(self) -> bool:
        """Whether only presets set this key, and no user types it (the names of the run are typed)."""
        return self.name not in ("name", "tracker.name") and self.name.rpartition(".")[2] in _OF_PRESETS


def leaves(node: type, prefix: str) -> Iterable[Key]:
    """The keys of a dataclass and of those inside it; `prefix` begins their dotted names."""
    hints = typing.get_type_hints(node)
    for item in dataclasses.fields(node):
        hint, optional = hints[item.name], hints[item.name] is typing.Any
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint, optional = next(one for one in typing.get_args(hint) if one is not type(None)), True
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            kind = (typing.get_origin(hint) or hint).__name__
            inner = getattr(typing.get_args(hint)[0], "__name__", "") if kind == "list" else ""
            yield Key(prefix + item.name, kind, optional, inner, **item.metadata)


@lru_cache(maxsize=1)
def known_keys() -> dict[str, Key]:
    """Every dotted key of the schema (`tp`, `model.layers`, `strategy.data.shard`, ...)."""
    return {key.name: key for key in leaves(complete_class(), "")}


@lru_cache(maxsize=1)
def sections() -> frozenset[str]:
    """The dotted names that hold keys: `model`, `strategy.data`, `eval`, ..."""
    return frozenset(name.rsplit(".", depth)[0] for name in known_keys() for depth in range(1, name.count(".") + 1))


def default_of(name: str, otherwise: object) -> object:
    """The schema's default of a key, or `otherwise` if it is null or no key."""
    value = attrgetter(name)(completed(Config())) if name in known_keys() else None
    return otherwise if value is None else value


def example(key: Key) -> str:
    """`key=value` with a legal value: the default, or the smallest one."""
    if key.kind == "bool":
        return f"{key.name}=true or {key.name}=false"
    if key.is_of_presets:
        return f"leave {key.name} out"
    if key.kind not in ("int", "float", "str"):
        found = default_of(key.name, None)
        return f"{key.name}={str(found).replace(' ', '')}" if isinstance(found, (list, dict)) else ""
    least = key.plausible[0] if key.plausible else max(key.least or 1, 1)
    value = default_of(key.name, key.choices[0] if key.choices else "..." if key.kind == "str" else least)
    return f"{key.name}={value:g}" if isinstance(value, float) else f"{key.name}={value}"


def in_mapping(name: str) -> bool:
    """Whether `name` is below an open mapping (`model.roles.fc1`)."""
    return any(name.startswith(mapping + ".") for mapping in MAPPINGS)


def nearest(word: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names closest to `word`, best first: an equal last part (`lr` of `optimizer.lr`), then a name that
    continues the word (`h100_80gb` for `h100`), then similar spelling."""
    names = list(names)
    last_part = [name for name in names if name.rpartition(".")[2] == word.rpartition(".")[2] and name != word]
    similar = difflib.get_close_matches(word, names, n=count, cutoff=0.6)
    by_last_part = difflib.get_close_matches(word, [name.rpartition(".")[2] for name in names], n=count, cutoff=0.75)
    similar += [name for name in names if name.rpartition(".")[2] in by_last_part]
    prefixed = [name for name in names if len(word) > 1 and name.startswith((f"{word}_", f"{word}."))]
    longer = [name for name in names if len(word) > 1 and name.startswith(word)]
    return list(dict.fromkeys(last_part + prefixed + similar + longer))[:count]


def nearest_keys(word: str, count: int = 3) -> list[str]:
    """The keys and groups closest to `word`, without the keys that only presets set."""
    typed = [key.name for key in known_keys().values() if not key.is_of_presets]
    found = nearest(word, [*typed, *GROUPS], count)
    elsewhere = [word] if word in _ELSEWHERE else nearest(word, _ELSEWHERE, 1)
    return list(dict.fromkeys([_ELSEWHERE[name] for name in elsewhere] + found))[:count]
