"""Compositions by Hydra, each computed once for tests that are about what happens afterwards.

A sweep of n points composes 2n + 2 times (Hydra composes every point once more to check it), a tenth of a second each,
and the tests of sweeps type the same few points again and again. Thousands of command lines of other tests differ in
values and choose the same few built-in files, whose merge takes half of the time.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, open_dict

from parallelrun.config import presets, source

_SCRATCH = "hydra.sweep.dir="  # another folder in every sweep
_Pickled = tuple[bytes, dict[str, type]]  # a deep copy takes five times as long
_kept: dict[Hashable, _Pickled] = {}


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
    """From now on, this process and its copies merge equal lists of files once. Typed values come after it."""
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    merged: dict[Hashable, _Pickled] = {}

    def compose(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
        contents = [_content(default.config_path, repo) for default in defaults]
        schema, types = source._pickled_schema()  # plug-ins change it, also into equal classes that are others
        key = (schema, *types.values(), repr(defaults), *contents)
        if key not in merged:
            merged[key] = _pickled(merge(self, defaults, repo))
        return _copy(*merged[key])

    ConfigLoaderImpl._compose_config_from_defaults_list = compose  # type: ignore[method-assign]


def _content(name: str, repo: Any) -> bytes:
    """What a file holds; nothing for those of Hydra's and ours, which always hold the same."""
    if name == "hydra/config":
        return b""
    loaded = repo.load_config(name)
    is_own = loaded.path == "parallelrun://conf" and presets.own_file(*name.partition("/")[::2]) is None
    if is_own or loaded.path.startswith(("pkg://hydra.conf", "parallelrun://schema")):
        return b""
    return _pickled(loaded.config)[0]


def _pickled(config: DictConfig) -> _Pickled:
    buffer = io.BytesIO()
    pickler = source._Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(config)
    return buffer.getvalue(), pickler.types


def _copy(pickled: bytes, types: dict[str, type]) -> DictConfig:
    copied: DictConfig = source._Unpickler(pickled, types).load()
    return copied


def _with_scratch(config: DictConfig, words: list[str]) -> DictConfig:
    """`config` with the scratch folder of this sweep."""
    if words:
        with open_dict(config):
            given = config.hydra.overrides.hydra
            config.hydra.overrides.hydra = [*words, *(word for word in given if not word.startswith(_SCRATCH))]
            config.hydra.sweep.dir = words[-1].removeprefix(_SCRATCH).strip("'")
    return config
