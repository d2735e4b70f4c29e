"""Hydra's source of the schema and of the built-in groups: each file is parsed once per process.

Both classes are plug-ins in Hydra's sense (its documentation: "ConfigSource", "SearchPath"). Hydra's own source would
parse each file again in every composition of a sweep.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
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
    """Make both known to Hydra."""
    Plugins.instance().register(BuiltInSource)
    Plugins.instance().register(BuiltInSearchPath)


def _schema() -> Container:
    """A copy of the schema's node: it takes 6 ms, building it 29 ms (0.6 s in a sweep of ten points)."""
    schema: type = complete_class()
    return copy.deepcopy(_structured(schema))


@cache
def _structured(schema: type) -> Container:
    node: Container = OmegaConf.structured(schema)
    return node


@cache
def _texts() -> dict[str, str]:
    """The text of every built-in file by its name for Hydra, as `model/gpt`."""
    folder = presets.folder()
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.yaml")
    }


def _parsed(name: str) -> Container:
    return OmegaConf.create(_content(name))


@cache
def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] | None = yaml.load(_texts()[name], Loader=LOADER)
    return content or {}
