"""Overrides to a configuration, in a process that may have a Hydra of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parallelrun.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from parallelrun.cli.argv import CommandLine
    from parallelrun.config.compose import Composed

Folder = str | os.PathLike[str]
_HYDRA_KEY = "hydra.run.dir"  # the only setting of Hydra's that has a meaning without its command line
_LOCK = threading.RLock()  # Hydra composes in objects that the whole process shares


def composed(
    verb: str, overrides: Sequence[str], config_dir: Folder | None, trust: bool
) -> tuple[Composed, Path | None]:
    """(the configuration of `overrides`, the run directory that they ask for).

    Raises ConfigError with all mistakes in the overrides. A Hydra application that calls this keeps its own state.
    """
    from parallelrun.cli import argv, errors, verbs
    from parallelrun.config import compose, hydra_settings

    words = [verb, *_words(overrides), *(["--trust"] if trust else [])]
    words += ["--config-dir", os.fspath(config_dir)] if config_dir is not None else []
    argv.refuse_pickles(words)
    line = argv.read(words)
    _refuse_settings_of_hydra(line)
    with _LOCK, _hydra_as_found():
        try:
            prepared = compose.prepare(line.overrides, line.flags, verb, trust)
            settings = prepared.argv[len(line.flags) :]
            result, directory = compose.compose_once(
                replace(prepared, argv=(*settings, *hydra_settings.search_path(line.flags)))
            )
            return verbs.with_surroundings(result, None), directory
        except Exception as error:
            translated = errors.translate(error)
            if translated is None or translated is error:
                raise
            raise translated from error


def _words(overrides: Sequence[str]) -> list[str]:
    """The overrides, each of which must be a text."""
    for override in overrides:
        if not isinstance(override, str):
            cause = f"{override!r} is {type(override).__name__}, and overrides are texts"
            raise ConfigError(Problem(cause, "overrides", '"model=gpt", "tp=2"'))
        if override.startswith("-"):
            cause = f"{override}: flags are for the command line"
            raise ConfigError(Problem(cause, "overrides", "config_dir=, trust= and show= of the function"))
    return list(overrides)


def _refuse_settings_of_hydra(line: CommandLine) -> None:
    for override in line.overrides:
        if override.is_hydra and override.key != _HYDRA_KEY:
            cause = f"{override.text}: Hydra's own settings are for the command line"
            raise ConfigError(Problem(cause, override.key, f"leave it out; {_HYDRA_KEY}= can be given"))


@contextmanager
def _hydra_as_found() -> Iterator[None]:
    """Let Hydra compose another application for a while, and restore what the one in this process has set."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    groups, version = ConfigStore.instance().repo, VersionBase.instance()
    application, base, recipes = GlobalHydra.instance(), version.version_base, groups.get("recipe")
    running = application.hydra
    application.clear()
    try:
        yield
    finally:
        application.hydra = running
        GlobalHydra.set_instance(application)
        version.version_base = base
        groups.pop("recipe", None)
        if recipes is not None:
            groups["recipe"] = recipes
