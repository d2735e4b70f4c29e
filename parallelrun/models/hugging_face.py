"""How weights and configuration of a model correspond to those of Hugging Face transformers.

A model has a module `hugging_face` with `FAMILIES`, one `Family` for each class of transformers that computes the same
function under some of the model's options. No other module knows the names and layouts of that class.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import from_hf
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.config_fields import MISSING, Fields
from parallelrun.models.moe.spec import expert_ffn
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.model_spec import ModelSpec


@dataclass(frozen=True)
class Piece:
    """Where a parameter is stored: rows start, start + step, ... of the tensor `key`, or of its transpose.

    index: the piece is only the part of the parameter at this index of dim 0 (one expert of several). stacked: the
    stored tensor, too, has a dim 0 of all indices. offset: our values less the stored ones.
    """

    parameter: str
    key: str
    index: int | None = None
    transposed: bool = False
    start: int = 0
    step: int = 1
    stacked: bool = False
    offset: float = 0.0

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the piece, seen as the parameter of that shape is."""
        return parameter if self.index is None else parameter[1:]

    def stored_shape(
        self, parameter: tuple[int, ...], count: int, before: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """The shape of the stored tensor, of which the parameter has `count` pieces and others may have rows, too.

        before: the shape that those others need.
        """
        rows, *rest = self.shape(parameter)
        stack = (count,) if self.stacked else ()
        size = 0 if before is None else before[-1] if self.transposed else before[len(stack)]
        shape = (max(size, self.rows(rows).stop), *rest)
        return (*stack, *(shape[::-1] if self.transposed else shape))

    def rows(self, num_rows: int) -> slice:
        """The first `num_rows` rows of the stored tensor that belong to the piece."""
        return slice(self.start, self.start + (num_rows - 1) * self.step + 1, self.step)


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

    kind: of the value, or from their values to ours. default: of a field that config.json leaves out. nullable: null is
    a value of its own.
    """

    theirs: str
    ours: str
    kind: type | Mapping[Any, Any]
    default: Any = MISSING
    nullable: bool = False

    def read(self, fields: Fields) -> Any:
        """Return our value."""
        if isinstance(self.kind, type):
            return fields.take(self.theirs, self.kind, self.default, self.nullable)
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


# Options that most classes do not know, with the values under which they are off.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sinks", "scaled_embedding", "expert_bias", "shared_gate"), (False,)),
    **dict.fromkeys(("attention_softcap", "logit_softcap", "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(("global_period", "local_rope_theta"), (None,)),
    "mtp_depth": (0,),
}


class Family(ABC):
    """One class of transformers.

    model_type, architecture: its names in config.json. also: other model types of the same class. table: the fields
    that hold a key of ours. fixed: the fields that have one value under all our keys; expected: those that have it by
    default and are not written. prefix: of most keys, which files of the bare model leave out. skipped: keys of such
    files that hold nothing to be learned. copies: (copy, original) keys of tensors that a file may hold twice. The
    first copy is the output layer of a class with the option `tie_word_embeddings`: as transformers does, one that
    differs from its original is not tied to it. aliases: other names of fields, and those that `table` has.
    """

    model_type: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
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


def routing_differences(spec: ModelSpec, family: str, allowed: Mapping[str, tuple[Any, ...]]) -> list[Problem]:
    """The problems of a router with a family that knows only some values of some keys."""
    if spec.router is None:
        return [Problem(f"model.experts=0: {family} of transformers has experts", "model.experts")]
    problems = options(spec.router, "model.router", family, allowed)
    if spec.router.top_k == 1:
        message = f"model.router.top_k=1: {family} gives a single expert the weight 1, and our model its score"
        problems.append(Problem(message, "model.router.top_k"))
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
