"""How weights and configuration of a model correspond to those of Hugging Face transformers.

A model has a module `hugging_face` with `FAMILIES`, one `Family` for each class of transformers that computes the same
function under some of the model's options. No other module knows the names and layouts of that class.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import log
from typing import Any, ClassVar, NamedTuple

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import from_hf
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.moe.spec import expert_ffn
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.model_spec import ModelSpec

_MISSING = object()
# Fields of config.json that do not change what the model computes, or only in training.
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params", "pretraining_tp", "gradient_checkpointing",
    "output_router_logits", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "classifier_dropout", "n_ctx", "reorder_and_upcast_attn", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "num_nextn_predict_layers", "num_mtp_layers", "auto_map", "ep_size", "seq_aux", "quantization_config",
})  # fmt: skip

# By `model.rope_scaling`: the fields of config.json and our keys.
ROPE_KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        "original_max_position_embeddings": "rope_original_seq",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_seq",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all_dim",
    },
}
# What fields stand for that config.json leaves out.
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": None, "mscale_all_dim": None}


@dataclass(frozen=True)
class Piece:
    """Where a parameter is stored: rows [start, start + n) of the tensor `key`, or of its transpose.

    index: the piece is only the part of the parameter at this index of dim 0 (one expert of several).
    """

    parameter: str
    key: str
    index: int | None = None
    transposed: bool = False
    start: int = 0

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the piece, seen as the parameter of that shape is."""
        return parameter if self.index is None else parameter[1:]


@dataclass(frozen=True)
class FixedTensor:
    """A tensor of the class that our model does not have: all its elements have this value.

    added_to: a parameter to each row of which row 0 of a stored tensor is added, with whatever number of rows and
    values; other rows are not read.
    """

    shape: tuple[int, ...]
    value: float
    added_to: str = ""


class Field(NamedTuple):
    """A field of config.json and the key of `model`, or `router.KEY`, that has its value.

    kind: of the value, or from their values to ours. default: of a field that config.json leaves out.
    """

    theirs: str
    ours: str
    kind: type | Mapping[Any, Any]
    default: Any = _MISSING

    def read(self, fields: Fields) -> Any:
        """Return our value."""
        if isinstance(self.kind, type):
            return fields.take(self.theirs, self.kind, self.default)
        return fields.translate(self.theirs, self.kind, self.default)

    def value(self, config: Config, spec: ModelSpec) -> Any:
        """Return the value in config.json."""
        model, key = config.model, self.ours
        sizes = {"ffn": transformer.ffn_size, "kv_heads": transformer.kv_heads, "expert_ffn": expert_ffn}
        if key == "vocab":
            return spec.vocab
        if key in sizes:
            return sizes[key](model)
        ours = getattr(spec.router, key[7:]) if key.startswith("router.") else getattr(model, key)
        return ours if isinstance(self.kind, type) else next(x for x, value in self.kind.items() if value == ours)


