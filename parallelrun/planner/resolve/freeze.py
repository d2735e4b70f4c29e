"""The frozen configuration of a run: its `config.yaml`, from which every rank starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.registry import has
from parallelrun.config.schema import strategy_keys
from parallelrun.config.schema.run_schema import Config

if TYPE_CHECKING:
    from parallelrun.planner.contract.plan import Plan

# Keys that do not change the result of a run: configs that differ only in them are the same point of a sweep.
_VOLATILE = ("name", "runs", "detail", "plot", "verb", "tracker", "profile", "sweep", "timeout_s", "backend", "explain",
             "restarts", "elastic", "min_world")  # fmt: skip


def freeze(config: Config, plan: Plan | None = None) -> str:
    """YAML text of `config` with the chosen strategies' keys; with `plan`, it includes the values that `resolve` chose.

    Resolving the frozen config gives the same plan again, on any machine.
    """
    config = strategy_keys.narrowed(config) if plan is None else filled(config, plan)
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
    values = dataclasses.asdict(config if plan is None else filled(config, plan))
    for key in _VOLATILE:
        values.pop(key)
    return digest(json.dumps(values, sort_keys=True))


def filled(config: Config, plan: Plan) -> Config:
    """Return the configuration of all ranks: `config` with the values and the strategies' keys that `resolve` chose."""
    from parallelrun.planner.contract.optimizers import with_lr_scale
    from parallelrun.planner.pieces import router_settings as routing
    from parallelrun.planner.pieces import sample_sets
    from parallelrun.planner.resolve import shorthands

    complete = strategy_keys.completed(routing.frozen(with_lr_scale(config, plan), plan))
    folded, problems = shorthands.fold(complete, frozenset())
    assert not problems, "only a config that was resolved is frozen with its plan"
    folded = strategy_keys.narrowed(folded)
    # The ranks resolve this config again and would refuse short names beside full keys, and keys that nothing reads.
    short: dict[str, Any] = dict.fromkeys(["layout", "schedule", "virtual_stages", *shorthands.short_keys()])
    return replace(
        replace(folded, **short),
        strategy=replace(
            folded.strategy,
            tensor=plan.tensor.resolved_config(folded, plan),
            data=plan.data.resolved_config(folded),
            context=plan.context.resolved_config(folded) if plan.context else folded.strategy.context,
        ),
        model=replace(folded.model, norm_samples=sample_sets.number(plan) or folded.model.norm_samples),
        dp=plan.mesh.size("dp"),
        cp=plan.mesh.size("cp"),
        tp=plan.mesh.size("tp"),
        pp=plan.mesh.size("pp"),
        world=plan.world,
        global_batch=plan.batch.global_batch,
        local_batch=None,
        micro_batch=plan.batch.micro_batch,
        microbatches=None,
        device=plan.device,
        precision=replace(folded.precision, name=plan.precision.name),
        checkpoint=replace(folded.checkpoint, last=folded.checkpoint.last is not False),
    )


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
    if kind in strategy_keys.SECTIONS.values():
        kind = _chosen_class(kind, values.get("kind"), where)
    hints = typing.get_type_hints(kind)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise _wrong(f"{where}{unknown[0]}", "no such key")
    return kind(**{key: _build(hints[key], value, f"{where}{key}.") for key, value in values.items()})


def _chosen_class(section: type, kind: Any, where: str) -> type:
    """The config class of the strategy that a section of the frozen configuration names."""
    axis = next(axis for axis, one in strategy_keys.SECTIONS.items() if one is section)
    if kind is None or has("strategies", f"{axis}.{kind}"):
        return strategy_keys.config_class(axis, kind)
    raise _wrong(f"{where}kind", f"there is no strategy {kind}")


def _wrong(where: str, what: str) -> ConfigError:
    key = where.rstrip(".") or "the file"
    return ConfigError(Problem(f"the frozen configuration is not valid: {key}: {what}", "config.yaml"))
