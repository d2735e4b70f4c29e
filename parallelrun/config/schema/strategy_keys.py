"""The keys of all strategies. Each strategy declares its own: a subclass of its axis's section.

The keys of built-in strategies are in one module an axis (`registry.STRATEGY_KEYS`), so that naming the keys imports no
predictions. The strategy's class names its own as `config_class`, which is all that a plug-in needs.

A composed configuration is complete: its sections have the keys of every registered strategy, plug-ins included, so
that names and bounds are checked whatever strategy is chosen. `narrowed` keeps the keys of the chosen ones.
"""

from __future__ import annotations

import typing
from dataclasses import MISSING, Field, field, fields, make_dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, cast

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema import run_schema
from parallelrun.config.schema.run_schema import Config

SECTIONS: dict[str, type] = {
    "data": run_schema.DataStrategyConfig,
    "tensor": run_schema.TensorStrategyConfig,
    "pipeline": run_schema.PipelineConfig,
    "expert": run_schema.ExpertConfig,
    "context": run_schema.ContextConfig,
}


@cache
def strategy_class(axis: str, kind: str) -> type[Any]:
    """The class in the plan module of a strategy's package whose `kind` is the given one.

    Raises KeyError for an unknown kind, ConfigError for a plug-in without such a class.
    """
    module = registry.load("strategies", f"{axis}.{kind}", "plan")
    for cls in vars(module).values():
        if isinstance(cls, type) and getattr(cls, "kind", None) == kind and hasattr(cls, "config_class"):
            return cls
    cause = f"{module.__name__} has no strategy class with kind = {kind!r}"
    raise ConfigError(Problem(cause, f"strategy.{axis}.kind"))


@lru_cache(maxsize=len(SECTIONS))
def kinds(axis: str) -> tuple[str, ...]:
    """The names of the strategies of one axis (`data`, `tensor`, `pipeline`, `expert`, `context`), without `none`.

    A plug-in that cannot be imported is left out: it says so when it is chosen, and spoils no other command.
    """
    names = (name.partition(".") for name in registry.names("strategies"))
    return tuple(kind for of_axis, _, kind in names if of_axis == axis and kind != "none" and _is_usable(axis, kind))


def _is_usable(axis: str, kind: str) -> bool:
    if not registry.is_plug_in("strategies", f"{axis}.{kind}"):
        return True
    try:
        strategy_class(axis, kind)
    except Exception:
        return False
    return True


def config_class(axis: str, kind: str | None) -> type:
    """The config dataclass of a strategy; the axis's own where none is chosen. Raises KeyError for an unknown kind."""
    if kind is None:
        return SECTIONS[axis]
    if registry.is_plug_in("strategies", f"{axis}.{kind}"):
        return cast(type, strategy_class(axis, kind).config_class)
    return _keys_of_built_in(axis, kind)


@lru_cache(maxsize=len(registry.STRATEGIES))
def _keys_of_built_in(axis: str, kind: str) -> type:
    """The class of a built-in strategy in its axis' module of keys, which imports no prediction; else the axis's own.
    Raises KeyError for an unknown kind."""
    registry.path("strategies", f"{axis}.{kind}")
    if axis not in registry.STRATEGY_KEYS:
        return SECTIONS[axis]
    module = import_module(registry.STRATEGY_KEYS[axis])
    own = [cls for cls in vars(module).values() if getattr(cls, "__module__", None) == module.__name__]
    return cast(type, next(cls for cls in own if vars(cls).get("kind") == kind))


def own_keys(axis: str, kind: str | None) -> frozenset[str]:
    """The keys of `strategy.<axis>` that a strategy reads, with `kind`."""
    return frozenset(item.name for item in fields(config_class(axis, kind)))


@lru_cache(maxsize=1)
def complete_class() -> type[Config]:
    """The subclass of Config with the keys of every registered strategy."""
    sections = [(axis, (made := _section(axis)), field(default_factory=made)) for axis in SECTIONS]
    strategy = make_dataclass("CompleteStrategyConfig", sections, bases=(run_schema.StrategyConfig,))
    of_strategy = ("strategy", strategy, field(default_factory=strategy))
    return make_dataclass("CompleteConfig", [of_strategy], bases=(Config,))


def completed(config: Config) -> Config:
    """`config` with the keys of every strategy; those that it does not have are at their defaults."""
    return _with_sections(config, {axis: _section(axis) for axis in SECTIONS})


def narrowed(config: Config) -> Config:
    """`config` with the keys of the chosen strategies alone. The section of an unknown strategy stays as it is."""
    selected = {axis: getattr(config.strategy, axis).kind for axis in SECTIONS}
    return _with_sections(config, {axis: config_class(axis, kind) for axis, kind in selected.items()
                                   if kind is None or registry.has("strategies", f"{axis}.{kind}")})  # fmt: skip


def _with_sections(config: Config, classes: dict[str, type]) -> Config:
    changed = {axis: _converted(getattr(config.strategy, axis), cls) for axis, cls in classes.items()}
    return replace(config, strategy=replace(config.strategy, **changed))


def _converted(section: Any, cls: type) -> Any:
    if type(section) is cls:
        return section
    names = {item.name for item in fields(section)}
    return cls(**{item.name: getattr(section, item.name) for item in fields(cls) if item.name in names})


@lru_cache(maxsize=len(SECTIONS))
def _section(axis: str) -> type:
    """The union of the config classes of an axis. Raises ConfigError if two declare one key differently."""
    base = SECTIONS[axis]
    declared: dict[str, tuple[type, Field[Any]]] = {item.name: (base, item) for item in fields(base)}
    for cls in dict.fromkeys(config_class(axis, kind) for kind in kinds(axis)):
        for item in fields(cls):
            first, declaration = declared.setdefault(item.name, (cls, item))
            if item.name == "kind" or item is declaration:
                continue
            if _declaration(cls, item) != _declaration(first, declaration):
                cause = f"{first.__name__} and {cls.__name__} declare strategy.{axis}.{item.name} differently"
                raise ConfigError(Problem(cause, f"strategy.{axis}.{item.name}"))
    made = []
    for name, (cls, item) in declared.items():
        default: Any = {"default": item.default} if item.default is not MISSING else {}
        factory: Any = {"default_factory": item.default_factory} if item.default_factory is not MISSING else {}
        own = field(**default, **factory, metadata=item.metadata)
        made.append((name, _hints(cls)[name], own))
    return make_dataclass(f"Complete{base.__name__}", made, bases=(base,))


def _declaration(cls: type, item: Field[Any]) -> tuple[object, ...]:
    factory = item.default_factory() if item.default_factory is not MISSING else None
    return _hints(cls)[item.name], item.default, factory, dict(item.metadata)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)
