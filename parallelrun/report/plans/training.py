"""What `parallelrun plan` says of a whole training: its days, and its failures, checkpoints and spare nodes.

For clusters of several sizes, side by side on screen and as JSON: days, device-hours and price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.facts.plan_facts import Facts
from parallelrun.planner.predict.cluster_cost import DAY, SUSTAINED
from parallelrun.planner.predict.goodput import CONFIDENCE, HOUR, Goodput
from parallelrun.planner.search.device_counts import Size, TrainingCost
from parallelrun.report.figures import count_text, digits, seconds_text
from parallelrun.report.plans.search import degrees, plan_document, timed
from parallelrun.report.screen import show_section, table


def text(results: Facts) -> str:
    """Return how many days the given number of tokens takes, without failures."""
    training = results.training
    assert training is not None
    text = f"{count_text(training.tokens)} tokens are {training.steps:,} steps: "
    seconds = training_s(results)
    if seconds:
        price = training.price_per_day
        return f"{text}about {digits(seconds / DAY)} days" + (f", price {seconds / DAY * price:,.0f}" if price else "")
    if training.sustained is None:
        return f"{text}days unknown, because the cluster gives no rates"
    if training.at_peak is not None:
        longest, shortest = (digits(days) for days in training.at_peak)
        text += f"{shortest} days (communication overlapped) to {longest} days (not overlapped) at the peak rate, "
    share = f"{SUSTAINED:.1%} of it, the median of the trainings in SC21"
    return f"{text}{digits(training.sustained)} days at {share}"


def training_s(results: Facts) -> float | None:
    """The predicted seconds of the training, if tokens are given and a step is predicted."""
    return results.training.steps * results.time.step_s if results.training and results.time else None


def goodput_text(goodput: Goodput, training_s: float | None, brief: bool = False) -> str:
    """Return the useful part of the time, what the rest is, the best interval of checkpoints, and the spare nodes.

    training_s: seconds of the training without failures. brief: without what the rest is.
    """
    shares, days = goodput.shares, ""
    if training_s and shares.useful:
        days = f": {digits(training_s / DAY / shares.useful)} days"
    every = f"checkpoint.every={goodput.interval_steps}, " if goodput.interval_steps else "save every "
    spares, sure = counted(goodput.spares, "spare node"), f"{CONFIDENCE:.0%} sure"
    lines = (
        f"{shares.useful:.1%} of the time is useful{days} with failures every {_time(goodput.mtbf_s)}",
        f"else: {shares.saving:.1%} saving ({_time(goodput.save_s)} each), {shares.repeated:.1%} repeated, "
        f"{shares.restarting:.1%} restarting, {shares.waiting:.1%} waiting",
        f"{every}{_time(goodput.interval_s)}",
        f"{spares} beside {goodput.nodes:,}: {sure} not to await repairs of {_time(goodput.repair_s)}",
    )
    return "\n".join(line for line in lines if not (brief and line is lines[1]))


def _time(seconds: float) -> str:
    """Seconds for people: 31.5 s, 4.2 min, 3.09 h, 12 days."""
    for unit, size, most in (("min", 60.0, HOUR), ("h", HOUR, 2 * DAY), ("days", DAY, float("inf"))):
        if size <= seconds < most:
            return f"{digits(seconds / size)} {unit}"
    return seconds_text(seconds)


def sizes_document(sizes: Sequence[Size], selected: Size) -> list[dict[str, Any]]:
    """One row per size for `plan --json`."""
    return [
        {"devices": size.devices, "chosen": size is selected, **asdict(size.training),
         "plan": plan_document(size.found.best[0])} for size in sizes
    ]  # fmt: skip


def show_sizes(sizes: Sequence[Size], selected: Size, config: Config, console: Console) -> None:
    """Print the sizes, with the selected one marked."""
    names = [">devices", ">step", ">tokens/s", ">of the peak", ">days", ">device-hours"]
    names += [">price"] * (selected.training.price is not None)
    drawn = table("", *names, "plan", rule=False, padding=(0, 2, 0, 0))
    for size in sizes:
        best, time, training = size.found.best[0], timed(size.found.best[0]), size.training
        cells = [f"{size.devices:,}", seconds_text(time.step_s), count_text(best.tokens_per_s or 0.0)]
        cells += [f"{time.mfu:.0%}", digits(training.days), f"{training.device_hours:,.0f}"]
        cells += [f"{training.price:,.0f}"] if training.price is not None else []
        mark, style = ("*", "bold") if size is selected else ("", None)
        drawn.add_row(mark, *cells, " ".join(degrees(best)), style=style)
    within = f" in at most {config.days:g} days" if config.days is not None else ""
    goal = {"cost": "the fewest device-hours", "gpus": "the fewest devices"}[config.objective or "cost"]
    note = f"* {goal} to train on {count_text(config.tokens or 0.0)} tokens{within}"
    show_section(f"sizes of {config.cluster.name}", Group(drawn, Text(note, "dim")), console)


def training_text(training: TrainingCost, config: Config) -> str:
    """`300 B tokens take 34.2 days: 840,000 device-hours, price 1,680,000`."""
    price = f", price {training.price:,.0f}" if training.price is not None else ""
    late = " (too long)" if config.days is not None and training.days > config.days else ""
    days, hours = digits(training.days), f"{training.device_hours:,.0f}"
    return f"{count_text(config.tokens or 0.0)} tokens take {days} days{late}: {hours} device-hours{price}"
