"""`plan` without a strategy, and `strategy=auto`: a search, and what is printed of it. No torch here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from parallelrun.cli.verbs import print_json
from parallelrun.config.compose import Composed
from parallelrun.errors import ConfigError, Problem
from parallelrun.launch.environment import visible_gpus
from parallelrun.plan import chosen
from parallelrun.plan.goodput import Goodput, goodput
from parallelrun.plan.resolve import resolve
from parallelrun.plan.rules import VERBS
from parallelrun.plan.search.result import Found, Search
from parallelrun.plan.step_time.step import why_unknown

if TYPE_CHECKING:
    from rich.console import Console

    from parallelrun.config.schema import Config
    from parallelrun.plan.facts import Facts
    from parallelrun.plan.sizes import Size
    from parallelrun.plan.structure import Plan
    from parallelrun.report.search import Context

KEPT = 24  # plans, from which the ones that are shown side by side are taken


def show(composed: Composed, world: int | None, as_json: bool) -> None:
    """Search, and print the best plans. world: the number of ranks that a launcher has started. Raises ConfigError."""
    from parallelrun.plan import sizes
    from parallelrun.report import search as report

    composed = replace(composed, config=chosen.calibrated(composed.config, composed.given))
    config, gpus = composed.config, visible_gpus()
    compared = None
    if sizes.compares_sizes(config):
        compared = sizes.compared(config, composed.given, KEPT)
        found = compared[1].found
        typed = [text for text in composed.overrides if text.partition("=")[0] not in ("gpus", "world")]
        config = replace(config, world=found.world)
        composed = replace(composed, config=config, overrides=(*typed, f"gpus={found.world}"))
    else:
        found = chosen.searched(config, composed.given, chosen.num_devices(config, world, gpus), gpus, KEPT)
    context = report.Context(chosen.base_of(config), command_of(found.best[0], composed.overrides))
    useful = _goodput(composed, found.best[0])
    if as_json:
        print_json({**_document(found, context, compared), "goodput": asdict(useful) if useful else None})
        return
    from parallelrun.report import sizes as sizes_report
    from parallelrun.report.screen import open_console

    console = open_console(emoji=False)
    if compared:
        sizes_report.show(*compared, config, console)
    training = sizes.training_of(config, found)
    more = [("training", sizes_report.training_text(training, config))] if training else []
    if useful:
        from parallelrun.report.training import goodput_text

        more.append(("goodput", goodput_text(useful, None)))
    if faster := chosen.faster_precision(config, composed.given):
        more.append(("precision", faster))
    report.show(found, context, console, more)
    if config.explain:
        _explain(composed, found, console)


def _goodput(composed: Composed, best: Found) -> Goodput | None:
    """The useful part of the time of the fastest plan, if failures are given."""
    if composed.config.mtbf_gpu_hours is None:
        return None
    config, given = chosen.with_choice(composed.config, composed.given, best)
    plan = resolve(config, given=given, gpus=visible_gpus())
    return goodput(plan, config, best.time.step_s if best.time else None)


def _document(found: Search, context: Context, compared: tuple[list[Size], Size] | None) -> dict[str, Any]:
    from parallelrun.report import search as report
    from parallelrun.report import sizes as sizes_report

    config = context.config
    fields = {"schema": 1, "model": config.model.preset, "cluster": config.cluster.name, "world": found.world}
    fields |= {"sizes": sizes_report.document(*compared)} if compared else {}
    return {**fields, "search": report.document(found), "command": context.command}


def _explain(composed: Composed, found: Search, console: Console) -> None:
    """Print why the best plan takes its time, and where another one would win."""
    from parallelrun.plan.flips import flips
    from parallelrun.plan.limits import limits
    from parallelrun.report import why

    best, cluster = found.best[0], composed.config.cluster
    assert best.time is not None
    config, given = chosen.with_choice(composed.config, composed.given, best)
    limited = limits(resolve(config, given=given, gpus=visible_gpus()), cluster, best.time)
    elsewhere = flips(composed.config, composed.given, found)
    why.show(best.time, limited, elsewhere, (best.heaviest_bytes, cluster), best, console)


def among_all(plan: Plan, config: Config, facts: Facts) -> Search | None:
    """The search among all plans of as many ranks and samples; None where times are not predicted.

    Only if `explain` asks for it: a hundred thousand plans take seconds.
    """
    return chosen.among_all(plan, config, facts.time, visible_gpus()) if config.explain and facts.time else None


def rank_document(found: Search | None) -> dict[str, Any]:
    """The field of `plan --json` on the rank of the plan."""
    from parallelrun.report import search as report

    return {"search": report.document(found) if found else None}


def show_rank(plan: Plan, config: Config, facts: Facts, found: Search, console: Console) -> None:
    """Print where a plan stands among all others."""
    from parallelrun.plan import cluster_cost
    from parallelrun.report import search as report

    assert facts.time is not None
    memory = facts.memories[facts.heaviest_pp_rank]
    report.show_rank(found, facts.time, cluster_cost.fits(memory, config.cluster), console)


def explain_plan(plan: Plan, config: Config, facts: Facts, console: Console) -> None:
    """Print the parts of a step of a plan, and what limits it. Raises ConfigError where its time is not predicted."""
    from parallelrun.plan.limits import limits
    from parallelrun.report import why

    if facts.time is None:
        what = f"the time of this plan is not predicted: {why_unknown(plan, config.cluster)}"
        raise ConfigError(Problem(what, "explain", "leave explain out, or cluster=h100_dgx"))
    limited = limits(plan, config.cluster, facts.time)
    heaviest = facts.memories[facts.heaviest_pp_rank].total
    why.show(facts.time, limited, ((), True), (heaviest, config.cluster), None, console)


def with_winner(composed: Composed, world: int | None, quiet: bool = False) -> Composed:
    """`composed` with the fastest plan in the place of a strategy that searches. Raises ConfigError."""
    config, gpus = chosen.calibrated(composed.config, composed.given), visible_gpus()
    found = chosen.searched(config, composed.given, chosen.num_devices(config, world, gpus), gpus, 1)
    best = found.best[0]
    assert best.time is not None
    if not quiet:
        from parallelrun.report.figures import seconds_text

        said = f"strategy={config.strategy.name}: {' '.join(best.overrides)}: {seconds_text(best.time.step_s)} a step"
        print(f"{said} predicted, the fastest of {found.fitting:,} plans", file=sys.stderr)
    changed, given = chosen.with_choice(config, composed.given, best)
    return replace(composed, config=changed, given=given)


def command_of(found: Found, typed: Sequence[str]) -> str:
    """The command that runs a plan which a search has found. typed: the overrides of the search."""
    own = {text.partition("=")[0] for text in found.overrides}
    dropped = {"strategy", *VERBS, *own, *(["local_batch"] if "global_batch" in own else [])}
    kept = [text for text in typed if text.partition("=")[0] not in dropped]
    return shlex.join(["parallelrun", *kept, *found.overrides])
