"""`hydra.job.chdir=true`: the ranks of a run work in its own directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host.environment import Attached

KEY = "hydra.job.chdir"
# The paths that a run reads or writes; `~` is expanded already. `resume` may be a word.
_PATHS = ("runs", "resume", "dataset.path", "model.source", "model.from_hf", "init.weights")
_WORDS = ("latest", "auto")


@contextmanager
def inside(
    config: Config, is_requested: bool, created: Callable[[Path], None] | None = None
) -> Iterator[tuple[Config, dict[str, Any]]]:
    """(the configuration to start, the argument `created` of `start`), so that it changes to the run's directory.

    Relative paths then still mean files of the directory in which the program was started, which is restored. Nothing
    changes unless `asked`. created: is called with the run's directory, too.
    """
    if not is_requested:
        yield config, {"created": created} if created else {}
        return
    before = os.getcwd()

    def enter(directory: Path) -> None:
        if created:
            created(directory)
        os.chdir(directory)

    try:
        yield absolute(config), {"created": enter}
    finally:
        os.chdir(before)


def absolute(config: Config) -> Config:
    for key in _PATHS:
        section, _, name = key.rpartition(".")
        holder: Any = getattr(config, section) if section else config
        value = getattr(holder, name)
        if value is not None and value not in _WORDS:
            changed = replace(holder, **{name: os.path.abspath(value)})
            sections: dict[str, Any] = {section: changed}
            config = replace(config, **sections) if section else changed
    return config


def check(is_requested: bool, attached: Attached | None) -> None:
    """Raise ConfigError where the ranks are started by another launcher, which has chosen their directory."""
    if is_requested and attached is not None:
        cause = f"{KEY}=true: {attached.source} has chosen the directory of the ranks that it has started"
        raise ConfigError(Problem(cause, KEY, f"{KEY}=false"))
