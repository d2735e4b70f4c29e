"""`plan` without a strategy, and `strategy=auto`: a search, and what is printed of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from parallelrun.base import elapsed
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli.json_output import print_json
from parallelrun.config.compose import Composed
from parallelrun.launch.host.environment import visible_gpus
from parallelrun.planner.predict.goodput import Goodput, goodput
from parallelrun.planner.predict.step_time.step import why_unknown
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.rules import VERBS
from parallelrun.planner.search import open_keys as chosen
from parallelrun.planner.search import requested_searches as searches

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from parallelrun.config.schema.run_schema import Config
    from parallelrun.planner.contract.plan import Plan
    from parallelrun.planner.facts.plan_facts import Facts
    from parallelrun.planner.predict.step_time.step import StepTime
    from parallelrun.planner.search.result import Found, Search


_SEARCHING = "searching plans"


def show(composed: Composed, world: int | None, as_json: bool) -> None:
    """Search, and print the best plans. world: the number of ranks that a launcher has started. Raises ConfigError."""
    from parallelrun.planner.search import device_counts
    from parallelrun.report.plans import cluster_sizes as sizes_report
    from parallelrun.report.plans import search as report
    from parallelrun.report.plans import training as training_report

    gpus = visible_gpus()
    config, filled = chosen.calibrated(composed.config, composed.given, gpus)
    composed = replace(composed, config=config)
    compared = None
    if device_counts.compares_sizes(config):
        with elapsed.shown(_SEARCHING):
            compared = device_counts.compared(config, composed.given, searches.KEPT)
        search = compared[1].found
        typed = [text for text in composed.overrides if text.partition("=")[0] not in ("gpus", "world")]
        config = replace(config, world=search.world)
        composed = replace(composed, config=config, overrides=(*typed, f"gpus={search.world}"))
    else:
        with elapsed.shown(_SEARCHING):
            search = searches.searched(config, composed.given, chosen.num_devices(config, world, gpus), gpus)
    base, command = chosen.base_of(config), command_of(search.best[0], composed.overrides)
    useful = _goodput(composed, search.best[0])
    if as_json:
        fields = {"schema": 1, "model": base.model.preset, "cluster": base.cluster.name, "world": search.world}
        fields |= {"sizes": sizes_report.document(*compared)} if compared else {}
        fields |= {"search": report.document(search), "command": command}
        print_json({**fields, "goodput": asdict(useful) if useful else None})
        return
    from parallelrun.report.screen import open_console

    console = open_console()
    if compared:
        sizes_report.show(*compared, config, console)
    training = device_counts.training_of(config, search)
    more = [("training", sizes_report.training_text(training, config))] if training else []
    if useful:
        more.append(("goodput", training_report.goodput_text(useful, None)))
    report.show(search, base, command, console, more, filled)
    if config.explain:
        _explain(composed, search, console)


def _goodput(composed: Composed, best: Found) -> Goodput | None:
    """The useful part of the time of the fastest plan, if failures are given."""
    if composed.config.mtbf_gpu_hours is None:
        return None
    config, user_keys = chosen.with_choice(composed.config, composed.given, best)
    plan = resolve(config, given=user_keys, gpus=visible_gpus())
    return goodput(plan, config, best.time.step_s if best.time else None)


def _explain(composed: Composed, search: Search, console: Console) -> None:
    """Print why the best plan takes its time, and where another one would win."""
    from parallelrun.planner.predict.limits import limits
    from parallelrun.planner.search.crossovers import crossovers
    from parallelrun.report.plans import explain_search

    best, cluster = search.best[0], composed.config.cluster
    assert best.time is not None
    config, user_keys = chosen.with_choice(composed.config, composed.given, best)
    with elapsed.shown(_SEARCHING):
        limited = limits(resolve(config, given=user_keys, gpus=visible_gpus()), cluster, best.time)
        elsewhere = crossovers(composed.config, composed.given, search)
    explain_search.show(best.time, limited, elsewhere, (best.heaviest_bytes, cluster), best, console)


@dataclass(frozen=True)
class Ranked:
    """Where a plan stands among all plans of as many ranks and samples.

    mine, fits: its time, and whether it fits. found: None where there are too many plans to compare (is_large), or none
    that fits.
    """

    mine: StepTime
    fits: str
    found: Search | None
    is_large: bool

    @property
    def is_fastest(self) -> bool:
        """Whether no plan is faster that fits."""
        best = self.found.best[0].time if self.found else None
        return best is not None and self.fits == "yes" and self.mine.step_s <= best.step_s

    def document(self) -> dict[str, Any] | None:
        """The field `search` of `plan --json`."""
        from parallelrun.report.plans import search as report

        return report.document(self.found) if self.found else None

    def rows(self) -> list[tuple[str, RenderableType]]:
        """Labelled lines."""
        from parallelrun.report.plans import search as report

        if self.is_large:
            return [("rank", report.too_many(searches.MOST_RANKED))]
        return report.rank_rows(self.found, self.mine, self.fits)


def ranked(plan: Plan, config: Config, facts: Facts) -> Ranked | None:
    """Compare a plan whose time is predicted with all others; with many only if `explain` asks for it.

    None where its time cannot be compared with that of other plans (servers).
    """
    from parallelrun.planner.predict import cluster_cost

    assert facts.time is not None
    if not searches.has_rank(plan, config):
        return None
    memory = facts.memories[facts.heaviest_pp_rank]
    fits = cluster_cost.fits(memory, config.cluster) if config.cluster.memory_gb else "yes"
    if not config.explain and not searches.is_ranked_soon(plan, config):
        return Ranked(facts.time, fits, None, True)
    with elapsed.shown(_SEARCHING):
        result = searches.among_all(plan, config, facts.time, visible_gpus(), soon=not config.explain)
    return Ranked(facts.time, fits, result, False)


def explain_plan(plan: Plan, config: Config, facts: Facts, ranked: Ranked | None, console: Console) -> None:
    """Print the parts of a step of a plan, what limits it and, if it is the fastest, where another plan would win.

    ranked: among all plans, where it was looked for. Raises ConfigError where its time is not predicted.
    """
    from parallelrun.planner.predict.limits import limits
    from parallelrun.planner.search.crossovers import crossovers
    from parallelrun.report.plans import explain_search

    if facts.time is None:
        cause = f"the time of this plan is not predicted: {why_unknown(plan, config.cluster)}"
        raise ConfigError(Problem(cause, "explain", "leave explain out, or cluster=h100_dgx"))
    limited, memory = limits(plan, config.cluster, facts.time), facts.memories[facts.heaviest_pp_rank].total
    search, best, elsewhere = ranked.found if ranked else None, None, None
    if ranked and search and ranked.is_fastest:
        best = search.best[0]
        with elapsed.shown(_SEARCHING):
            elsewhere = crossovers(searches.opened(plan, config), frozenset(), search)
    explain_search.show(facts.time, limited, elsewhere, (memory, config.cluster), best, console)


def with_winner(composed: Composed, world: int | None, quiet: bool = False) -> Composed:
    """`composed` with the fastest plan in the place of a strategy that searches. Raises ConfigError."""
    gpus = visible_gpus()
    config, _ = chosen.calibrated(composed.config, composed.given, gpus)
    with elapsed.shown(_SEARCHING):
        search = searches.searched(config, composed.given, chosen.num_devices(config, world, gpus), gpus)
    best = search.best[0]
    assert best.time is not None
    if not quiet:
        from parallelrun.report.figures import seconds_text

        said = f"strategy={config.strategy.name}: {' '.join(best.overrides)}: {seconds_text(best.time.step_s)} a step"
        print(f"{said} predicted, the fastest that fits of {search.considered:,} legal plans", file=sys.stderr)
    changed, user_keys = chosen.with_choice(config, composed.given, best)
    return replace(composed, config=changed, given=user_keys)


def command_of(candidate: Found, typed: Sequence[str]) -> str:
    """The command that runs a plan which a search has found. typed: the overrides of the search."""
    own = {text.partition("=")[0] for text in candidate.overrides}
    dropped = {"strategy", *VERBS, *own, *(["local_batch"] if "global_batch" in own else [])}
    others = [text for text in typed if text.partition("=")[0] not in dropped]
    return shlex.join(["parallelrun", *others, *candidate.overrides])
