"""The keys of a configuration, read from the schema, and the names closest to a wrong one."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from parallelrun.base import spelling
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import complete_class, completed

GROUPS = ("model", "dataset", "strategy", "optimizer", "precision", "cluster", "stack", "recipe")
CODE_KEYS = ("model.source", "model.loss", "dataset.source")  # functions of the user's
PATH_KEYS = {
    "path", "dataset.path", "tokenizer", "dataset.tokenizer", "dataset.chat_template", "dataset.cache",
    "resume", "runs", "name", "recipe", *CODE_KEYS, "model.from_hf", "model.path", "plot",
    "init.weights",
    "sweep.resume", "sweep.directory",
}  # fmt: skip
LIST_TEXTS = {"detail"}  # text keys whose commas separate parts of one value, not the points of a sweep
# Open mappings of the schema: users may add keys of their own below them.
MAPPINGS = ("model.roles", "model.arguments", "model.hf", "strategy.demo", "cluster.peak_tflops")
_OF_PRESETS = ("name", "preset", "description", "verb", "demo", "own_axis", "router", "searches")

# Our key -> the names that other tools use for it.
_NAMES_ELSEWHERE = {
    "detail": "ranks",
    "global_batch": "batch_size train_batch_size global_batch_size",
    "micro_batch": "micro_batch_size",
    "microbatches": "gradient_accumulation gradient_accumulation_steps",
    "optimizer.lr": "learning_rate",
    "optimizer.warmup": "warmup_steps",
    "model.layers": "num_layers n_layers num_hidden_layers",
    "model.heads": "num_heads num_attention_heads",
    "model.hidden": "hidden_size",
    "model.seq": "seq_len sequence_length max_position_embeddings",
    "steps": "max_steps train_iters max_train_steps num_train_epochs",
    "world": "world_size nproc",
    "gpus": "num_gpus",
    "tp": "tensor_parallel tensor_model_parallel_size tensor_parallel_size",
    "pp": "pipeline_parallel pipeline_model_parallel_size",
    "dp": "data_parallel",
    "virtual_stages": "chunks virtual_pipeline_size",
    "runs": "output_dir",
    "optimizer.clip": "grad_clip max_grad_norm gradient_clip_val",
    "recompute": "activation_checkpointing gradient_checkpointing",
    "model.from_hf": "name_or_path model_name_or_path pretrained_model_name_or_path hf_path",
    "local_batch": "per_device_train_batch_size",
    "model.kv_heads": "num_query_groups num_key_value_heads",
    "model.ffn": "intermediate_size ffn_hidden_size",
    "model.vocab": "vocab_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "strategy.expert.tp": "expert_tp expert_tensor_parallel_size",
    "checkpoint.every": "save_interval save_steps",
    "eval.every": "eval_interval eval_steps",
    "resume": "resume_from_checkpoint",
    "checkpoint.keep": "save_total_limit",
    "name": "run_name",
    "dataset.path": "data_path",
    "precision": "dtype",
    "cluster.nodes": "nodes",
}
_ELSEWHERE = {name: key for key, names in _NAMES_ELSEWHERE.items() for name in names.split()}
_WRAPPERS = ("train", "training", "trainer", "args", "config", "cfg", "run")  # sections that other tools have


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
            hint, optional = next(part for part in typing.get_args(hint) if part is not type(None)), True
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
        default = default_of(key.name, None)
        return f"{key.name}={str(default).replace(' ', '')}" if isinstance(default, (list, dict)) else ""
    least = key.plausible[0] if key.plausible else max(key.least or 1, 1)
    value = default_of(key.name, key.choices[0] if key.choices else "..." if key.kind == "str" else least)
    return f"{key.name}={value:g}" if isinstance(value, float) else f"{key.name}={value}"


def in_mapping(name: str) -> bool:
    """Whether `name` is below an open mapping (`model.roles.fc1`)."""
    return any(name.startswith(mapping + ".") for mapping in MAPPINGS)


def nearest(word: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names closest to `word`: those that are spelled alike, else those that continue it (`h100_80gb` for
    `h100`)."""
    names = list(names)
    longer = [name for name in names if len(word) > 1 and name.startswith(word)]
    return (spelling.closest(word, names) or sorted(longer, key=len))[:count]


def nearest_keys(word: str, count: int = 3) -> list[str]:
    """The keys and groups closest to `word`, without the keys that only presets set: that of another tool's name, one
    that is spelled alike, one whose last part is (`lr`, or `model.lr`), or one that continues the word."""
    typed = [key.name for key in known_keys().values() if not key.is_of_presets] + list(GROUPS)
    section, _, last = word.rpartition(".")
    elsewhere = _ELSEWHERE.get(word) or _ELSEWHERE.get(last)
    if elsewhere:
        return [elsewhere]
    by_last: dict[str, list[str]] = {}
    for name in typed:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    same = by_last.get(last, []) if not section or section in sections() or section in _WRAPPERS else []
    if word.count(".") > 1:  # strategy.router.jitter: the right part of another section
        same = same or [name for name in typed if name.endswith("." + ".".join(word.split(".")[-2:]))]
    alike = spelling.closest(word, dict.fromkeys(typed if section else [*typed, *by_last]))
    spelled = [name for name in alike if name in typed] or [name for part in alike for name in by_last[part]]
    borrowed = [_ELSEWHERE[name] for name in spelling.closest(word, _ELSEWHERE)]
    return list(dict.fromkeys(same or spelled or borrowed or nearest(word, typed, count)))[:count]


def named_code(config: Config) -> dict[str, str]:
    """Return the functions of the user's that a configuration names, by key."""
    return {key: code for key in CODE_KEYS if (code := attrgetter(key)(config)) is not None}
