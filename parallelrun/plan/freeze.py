"""The frozen configuration of a run: its `config.yaml`, from which every rank starts. No Hydra, no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import types
import typing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from parallelrun.config.schema import Config, DataStrategyConfig
from parallelrun.errors import ConfigError, Problem

if TYPE_CHECKING:
    from parallelrun.plan.structure import Plan

# Keys that do not change the result of a run: configs that differ only in them are the same point of a sweep.
_VOLATILE = ("name", "runs", "detail", "plot", "verb", "tracker", "profile", "sweep", "timeout_s")


def freeze(config: Config, plan: Plan | None = None) -> str:
    """YAML text of `config`; with `plan`, it includes the values that `resolve` chose.

    Resolving the frozen config gives the same plan again, on any machine.
    """
    if plan is not None:
        config = _filled(config, plan)
    return str(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True, width=120))


def load_frozen(text: str) -> Config:
    """The Config that `freeze` wrote. Raises ConfigError naming the first invalid key."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(Problem(f"the frozen configuration is not YAML: {error}", "config.yaml")) from error
    return typing.cast(Config, _build(Config, values, ""))


def digest(text: str) -> str:
    """sha256 of a frozen configuration, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def identity(config: Config, plan: Plan | None = None) -> str:
    """sha256 of the keys that determine the result of a run, without names, folders and the sweep it belongs to.

    plan: also resolves defaults and drops unread keys, so that two spellings of the same run have one identity.
    """
    values = dataclasses.asdict(config if plan is None else _filled(config, plan))
    for key in _VOLATILE:
        values.pop(key)
    return digest(yaml.safe_dump(values, sort_keys=True))


def _filled(config: Config, plan: Plan) -> Config:
    from parallelrun.plan import routing, sample_sets, shorthands
    from parallelrun.plan.optimizers import with_lr_scale

    folded, problems = shorthands.fold(routing.frozen(with_lr_scale(config, plan), plan), frozenset())
    assert not problems, "only a config that was resolved is frozen with its plan"
    # The ranks resolve this config again and would refuse short names beside full keys, and keys that nothing reads.
    unread = {problem.where: None for problem in shorthands.unread(folded, frozenset(), plan.mesh.size("pp"))}
    clear: dict[str, Any] = {
        key: None for key in ("layout", "grid", "depth", "schedule", "virtual_stages", *unread) if hasattr(folded, key)
    }
    return replace(
        replace(folded, **clear),
        strategy=replace(
            folded.strategy,
            tensor=plan.tensor.resolved_config(folded.strategy.tensor, plan),
            data=_filled_data(folded, plan),
        ),
        servers=None,
        model=replace(folded.model, norm_samples=sample_sets.number(plan) or folded.model.norm_samples),
        dp=plan.mesh.size("dp"),
        tp=plan.mesh.size("tp"),
        pp=plan.mesh.size("pp"),
        world=plan.world,
        global_batch=plan.batch.global_batch,
        local_batch=None,
        micro_batch=plan.batch.micro_batch,
        microbatches=None,
        device=plan.device,
        checkpoint=replace(folded.checkpoint, last=folded.checkpoint.last is not False),
    )


def _filled_data(config: Config, plan: Plan) -> DataStrategyConfig:
    """The keys that the data strategy reads, with the resolved number of servers."""
    data = config.strategy.data
    read = {key: getattr(data, key) for key in (*plan.data.reads, "kind")}
    return replace(DataStrategyConfig(**read), servers=plan.servers or None)


def _build(kind: Any, values: Any, where: str) -> Any:
    """Convert `values` to `kind`: a dataclass, an optional, a list, a mapping or a plain type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, values, where)
    if origin in (typing.Union, types.UnionType):
        return None if values is None else _build(arguments[0], values, where)
    if origin is list and isinstance(values, list):
        return [_build(arguments[0], value, where) for value in values]
    if origin is dict and isinstance(values, dict):
        return {key: _build(arguments[1], value, where) for key, value in values.items()}
    if kind is Any:
        return values
    if kind is float and type(values) is int:
        return float(values)
    if origin is None and type(values) is kind:
        return values
    raise _wrong(where, f"{values!r} is not of type {getattr(origin or kind, '__name__', kind)}")


def _build_dataclass(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise _wrong(where, "not a mapping")
    hints = typing.get_type_hints(kind)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise _wrong(f"{where}{unknown[0]}", "no such key")
    return kind(**{key: _build(hints[key], value, f"{where}{key}.") for key, value in values.items()})


def _wrong(where: str, what: str) -> ConfigError:
    key = where.rstrip(".") or "the file"
    return ConfigError(Problem(f"the frozen configuration is not valid: {key}: {what}", "config.yaml"))
