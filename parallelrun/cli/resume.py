"""`resume=latest`: continue the newest run with its saved configuration and the changes of the command line."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import counted
from parallelrun.checkpoint.resume import LATEST, newest, no_checkpoint, saved_config
from parallelrun.config.compose import Composed
from parallelrun.config.continued import continued, differences
from parallelrun.config.kept_model import with_kept
from parallelrun.config.keys import named_code
from parallelrun.config.schema.run_schema import Config


def with_saved_configuration(composed: Composed, world: int | None) -> Composed:
    """`composed`, or for `resume=latest` the continued run's configuration, which is announced on stderr.

    world: the number of ranks that another launcher has started. Raises CheckpointError, ConfigError.
    """
    requested = composed.config
    if requested.resume != LATEST or requested.verb not in ("run", "plan"):
        return composed
    checkpoint = newest(Path(requested.runs).expanduser())
    if checkpoint is None:
        raise no_checkpoint(requested.runs)
    among = f"the newest checkpoint of {counted(checkpoint.num_runs, 'run')} under {requested.runs}"
    said = f"resume=latest: step {checkpoint.step} of {os.path.relpath(checkpoint.run)}, {among}"
    saved = saved_config(checkpoint.run)
    if saved is None:
        print(f"{said}; it has no config.yaml, so this command's configuration is used", file=sys.stderr)
        return composed
    saved = saved if "model.path" in composed.given else with_kept(saved, checkpoint.run)
    config = continued(requested, composed.given, saved, world)
    _refuse_code(config, composed.given)
    changed = differences(config, saved, composed.given)
    settings = f"with that run's configuration (checkpoint.every={config.checkpoint.every}"
    print(f"{said}; {settings}{', changed: ' if changed else ''}{', '.join(changed)})", file=sys.stderr)
    return replace(composed, config=replace(config, resume=str(checkpoint.run)))


def _refuse_code(config: Config, user_keys: frozenset[str]) -> None:
    """Refuse code that only the run directory names: it may come from a stranger."""
    code = named_code(config)
    if unnamed := [source for key, source in code.items() if key not in user_keys]:
        words = " ".join(f"{key}={source}" for key, source in code.items())
        cause = f"that run calls {', '.join(unnamed)}, and code must be named on the command line"
        raise ConfigError(Problem(cause, "resume", f"the same command with model={config.model.preset} {words}"))