class Family(ABC):
    """One class of transformers.

    model_type, architecture: its names in config.json. table: the fields that hold a key of ours. fixed: the fields
    that have one value under all our keys; expected: those that have it by default and are not written. prefix: of most
    keys, which files of the bare model leave out. skipped: keys of such files that hold nothing to be learned. copies:
    (copy, original) keys of tensors that a file may hold twice. The first copy is the output layer of a class with the
    option `tie_word_embeddings`: as transformers does, one that differs from its original is not tied to it. aliases:
    other names of fields, and those that `table` has.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    table: ClassVar[tuple[Field, ...]]
    fixed: ClassVar[Mapping[str, Any]] = {}
    expected: ClassVar[Mapping[str, Any]] = {}
    prefix: ClassVar[str] = "model."
    skipped: ClassVar[str] = r".*\.rotary_emb\.inv_freq"
    copies: ClassVar[tuple[tuple[str, str], ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        """Every option of our model under which the class computes something else."""

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        """config.json of a model without `differences`; `model_type` and `architectures` are added to it."""
        return {field.theirs: field.value(config, spec) for field in self.table} | dict(self.fixed)

    def values(self, fields: Fields) -> dict[str, Any]:
        """The values of `model` by key for a config.json; `router` holds those of `model.router`."""
        for key, value in {**self.fixed, **self.expected}.items():
            fields.expect(key, value)
        read = {field.ours: field.read(fields) for field in self.table}
        values = {key: value for key, value in read.items() if not key.startswith("router.")}
        router = {key[7:]: value for key, value in read.items() if key.startswith("router.")}
        return {**values, "router": router} if router else values

    def model_values(self, content: Mapping[str, Any], where: str) -> dict[str, Any]:
        """`values` of the content of a config.json. where: the file. Raises ConfigError with every problem."""
        fields = Fields({self.aliases.get(key, key): value for key, value in content.items()}, where)
        values = self.values(fields)
        fields.finish()
        return values

    @abstractmethod
    def pieces(self, config: Config, spec: ModelSpec) -> Iterable[Piece]:
        """Where each parameter of a model without `differences` is stored, in the order of the file."""

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        """Tensors of the class, by key, that our model does not have."""
        return {}

    def spellings(self, key: str) -> tuple[str, ...]:
        """The names under which other files may hold the tensor `key`, itself first."""
        return (key, key.removeprefix(self.prefix))

    def is_skipped(self, key: str) -> bool:
        """Whether a tensor of a file may be left unread."""
        return re.fullmatch(self.skipped, key) is not None


class Fields:
    """config.json, whose fields are read one by one, so that none is overlooked. where: the file, for messages."""

    def __init__(self, content: Mapping[str, Any], where: str):
        self._left = {key: value for key, value in content.items() if key not in HARMLESS}
        self._where = where
        self._problems: list[Problem] = []

    def take(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of `key`, else `default`; a wrong or missing one is noted for `finish`."""
        value = self._left.pop(key, default)
        if value is _MISSING:
            self._problems.append(Problem(f"there is no {key}", self._where))
            return kind()
        if value is None and default is None:
            return None
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            self._problems.append(Problem(f"{key} is {value!r:.100}, not a {kind.__name__}", self._where))
            return kind()
        return value

    def translate(self, key: str, ours: Mapping[Any, Any], default: Any) -> Any:
        """Our name for the value of `key`."""
        value = self._left.pop(key, default)
        if isinstance(value, (dict, list)) or value not in ours:
            names = ", ".join(str(our) for our in ours)
            self._problems.append(Problem(f"{key} is {value!r:.200}, and only {names} is built", self._where))
            return next(iter(ours.values()))
        return ours[value]

    def expect(self, key: str, *allowed: Any) -> None:
        """Note a problem unless `key` has one of the allowed values, the first of which is the default."""
        self.translate(key, dict.fromkeys(allowed), allowed[0])

    def take_or_null(self, key: str, kind: type, default: Any) -> Any:
        """As `take`, but null is a value of its own."""
        return self.take(key, kind, None if key in self._left and self._left[key] is None else default)

    def drop(self, *keys: str) -> None:
        """Leave fields out that change nothing under the values of others."""
        for key in keys:
            self._left.pop(key, None)

    def expect_each(self, key: str, allowed: str) -> None:
        """Note a problem unless every entry of the list `key`, which may be left out, is `allowed`."""
        entries = self._left.pop(key, None)
        if any(entry != allowed for entry in entries or ()):
            self._problems.append(Problem(f"{key} is {entries!r:.200}, and only {allowed} is built", self._where))

    def rotary(self, default_theta: float, partial: float = 1.0, latent: bool = False) -> dict[str, Any]:
        """The values of `model.rope_*`, from fields as transformers 5 writes them or earlier versions do.

        partial: the share of a head that is rotated if config.json does not say; only 1 is built. latent: whether the
        class has latent attention, whose scores grow.
        """
        values: dict[str, Any] = {"rope_theta": self.take("rope_theta", float, default_theta)}
        share = self.take("partial_rotary_factor", float, partial)
        for name in ("rope_parameters", "rope_scaling"):
            scaling = self._left.pop(name, None) or {}
            kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else None
            kind = "none" if kind == "default" else kind
            if not isinstance(kind, str) or kind not in ROPE_KEYS:
                message = f"{name} is {scaling!r:.200}, and only default, linear, llama3 and yarn are built"
                self._problems.append(Problem(message, self._where))
                continue
            inner = Fields(scaling, f"{self._where}, {name}")
            values["rope_theta"] = inner.take("rope_theta", float, values["rope_theta"])
            share = inner.take("partial_rotary_factor", float, share)
            for key in ("rope_type", "type"):
                inner._left.pop(key, None)
            if kind != "none":
                values["rope_scaling"] = kind
                kinds = {key: int if key.startswith("original") else float for key in ROPE_KEYS[kind]}
                for key, ours in ROPE_KEYS[kind].items():
                    values[ours] = inner.take(key, kinds[key], _ROPE_DEFAULTS.get(key, _MISSING))
                inner.expect("truncate", True)
                if kind == "yarn":
                    values |= _growth(inner, values, latent)
            self._problems += inner.problems()
        if share != 1.0:
            message = f"partial_rotary_factor is {share:g}: our model rotates whole heads"
            self._problems.append(Problem(message, self._where))
        return values

    def note(self, message: str) -> None:
        """Note a problem of several fields together."""
        self._problems.append(Problem(message, self._where))

    def problems(self) -> list[Problem]:
        """Every problem, and the fields that nobody has read."""
        unknown = [key for key, value in self._left.items() if value not in (None, False, {}, [])]
        return self._problems + [
            Problem(f"{key} is {self._left[key]!r:.100}, a field that parallelrun does not know", self._where)
            for key in unknown
        ]

    def finish(self) -> None:
        """Raise ConfigError with every problem."""
        if problems := self.problems():
            raise ConfigError(*problems)


