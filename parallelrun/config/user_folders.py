"""The folders of configuration that a user adds to ours, found as Hydra finds them. Only plug-ins import Hydra.

They are searched after ours, so an option of ours is never hidden: `--config-dir`, `hydra.searchpath` on the command
line, and Hydra's search path plug-ins of installed packages.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module, util
from itertools import pairwise
from pathlib import Path
from typing import cast

_SEARCH_PATH = re.compile(r"\+{0,2}hydra\.searchpath=\[(.*)\]", re.DOTALL)
_NO_SEARCH_PATH = re.compile(r"hydra_\w+_(launcher|sweeper)|hydra_colorlog")  # plug-ins of other kinds, slow to import


def flag_values(argv: Sequence[str], *names: str) -> list[str]:
    """The values of a Hydra flag, written as `--flag value` or `--flag=value`."""
    apart = [value for flag, value in pairwise(argv) if flag in names]
    return apart + [word.partition("=")[2] for word in argv if word.partition("=")[0] in names and "=" in word]


def folders(words: Sequence[str]) -> list[Path]:
    """The folders that exist, in Hydra's order. words: a command line."""
    named = [name for name in flag_values(words, "--config-dir", "-cd") if name][:1]
    for word in words:
        if match := _SEARCH_PATH.fullmatch(word):
            named += [item.strip().strip("'\"") for item in match[1].split(",") if item.strip()]
    folders = [_folder(name) for name in (*named, *_of_plug_ins())]
    return [path for path in dict.fromkeys(folders) if path is not None and path.is_dir()]


def _folder(name: str) -> Path | None:
    """The folder of an entry of Hydra's search path: a path, `file://path` or `pkg://package.module`."""
    if not name.startswith("pkg://"):
        return Path(name.removeprefix("file://")).expanduser()
    try:
        spec = util.find_spec(name.removeprefix("pkg://"))
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@cache
def _of_plug_ins() -> tuple[str, ...]:
    """Return the config folders that Hydra's search path plug-ins add (classes in the namespace `hydra_plugins`)."""
    try:
        space = import_module("hydra_plugins")
    except ImportError:
        return ()
    if all(_NO_SEARCH_PATH.fullmatch(module.name) for module in pkgutil.iter_modules(space.__path__)):
        return ()
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    path = ConfigSearchPathImpl()
    for plug_in in Plugins.instance().discover(SearchPathPlugin):
        if plug_in.__module__.startswith("hydra_plugins."):
            cast(SearchPathPlugin, plug_in()).manipulate_search_path(path)
    return tuple(element.path for element in path.get_path() if element.path)
