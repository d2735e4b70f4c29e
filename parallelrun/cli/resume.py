"""`resume=latest`: continue the newest run with its saved configuration and the changes of the command line."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.checkpoint.resume import LATEST, newest, no_checkpoint, saved_config
from parallelrun.config.compose import Composed
from parallelrun.config.continued import continued, differences


def with_saved_configuration(composed: Composed, world: int | None) -> Composed:
    """`composed`, or for `resume=latest` the continued run's configuration, which is announced on stderr.

    world: the number of ranks that another launcher has started. Raises CheckpointError, ConfigError.
    """
    asked = composed.config
    if asked.resume != LATEST or asked.verb not in ("run", "plan"):
        return composed
    found = newest(Path(asked.runs).expanduser())
    if found is None:
        raise no_checkpoint(asked.runs)
    among = f"the newest checkpoint of {found.num_runs} run{'s' * (found.num_runs > 1)} under {asked.runs}"
    said = f"resume=latest: step {found.step} of {os.path.relpath(found.run)}, {among}"
    saved = saved_config(found.run)
    if saved is None:
        print(f"{said}; it has no config.yaml, so this command's configuration is used", file=sys.stderr)
        return composed
    config = continued(asked, composed.given, saved, world)
    _refuse_code(config.model.source, composed.given)
    changed = differences(config, saved, composed.given)
    kept = f"with that run's configuration (checkpoint.every={config.checkpoint.every}"
    print(f"{said}; {kept}{', changed: ' if changed else ''}{', '.join(changed)})", file=sys.stderr)
    return replace(composed, config=replace(config, resume=str(found.run)))


def _refuse_code(source: str | None, given: frozenset[str]) -> None:
    """Refuse code that only the run directory names: it may come from a stranger."""
    if source is not None and "model.source" not in given:
        cause = f"that run trains the module {source}, and code must be named on the command line"
        raise ConfigError(Problem(cause, "resume", f"the same command with model=module model.source={source}"))