def _growth(scaling: Fields, values: Mapping[str, Any], latent: bool) -> dict[str, float]:
    """`model.rope_mscale` and `rope_mscale_all_dim` of yarn. transformers reads the fields of these names if both are
    there, and neither beside `attention_factor`."""
    factor = None if latent else scaling.take("attention_factor", float, None)
    scale, of_all = values["rope_mscale"], values["rope_mscale_all_dim"]
    if factor is None:
        if latent and of_all and not scale:
            scaling.note(f"mscale_all_dim is {of_all:g}, and only 0 is built without mscale")
        return {} if scale and of_all else {"rope_mscale": 1.0, "rope_mscale_all_dim": 0.0}
    if values["rope_factor"] <= 1.0 or factor < 1.0:
        scaling.note(f"attention_factor is {factor:g}, and only one above 1 with a factor above 1 is built")
        return {}
    return {"rope_mscale": (factor - 1.0) / (0.1 * log(values["rope_factor"])), "rope_mscale_all_dim": 0.0}


def both(ours: str, theirs: str, bias: bool = True, transposed: bool = False) -> Iterator[Piece]:
    """A weight and, with `bias`, a bias."""
    yield Piece(f"{ours}.weight", f"{theirs}.weight", transposed=transposed)
    if bias:
        yield Piece(f"{ours}.bias", f"{theirs}.bias")


def options(values: Any, section: str, family: str, allowed: Mapping[str, tuple[Any, ...]]) -> list[Problem]:
    """The problems of a section of the configuration with a family that knows only some values of some keys."""
    problems = []
    for key, legal in allowed.items():
        value = getattr(values, key)
        if value not in legal:
            theirs = " or ".join("null" if option is None else str(option) for option in legal)
            message = f"{section}.{key}={value}: {family} of transformers has {key}={theirs}"
            problems.append(Problem(message, f"{section}.{key}"))
    return problems


def family_for(config: Config, spec: ModelSpec) -> Family:
    """The family that computes what the model does, that of `model.from_hf` if it does. Raises ConfigError with what
    differs from each."""
    problems: list[Problem] = []
    families = from_hf.families_of(config.model.name)
    for family in sorted(families, key=lambda family: family.model_type != config.model.preset):
        differences: list[Problem] = family.differences(config, spec)
        if not differences:
            assert isinstance(family, Family), f"{family} of model {config.model.name} is no Family"
            return family
        problems += differences
    message = f"model={config.model.preset}: no class of transformers computes the same"
    raise ConfigError(Problem(message, "model", command="parallelrun export ... --format safetensors"), *problems)
