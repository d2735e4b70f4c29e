"""Clusters of several sizes side by side, on screen and as JSON: days, device-hours and price of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.search.device_counts import Size, TrainingCost
from parallelrun.report.figures import count_text, digits, seconds_text
from parallelrun.report.plans.search import degrees, plan_document, timed
from parallelrun.report.screen import show_section, table


def document(sizes: Sequence[Size], selected: Size) -> list[dict[str, Any]]:
    """One row per size for `plan --json`."""
    return [
        {"devices": size.devices, "chosen": size is selected, **asdict(size.training),
         "plan": plan_document(size.found.best[0])} for size in sizes
    ]  # fmt: skip


def show(sizes: Sequence[Size], selected: Size, config: Config, console: Console) -> None:
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
