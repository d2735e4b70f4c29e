"""Hydra's own configuration before Hydra runs: whether it asks for a sweep, and whether a recipe may have set it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from typing import Any, cast, get_type_hints

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import sweeps, user_folders
from parallelrun.config.recipes import untrusted

# Hydra 1.3 must be told not to behave like 1.1; 1.4 warns when it is told.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep that Hydra's own configuration gives, read before the sweep starts.

    directory: `hydra.sweep.dir`, if given. counts_failures: the sweeper would stop at the first failed point.
    uses_plugin: the launcher or the sweeper is not Hydra's own, and may store files.
    """

    is_sweep: bool
    directory: str | None
    counts_failures: bool
    uses_plugin: bool


def of_sweep(argv: Sequence[str]) -> SweepSettings | None:
    """The settings, wherever they were made: on the command line, or in a file of `--config-dir`.

    None for a primary configuration of the user's own, which cannot be composed here. Raises ConfigError for a setting
    that we do not support.
    """
    if _has_own_primary(argv):
        return None
    first = next(index for index, word in enumerate(argv) if word.startswith("verb="))  # the flags are before it
    words = [word for word in argv[first:] if not sweeps.is_swept(word)]
    with hydra.initialize_config_module("parallelrun.conf", job_name="parallelrun", **VERSION_BASE):
        config = hydra.compose("config", [*words, *search_path(argv)], return_hydra_config=True)
        with as_running(config):
            refuse_chdir(config.hydra)
            directory = str(config.hydra.sweep.dir)
            choices = config.hydra.runtime.choices
            return SweepSettings(
                is_sweep=config.hydra.mode == RunMode.MULTIRUN,
                directory=None if directory == "." else directory,
                counts_failures=config.hydra.sweeper.get("max_failure_rate") == 0,
                uses_plugin=any(choices[f"hydra/{kind}"] != "basic" for kind in ("launcher", "sweeper")),
            )


def refuse_chdir(hydra_config: Any) -> None:
    """Raise ConfigError if Hydra shall change to a directory of its own. hydra_config: its section `hydra`."""
    if hydra_config.job.chdir:
        cause = "ranks work in the directory in which the program was started; a run's files are in its run directory"
        raise ConfigError(Problem(cause, "hydra.job.chdir", "hydra.job.chdir=false", kind="not_built"))


@contextmanager
def as_running(config: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` and `hydra_task` find the settings of `config` as those of the running task."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def check(argv: Sequence[str], untrusted_recipes: Mapping[str, str]) -> None:
    """Raise ConfigError if an untrusted recipe changes Hydra's own configuration, which names code and folders.

    Hydra instantiates its launcher and sweeper before it calls our task, so this check comes before Hydra runs. A
    primary configuration of the user's own (`--config-name`) cannot be composed here; then only the texts of the
    recipes are checked. untrusted_recipes: their names, with the file to blame.
    """
    if not untrusted_recipes or _has_own_primary(argv):
        return
    own = [word for word in argv if word.startswith(("hydra.", "hydra/", "+hydra", "++hydra"))]
    own += search_path(argv)
    with hydra.initialize_config_module("parallelrun.conf", **VERSION_BASE):
        plain = _hydra_settings(own)
        for name, where in untrusted_recipes.items():
            if _hydra_settings([*own, f"recipe={name}"]) != plain:
                raise ConfigError(Problem("a recipe may not set hydra", where, command=untrusted.TRUST))


def search_path(flags: Sequence[str]) -> list[str]:
    """The override that does in a single composition what `--config-dir` among `flags` does in `run_hydra`."""
    named = user_folders.flag_values(flags, "--config-dir", "-cd")
    folders = ",".join(f"'file://{os.path.abspath(folder)}'" for folder in named)
    return [f"hydra.searchpath=[{folders}]"] if folders else []


def _hydra_settings(overrides: list[str]) -> dict[str, Any]:
    """Hydra's own configuration under some overrides, without its copies of the overrides."""
    node = hydra.compose("config", overrides, return_hydra_config=True)["hydra"]
    settings = cast(dict[str, Any], OmegaConf.to_container(node, resolve=False))
    settings["job"].pop("override_dirname")
    return {key: value for key, value in settings.items() if key not in ("overrides", "runtime")}


def unknown_key(key: str) -> Problem | None:
    """The problem with an override of Hydra's own configuration that it does not have, which it would take with `++`.

    What launchers, sweepers and loggers hold is not known here: each has keys of its own.
    """
    node: Any = HydraConf
    names = key.replace("/", ".").split(".")
    for depth, name in enumerate(names[1:], 1):
        if not is_dataclass(node):
            return None
        types = get_type_hints(node)
        legal = [*types, *(("env", "output") if depth == 1 else ())]
        if name not in legal:
            where = ".".join(names[:depth])
            fixes = " or ".join(f"{where}.{other}=..." for other in get_close_matches(name, legal))
            return Problem(f"{key}: no such key; {where} has {', '.join(legal)}", key, fixes)
        node = types.get(name)
    return None


def _has_own_primary(argv: Sequence[str]) -> bool:
    return bool(user_folders.flag_values(argv, "--config-name", "-cn", "--config-path", "-cp"))
