"""The result of a search, on screen and as JSON: the best plans side by side, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallelrun.base.wording import counted, gib
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.resolve.shorthands import layouts
from parallelrun.planner.search.fitting_plans import CLOSE, MOST_CLOSE
from parallelrun.planner.search.result import TIE, Found, Search
from parallelrun.report.figures import count_text, seconds_text
from parallelrun.report.plans import waterfall
from parallelrun.report.screen import labelled, print_command, show_section, table, under_one_label

SHOWN = 3  # plans side by side
DEGREES = ("pp", "dp", "cp", "tp", "ep", "layout")  # plans that differ in one of these are shown side by side
MOST_REASONS = 3  # for which plans have no time, or are not legal


def document(result: Search) -> dict[str, Any]:
    """The search for `plan --json`: the fastest plans that fit, by the time of a step, and what became of the rest."""
    return {
        "world": result.world,
        "global_batch": result.global_batch,
        "considered": result.considered,
        "fitting": result.fitting,
        "fitting_at_least": result.fitting if result.is_counted else result.priced,
        "rank": result.rank[1] if result.rank else None,
        "best_rank": result.rank[0] if result.rank else None,
        "counted": result.is_counted,
        "best": [plan_document(plan) for plan in result.best[:SHOWN]],
        "nearest": plan_document(result.nearest) if result.nearest else None,
        "removed": [
            {"rule": row.rule, "candidates": row.candidates, "example": row.example} for row in result.removed
        ],
        "unpriced": [
            {"overrides": list(plan.overrides), "reason": plan.reason, "plans": result.num_unpriced[plan.reason]}
            for plan in result.unpriced
        ],
    }  # fmt: skip


def plan_document(plan: Found) -> dict[str, Any]:
    """One plan of a search; seconds add up to step_s."""
    time = timed(plan)
    return {
        "overrides": list(plan.overrides),
        "step_s": time.step_s,
        "p10_s": time.p10_s,
        "p90_s": time.p90_s,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": time.mfu,
        "heaviest_gib": plan.heaviest_bytes / 2**30,
        "fits": plan.fits,
        "parts": dict(time.parts),
    }


def timed(plan: Found) -> StepTime:
    """The time of a plan that is known to have one."""
    assert plan.time is not None
    return plan.time


def show(
    result: Search,
    config: Config,
    command: str,
    console: Console,
    more: Sequence[tuple[str, RenderableType]] = (),
    filled: Sequence[str] = (),
) -> None:
    """Print a search that has found a plan.

    config: as given. command: runs the best plan. more: labelled lines before it. filled: as those of a plan.
    """
    shown = side_by_side(result.best)
    title = (
        f"search: {config.model.preset} on {counted(result.world, 'device')} of {config.cluster.name}, {_batch(result)}"
    )
    first = [("filled in", Text(text.replace("(filled: ", "("), "cyan")) for text in filled]
    head = labelled([*first, ("searched", Text(_searched(result, config))), ("best", Text(_verdict(result)))])
    most = (1 + TIE) * timed(result.fastest).step_s
    tied = [timed(plan).step_s <= most for plan in shown]
    reasons = under_one_label("why", (f"plan 1 {'against' if is_tied else 'beats'} plan {number}: "
                                      f"{waterfall.why(timed(shown[0]), timed(other))}"
                                      for number, other, is_tied in zip((2, 3), shown[1:], tied[1:])))  # fmt: skip
    tail = [
        *_ties(tied),
        *reasons,
        *_close(result, shown[0], config),
        *_nearest(result, config),
        *_unpriced(result),
        *more,
    ]
    parts: list[RenderableType] = [head, Text(), _columns(shown, config)]
    if tail:
        parts += [Text(), labelled(tail)]
    show_section(title, Group(*parts), console)
    console.print("run it:")
    print_command(command, console)


def rank_rows(result: Search | None, mine: StepTime, fits: str) -> list[tuple[str, RenderableType]]:
    """Where a plan stands among all plans of as many ranks and samples; what is faster, and why.

    result: None where no plan fits. mine: its time. fits: yes | no | unknown.
    """
    if result is None:
        return [("rank", Text("no plan that a search tries fits as many devices"))]
    best = result.best[0]
    time, count = timed(best), f"{'' if result.is_counted else 'at most '}{counted(result.fitting, 'plan')} that fit"
    if fits == "yes" and mine.step_s <= time.step_s:
        return [("rank", Text(f"the fastest of {count}"))]
    behind = f"{mine.step_s / time.step_s:.2f} times the fastest"
    assert result.rank is not None, "a plan is compared"
    first, last = result.rank
    rank = f"{f'{first:,} to ' if first < last else ''}{last:,} of {count}, {behind}"
    if fits != "yes":
        rank = f"{'it does not fit' if fits == 'no' else 'it may not fit'}; {behind} of {count}"
    fastest = f"{' '.join(best.overrides)}: {seconds_text(time.step_s)} a step, {gib(best.heaviest_bytes)}"
    return [
        ("rank", Text(rank)),
        ("fastest", Text(fastest)),
        ("why", Text(f"the fastest is {waterfall.why(time, mine)}")),
    ]


def too_many(number: int) -> Text:
    """Return the note that a plan is compared with so many others only on request."""
    return Text(f"not compared with more than {number:,} other plans; explain=true does, in seconds")


def side_by_side(best: Sequence[Found]) -> list[Found]:
    """The first plan, and the fastest ones that differ from all before in a degree or the tensor layout.

    Where there are too few of those, the next fastest ones.
    """
    by_degrees: dict[tuple[str, ...], Found] = {}
    for plan in best:
        by_degrees.setdefault(degrees(plan), plan)
    different = list(by_degrees.values())[:SHOWN]
    others = [plan for plan in best if plan not in different][: SHOWN - len(different)]
    return [best[0], *sorted([*different[1:], *others], key=lambda plan: timed(plan).step_s)]


def degrees(plan: Found) -> tuple[str, ...]:
    """Return the overrides of a plan that are degrees or the tensor layout."""
    return tuple(text for text in plan.overrides if text.partition("=")[0] in DEGREES)


def _batch(result: Search) -> str:
    """`4.19 M tokens a step (2,048 samples of 2,048)`; of images, the samples."""
    best, samples = result.best[0], counted(result.global_batch, "sample")
    tokens = round((best.tokens_per_s or 0.0) * timed(best).step_s)
    if tokens <= result.global_batch:
        return f"{samples} a step"
    return f"{count_text(tokens)} tokens a step ({samples} of {tokens // result.global_batch:,})"


def _searched(result: Search, config: Config) -> str:
    text = f"{counted(result.considered, 'legal plan')} in {config.precision.name}"
    if not config.cluster.memory_gb:
        return text
    fit = f"fit the {gib(config.cluster.memory_gb * 1e9)} of a device"
    if result.is_counted:
        return f"{text}; {result.fitting:,} of them {fit}"
    return f"{text}; bounds of their time and memory rule out all but {result.priced:,}, which {fit}"


def _ties(tied: Sequence[bool]) -> list[tuple[str, Text]]:
    """The note on plans that no prediction tells apart. tied: which of the plans side by side."""
    if sum(tied) == 1:
        return []
    numbers = " and ".join(str(number) for number, is_tied in enumerate(tied, 1) if is_tied)
    text = f"plans {numbers} are within {TIE:.0%}, which no prediction tells apart; plan 1 is the simplest"
    return [("ties", Text(text.replace("1 and 2 and", "1, 2 and")))]


def _verdict(result: Search) -> str:
    best, time = result.best[0], timed(result.best[0])
    return (
        f"{seconds_text(time.step_s)} a step ({seconds_text(time.p10_s)} to {seconds_text(time.p90_s)}), "
        f"{count_text(result.best[0].tokens_per_s or 0.0)} tokens/s, {time.mfu:.0%} of the peak, "
        f"{gib(best.heaviest_bytes)} on the heaviest rank"
    )


def _columns(shown: Sequence[Found], config: Config) -> Table:
    """The plans side by side: what they differ in, then the parts of a step, then what follows from them."""
    times = [timed(plan) for plan in shown]
    unit = waterfall.unit_of(max(time.step_s for time in times))
    drawn = table("", *(f">{number}" for number in range(1, len(shown) + 1)), rule=False, padding=(0, 3, 0, 0))
    settings = {key: [_setting(plan, key, config) for plan in shown] for key in _keys(shown)}
    equal = {key for key, values in settings.items() if len(set(values)) == 1 and len(shown) > 1}
    common = [f"{_label(key)}={settings[key][0]}" for key in settings if key in equal]
    for key, values in settings.items():
        if key not in equal:
            drawn.add_row(_label(key), *values)
    if common:
        drawn.caption, drawn.caption_justify = f"the same in all: {' '.join(common)}", "left"
    drawn.add_row(f"parts of a step, {unit[0]}", style="dim")
    *parts, total = waterfall.columns(times, unit)
    for name, figures in parts:
        drawn.add_row(f"  {name}", *figures)
    drawn.add_row(total[0], *total[1], style="bold")
    drawn.add_row("tokens/s per GPU", *(count_text(time.tokens_per_s_per_gpu) for time in times))
    drawn.add_row("part of the peak", *(f"{time.mfu:.0%}" for time in times))
    drawn.add_row("memory", *(gib(plan.heaviest_bytes) for plan in shown))
    return drawn


def _keys(shown: Sequence[Found]) -> list[str]:
    """The keys that any plan sets, degrees first."""
    return list(dict.fromkeys(text.partition("=")[0] for plan in shown for text in plan.overrides))


def _label(key: str) -> str:
    """`strategy.data.kind` -> data; `strategy.tensor.sequence_parallel` -> sequence_parallel; expert.tp is no tp."""
    *sections, last = key.split(".")
    return sections[-1] if last == "kind" else key.removeprefix("strategy.") if last in DEGREES else last


def _setting(plan: Found, key: str, config: Config) -> str:
    """The value of a key in a plan: as it sets it, else that of the configuration."""
    own = dict(text.split("=", 1) for text in plan.overrides)
    if key in own:
        return own[key]
    strategy = config.strategy
    if key == "layout":
        return next(name for name, kind in layouts().items() if kind == strategy.tensor.kind)
    short = {"schedule": "strategy.pipeline.kind", "virtual_stages": "strategy.pipeline.virtual_stages"}
    if key in short and own.get("pp", str(config.pp)) == "1":
        return "-"
    value = attrgetter(short.get(key, key))(config)
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _close(result: Search, first: Found, config: Config) -> list[tuple[str, Text]]:
    """Variants of the best plan, of the same degrees, that are about as fast."""
    texts: dict[str, None] = {}
    for other in result.best:
        more = timed(other).step_s / timed(first).step_s - 1
        if other is not first and degrees(other) == degrees(first) and more <= CLOSE:
            texts[f"{_difference(other, first, config)} (+{more:.1%})"] = None
    return [("nearly as fast", Text("; ".join(list(texts)[:MOST_CLOSE])))] if texts else []


def _difference(other: Found, first: Found, config: Config) -> str:
    """The settings of a plan that another one has not: `data=zero1 recompute=none`."""
    settings = {key: (_setting(other, key, config), _setting(first, key, config)) for key in _keys([first, other])}
    own_ones = [f"{_label(key)}={own}" for key, (own, first_value) in settings.items() if own not in (first_value, "-")]
    unset = [
        f"{_label(key)}={first_value}" for key, (own, first_value) in settings.items() if own == "-" != first_value
    ]
    return " ".join(own_ones) or f"without {' '.join(unset)}"


def _nearest(result: Search, config: Config) -> list[tuple[str, Text]]:
    if result.nearest is None or not config.cluster.memory_gb:
        return []
    nearest = result.nearest
    gained = timed(result.best[0]).step_s - timed(nearest).step_s
    over = nearest.heaviest_bytes - config.cluster.memory_gb * 1e9
    lacks = f"{gib(over)} more than a device has" if nearest.fits == "no" else "so close to all that it may not fit"
    plan, needs = " ".join(nearest.overrides), gib(nearest.heaviest_bytes)
    return [("too large", Text(f"{plan} would be {seconds_text(gained)} faster; it needs {needs}, {lacks}"))]


def _unpriced(result: Search) -> list[tuple[str, Text]]:
    return under_one_label("no time", (
        f"{counted(result.num_unpriced[group.reason], 'plan')} ({group.reason}), such as {' '.join(group.overrides)}"
        for group in result.unpriced[:MOST_REASONS]))  # fmt: skip
