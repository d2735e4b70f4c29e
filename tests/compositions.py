"""Compositions by Hydra, each computed once for tests that are about what happens afterwards.

A sweep of n points composes 2n + 2 times (Hydra composes every point once more to check it), a tenth of a second each,
and the tests of sweeps type the same few points again and again. Thousands of command lines of other tests differ in
values and choose the same few built-in files, whose merge takes half of the time.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, open_dict

from parallelrun.config import presets
from parallelrun.config.schema.strategy_keys import complete_class

_SCRATCH = "hydra.sweep.dir="  # another folder in every sweep
_Pickled = tuple[bytes, dict[str, type]]  # a deep copy takes five times as long
_kept: dict[Hashable, _Pickled] = {}
_replaced: list[tuple[Any, str, Any]] = []  # by `keep_merged`: whose function, its name, and the original


def keep(patch: pytest.MonkeyPatch) -> None:
    """From now on, equal words compose once: in a process, or with a recipe, which is the test's own, in a test."""
    compose = ConfigLoaderImpl.load_configuration
    of_recipes: dict[Hashable, _Pickled] = {}

    def load(self: ConfigLoaderImpl, config_name: str, overrides: Sequence[str], *rest: Any, **more: Any) -> DictConfig:
        kept = of_recipes if any("recipe" in word for word in overrides) else _kept
        words = [word for word in overrides if not word.startswith(_SCRATCH)]
        folders = tuple(map(repr, self.config_search_path.get_path()))
        key = config_name, *words, len(overrides), rest, *sorted(more.items()), folders
        if key not in kept:
            config = compose(self, config_name, overrides, *rest, **more)
            kept[key] = _pickled(config)
            return config
        return _with_scratch(_copy(*kept[key]), [word for word in overrides if word.startswith(_SCRATCH)])

    patch.setattr(ConfigLoaderImpl, "load_configuration", load)


def keep_merged() -> None:
    """From now on, this process and its copies read built-in files once, parse equal words once, and choose and merge
    equal lists of files once. Typed values come after it."""
    if _replaced:
        return
    _read_once()
    _parse_once()
    _choose_once()
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    merged: dict[Hashable, _Pickled] = {}

    def compose(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
        known = _built_in(repo)
        key = (
            known or _schema(),
            repr(defaults),
            *(() if known else (_content(one.config_path, repo) for one in defaults)),
        )
        if key not in merged:
            merged[key] = _pickled(merge(self, defaults, repo))
        return _copy(*merged[key])

    _replace(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose)


def read_all() -> None:
    """Read every built-in file of a group, so that copies of this process need not."""
    source = _source_class()(provider="main", path="pkg://parallelrun.conf")
    for group in source.list("", ObjectType.GROUP):
        for name in source.list(group, ObjectType.CONFIG):
            source.load_config(f"{group}/{name}")


def compose_as_ever(patch: pytest.MonkeyPatch) -> None:
    """Undo `keep_merged`, for tests of what composing itself does."""
    for owner, name, original in _replaced:
        patch.setattr(owner, name, original)


def _replace(owner: Any, name: str, function: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name, None)))
    setattr(owner, name, function)


def _read_once() -> None:
    """The files of Hydra and of ours, and the schema."""
    source_class = _source_class()
    read, files = source_class.load_config, dict[Hashable, tuple[ConfigResult, _Pickled]]()
    nodes: dict[str, tuple[ConfigNode, _Pickled]] = {}

    def load_file(self: Any, config_path: str) -> ConfigResult:
        if self.full_path() not in _PLACES:
            return read(self, config_path)
        key = self.full_path(), self.provider, config_path
        if key not in files:
            result = read(self, config_path)
            files[key] = replace(result, config=None), _pickled(result.config)
        result, pickled = files[key]
        return replace(result, config=_copy(*pickled), header={**result.header})

    def load_node(self: ConfigStore, config_path: str) -> ConfigNode:
        stored = self._load(config_path)
        if config_path not in nodes or nodes[config_path][0] is not stored:
            nodes[config_path] = stored, _pickled(stored.node)
        return replace(stored, node=_copy(*nodes[config_path][1]))

    _replace(source_class, "load_config", load_file)
    _replace(ConfigStore, "load", load_node)
    _replace(ConfigStore, "__deepcopy__", lambda store, memo: store)  # each composition copies it, and changes no copy


