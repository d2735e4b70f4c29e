"""Hydra's source of the schema and of the built-in groups: each is read once per process, then copied.

Hydra would parse each file again in every composition, and copy the schema three times node by node, which took a third
of the time of composing. Both classes are plug-ins in Hydra's sense (its documentation: "ConfigSource", "SearchPath").
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra._internal import defaults_list
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from parallelrun.config import presets
from parallelrun.config.recipes.recipe_check import LOADER
from parallelrun.config.schema.strategy_keys import complete_class

if TYPE_CHECKING:
    from omegaconf import Container

CONF = "pkg://parallelrun.conf"
SCHEMA = "base_schema"


class BuiltInSource(ConfigSource):
    """The schema; with the path `parallelrun://conf` also the files of `parallelrun.conf`, and the user's clusters."""

    @staticmethod
    def scheme() -> str:
        return "parallelrun"

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml")
        if not self.is_config(name):
            raise ConfigLoadError(f"Config not found: {name}")
        own = self._own(name)
        if own is not None:
            text = own.read_text(encoding="utf-8")
            node: Container = OmegaConf.load(own)  # an error of its syntax names the file
        else:
            text = "" if name == SCHEMA else _texts()[name]
            node = _schema() if name == SCHEMA else _parsed(name)
        return ConfigResult(self.provider, self.full_path(), node, self._get_header_dict(text))

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return self._has_files and any(name.startswith(f"{config_path.rstrip('/')}/") for name in _texts())

    def is_config(self, config_path: str) -> bool:
        name = config_path.removesuffix(".yaml")
        return name == SCHEMA or (self._has_files and name in _texts()) or self._own(name) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return nothing, because Hydra lists the same files of `pkg://parallelrun.conf`."""
        return []

    def _own(self, name: str) -> Path | None:
        """The file of a cluster of the user's own (`parallelrun calibrate`)."""
        group, _, option = name.partition("/")
        return presets.own_file(group, option) if self._has_files and option else None

    @property
    def _has_files(self) -> bool:
        return self.path == "conf"


class BuiltInSearchPath(SearchPathPlugin):
    """Puts `BuiltInSource` before `pkg://parallelrun.conf`; beside a user's own primary folder it has the schema."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any(element.path == CONF for element in search_path.get_path()):
            search_path.prepend("parallelrun", "parallelrun://conf", SearchPathQuery(path=CONF))
        else:
            search_path.append("parallelrun", "parallelrun://schema")


@cache
def register() -> None:
    """Make both known to Hydra, and let its one store be one."""
    Plugins.instance().register(BuiltInSource)
    Plugins.instance().register(BuiltInSearchPath)
    # Hydra copies its sources in every composition, and one of them refers to all that is stored: a seventh of the
    # time. It copies once more what it loads from there, so nobody can change the one store of the process.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    _map_choices_where_asked()


def _map_choices_where_asked() -> None:
    """Hydra 1.3 writes down all choices after each file that it reads, a seventh of the time; only an interpolation in
    a defaults list asks for them. Hydra 1.4 waits for one, and so do we."""
    make = getattr(defaults_list, "_create_interpolation_map", None)

    def make_if_asked(overrides: Any, defaults: list[Any], *rest: Any) -> Any:
        assert make is not None
        return make(overrides, defaults, *rest) if any(one.is_interpolation() for one in defaults) else None

    if make is not None:
        defaults_list._create_interpolation_map = make_if_asked  # type: ignore[assignment]


def _schema() -> Container:
    pickled, types = _pickled_schema()
    copied: Container = _Unpickler(pickled, types).load()
    return copied


@cache
def _pickled_schema() -> tuple[bytes, dict[str, type]]:
    """The schema's node, and the dataclasses of its sections, which pickle cannot find by their names."""
    node = OmegaConf.structured(complete_class(), flags={"no_deepcopy_set_nodes": True})
    node._set_flag("no_deepcopy_set_nodes", None)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(node)
    return buffer.getvalue(), pickler.types


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


@cache
def _texts() -> dict[str, str]:
    """The text of every built-in file by its name for Hydra, as `model/gpt`."""
    folder = presets.folder()
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.yaml")
    }


def _parsed(name: str) -> Container:
    copied: Container = pickle.loads(_pickled(name))
    return copied


@cache
def _pickled(name: str) -> bytes:
    content = yaml.load(_texts()[name], Loader=LOADER)
    return pickle.dumps(OmegaConf.create(content or {}), pickle.HIGHEST_PROTOCOL)
