"""`plan` without a strategy, and `strategy=auto`: a search, and what is printed of it. No torch here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from parallelrun.cli.verbs import print_json
from parallelrun.config.compose import Composed
from parallelrun.launch.environment import visible_gpus
from parallelrun.plan import chosen
from parallelrun.plan.goodput import Goodput, goodput
from parallelrun.plan.resolve import resolve
from parallelrun.plan.rules import VERBS
from parallelrun.plan.search.result import Found

KEPT = 200  # plans, from which the ones that are shown side by side are taken


def show(composed: Composed, world: int | None, as_json: bool) -> None:
    """Search, and print the best plans. world: the number of ranks that a launcher has started. Raises ConfigError."""
    config, gpus = composed.config, visible_gpus()
    found = chosen.searched(config, composed.given, chosen.num_devices(config, world, gpus), gpus, KEPT)
    command = command_of(found.best[0], composed.overrides)
    useful = _goodput(composed, found.best[0])
    from parallelrun.report import search as report

    if as_json:
        print_json({"schema": 1, "model": config.model.preset, "cluster": config.cluster.name,
                    "search": report.document(found), "goodput": asdict(useful) if useful else None,
                    "command": command})  # fmt: skip
        return
    from parallelrun.report.screen import open_console
    from parallelrun.report.training import goodput_text

    more = [("goodput", goodput_text(useful, None))] if useful else []
    report.show(found, report.Context(chosen.base_of(config), command), open_console(emoji=False), more)


def _goodput(composed: Composed, best: Found) -> Goodput | None:
    """The useful part of the time of the fastest plan, if failures are given."""
    if composed.config.mtbf_gpu_hours is None:
        return None
    config, given = chosen.settled(composed.config, composed.given, best)
    return goodput(resolve(config, given=given), config, best.time.step_s if best.time else None)


def settled(composed: Composed, world: int | None, quiet: bool = False) -> Composed:
    """`composed` with the fastest plan in the place of a strategy that searches. Raises ConfigError."""
    config, gpus = composed.config, visible_gpus()
    found = chosen.searched(config, composed.given, chosen.num_devices(config, world, gpus), gpus, 1)
    best = found.best[0]
    assert best.time is not None
    if not quiet:
        from parallelrun.report.figures import seconds_text

        said = f"strategy={config.strategy.name}: {' '.join(best.overrides)}: {seconds_text(best.time.step_s)} a step"
        print(f"{said} predicted, the fastest of {found.fitting:,} plans", file=sys.stderr)
    changed, given = chosen.settled(config, composed.given, best)
    return replace(composed, config=changed, given=given)


def command_of(found: Found, typed: Sequence[str]) -> str:
    """The command that runs a plan which a search has found. typed: the overrides of the search."""
    own = {text.partition("=")[0] for text in found.overrides}
    dropped = {"strategy", *VERBS, *own, *(["local_batch"] if "global_batch" in own else [])}
    kept = [text for text in typed if text.partition("=")[0] not in dropped]
    return shlex.join(["parallelrun", *kept, *found.overrides])