def _source_class() -> Any:
    """Hydra's reader of files in packages. `Plugins` executes its module again: a class imported before is not used."""
    Plugins.instance()
    module = importlib.import_module("hydra._internal.core_plugins.importlib_resources_config_source")
    return module.ImportlibResourcesConfigSource


def _parse_once() -> None:
    """Only words of one value or none: the others hold lists, which their readers may change."""
    parse = OverridesParser.parse_rule
    parsed: dict[str, Override] = {}

    def parse_rule(self: OverridesParser, text: str, rule: str) -> Any:
        if rule != "override":
            return parse(self, text, rule)
        if text not in parsed:
            override = parse(self, text, rule)
            if override.value_type != ValueType.ELEMENT or (
                override._value and isinstance(override._value, (dict, list))
            ):
                return override
            parsed[text] = override
        return copy.copy(parsed[text])

    _replace(OverridesParser, "parse_rule", parse_rule)


def _choose_once() -> None:
    """Where all files are Hydra's and ours, the words that choose files decide which ones are read."""
    choose = defaults_list._create_defaults_list
    chosen: dict[Hashable, bytes] = {}

    def create(repo: Any, config_name: str | None, overrides: Any, *rest: Any, **more: Any) -> Any:
        known = _built_in(repo)
        if known is None:
            return choose(repo, config_name, overrides, *rest, **more)
        values = overrides.config_overrides
        choices = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
        key = (known, config_name, repr(choices), rest, *sorted(more.items()))
        if key not in chosen:
            made = choose(repo, config_name, overrides, *rest, **more)
            choices = {name: vars(overrides)[name] for name in choices}
            chosen[key] = pickle.dumps((made, choices), pickle.HIGHEST_PROTOCOL)
            return made
        made, choices = pickle.loads(chosen[key])
        vars(overrides).update(choices, config_overrides=values)
        return made

    _replace(defaults_list, "_create_defaults_list", create)


_PLACES = ("pkg://hydra.conf", "pkg://parallelrun.conf", "structured://")


def _built_in(repo: Any) -> Hashable:
    """What all files depend on that Hydra can find; None if a folder or a recipe is among them, which may change."""
    places = tuple(source.full_path() for source in repo.get_sources())
    stored = ConfigStore.instance().repo
    if not set(places) <= set(_PLACES) or stored.get("recipe"):
        return None
    clusters = tuple((path.name, path.read_bytes()) for path in sorted(presets.own_clusters().glob("*.yaml")))
    return (_schema(), places, clusters, _names(stored))


def _names(stored: dict[str, Any]) -> Hashable:
    return tuple((name, _names(node) if isinstance(node, dict) else ()) for name, node in stored.items())


def _schema() -> Hashable:
    return complete_class()  # plug-ins change it, also into an equal class that is another


def _content(name: str, repo: Any) -> bytes:
    """What a file holds; nothing for those of Hydra's and ours, which always hold the same."""
    if name in ("hydra/config", "base_schema"):
        return b""
    loaded = repo.load_config(name)
    is_built_in = loaded.path.startswith(("pkg://hydra.conf", "pkg://parallelrun.conf"))
    return b"" if is_built_in else _pickled(loaded.config)[0]


def _pickled(config: DictConfig) -> _Pickled:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(config)
    return buffer.getvalue(), pickler.types


def _copy(pickled: bytes, types: dict[str, type]) -> DictConfig:
    copied: DictConfig = _Unpickler(pickled, types).load()
    return copied


def _with_scratch(config: DictConfig, words: list[str]) -> DictConfig:
    """`config` with the scratch folder of this sweep."""
    if words:
        with open_dict(config):
            given = config.hydra.overrides.hydra
            config.hydra.overrides.hydra = [*words, *(word for word in given if not word.startswith(_SCRATCH))]
            config.hydra.sweep.dir = words[-1].removeprefix(_SCRATCH).strip("'")
    return config


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, protocol: int):
        super().__init__(buffer, protocol)
        self.types: dict[str, type] = {}

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, type) and obj.__module__ == "types":
            assert self.types.setdefault(obj.__name__, obj) is obj, f"two sections of the schema are {obj.__name__}"
            return obj.__name__
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, types: dict[str, type]):
        super().__init__(io.BytesIO(pickled))
        self._types = types

    def persistent_load(self, name: str) -> type:
        return self._types[name]
