"""Does the load of experts even out? Real text, ep=2, dropless experts, so that nothing but the router balances them.

    python -m benchmarks.routing_balance                  # about three minutes on two cores
    python -m benchmarks.routing_balance --steps 60 --name ""

The text is Python's standard library, byte by byte: bytes are far from even, and without balancing so is the load.
softmax: nothing balances. auxiliary loss: GShard's soft limit, coefficient 0.01. sigmoid: the scores of DeepSeek-V3,
nothing balances. selection bias: the same, and biases that move by 0.001 a step against the load. All start from the
same weights and see the same samples; MaxVio is the largest load over the mean load, less 1, of the global batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import RESULTS, environment, on_ranks
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report import chart
from parallelrun.report.figures import digits
from parallelrun.report.records.routing_log import mean_over_layers
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler, learning_rate
from parallelrun.training.loop.step import measure, train_step
from tests.plans import tiny_config

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"aux_coefficient": 0.0},
    "auxiliary loss": {"aux_coefficient": 0.01},
    "sigmoid": {"score": "sigmoid", "aux_coefficient": 0.0},
    "selection bias": {"score": "sigmoid", "aux_coefficient": 0.0, "bias_rate": 0.001},
}
BALANCED = {"auxiliary loss": "softmax", "selection bias": "sigmoid"}  # and what each is to be compared with
MODEL: dict[str, Any] = {  # conf/model/moe_gpt.yaml
    "model.layers": 4, "model.hidden": 64, "model.heads": 8, "model.seq": 64, "model.vocab": None, "model.experts": 8,
    "dataset.name": "pystdlib", "dataset.vocab": None, "global_batch": 16, "optimizer.lr": 3e-3,
    "strategy.expert.kind": "dropless", "dp": 2, "ep": 2,
}  # fmt: skip
COLUMNS, AVERAGED = 50, 10


def _train(router: dict[str, Any], steps: int) -> dict[str, Any]:
    """One rank of two: a row a step, and the loads of the first layer with experts."""
    settings = {f"model.router.{key}": value for key, value in router.items()}
    config = tiny_config({**MODEL, **settings, "steps": steps, "optimizer.warmup": 5})
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    rows, loads = [], []
    for step in range(1, steps + 1):
        result = train_step(training, step, learning_rate(config.optimizer, step, steps), scaler)
        layers = training.routing.described()
        rows.append({"step": step, "loss": result.loss, **mean_over_layers(layers)})
        loads.append(layers[0]["load"])
    return {"rows": rows, "loads": loads, "layer": layers[0]["layer"], "val_loss": measure(training).loss}


def summarise(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    """First and last ten steps of one router, and what the picture shows of it."""
    rows, span = measured["rows"], min(AVERAGED, len(measured["rows"]))
    first, last = rows[:span], rows[-span:]

    def mean(part: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(row[key] for row in part)

    return {
        "router": name,
        "steps": len(rows),
        "first_max_vio": mean(first, "max_vio"),
        "max_vio": mean(last, "max_vio"),
        "first_load_entropy": mean(first, "load_entropy"),
        "load_entropy": mean(last, "load_entropy"),
        "loss": mean(last, "loss"),
        "val_loss": measured["val_loss"],
        "max_vio_by_step": _smooth([(row["step"], row["max_vio"]) for row in rows]),
        "loss_by_step": _smooth([(row["step"], row["loss"]) for row in rows]),
        "layer": measured["layer"],
        "load_over_mean": _binned(measured["loads"]),
    }


def verdicts(summaries: list[dict[str, Any]]) -> dict[str, bool]:
    """Does MaxVio fall under each balancing, and end below that of the same router without?"""
    last = {row["router"]: row["max_vio"] for row in summaries}
    first = {row["router"]: row["first_max_vio"] for row in summaries}
    return {name: last[name] < first[name] and last[name] < last[plain] for name, plain in BALANCED.items()}


def picture(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return MaxVio and loss of all routers, and a heat map of one layer's load for each router, as SVG."""
    names = [f"{row['router']}: load, {row['layer']}" for row in rows]
    title = "Load of experts on real text, with and without balancing"
    figure, (max_vio, loss, *maps) = chart.panels(title, ["MaxVio, mean over layers", "Training loss", *names])
    for style, (row, axes) in enumerate(zip(rows, maps, strict=True)):
        chart.line(max_vio, style, row["max_vio_by_step"])
        chart.line(loss, style, row["loss_by_step"])
        cells = row["load_over_mean"]
        _heat_map(axes, cells, row["steps"])
        chart.scale(axes, "y", digits, label="expert", ticks=range(len(cells)))
    chart.scale(max_vio, "y", digits, from_zero=True)
    chart.scale(loss, "y", digits)
    for axes in (max_vio, loss, *maps):
        chart.scale(axes, "x", digits, label="step")
    notes = (
        "colour: load of an expert over the mean load; lines: means of five steps",
        f"8 experts, top-2, dropless, dp=2 ep=2, bytes of Python's standard library; torch {facts['torch']}, "
        f"{facts['date']}",
    )
    return chart.svg(figure, [row["router"] for row in rows], notes)


def _heat_map(axes: Any, cells: list[list[float]], steps: int) -> None:
    """Draw cells[expert][column] as colours from 0 to 2 around 1, expert 0 on top."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    values = [[min(cell, 2.0) for cell in row] for row in cells]
    image = axes.imshow(
        values, LinearSegmentedColormap.from_list("load", ["#004a80", "#f2f2ec", "#b83b00"]), TwoSlopeNorm(1, 0, 2),
        aspect="auto", interpolation="nearest", extent=(0.5, steps + 0.5, len(cells) - 0.5, -0.5),
    )  # fmt: skip
    axes.grid(False)
    axes.set_yticks(range(len(cells)), map(str, range(len(cells))))
    bar = axes.get_figure().colorbar(image, ax=axes, ticks=[0, 1, 2], fraction=0.05, pad=0.02)
    bar.ax.set_yticklabels(["0", "1", "2+"])


def _smooth(points: list[tuple[int, float]], width: int = 5) -> list[tuple[float, float]]:
    """Means of `width` steps."""
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [(statistics.fmean(x for x, _ in part), round(statistics.fmean(y for _, y in part), 4)) for part in parts]


def _binned(loads: list[list[float]]) -> list[list[float]]:
    """Per expert and part of the steps: load over the mean load."""
    columns, mean = min(COLUMNS, len(loads)), sum(loads[0]) / len(loads[0])
    parts = [loads[i * len(loads) // columns : (i + 1) * len(loads) // columns] for i in range(columns)]
    return [
        [round(statistics.fmean(load[expert] for load in part) / mean, 3) for part in parts]
        for expert in range(len(loads[0]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--name", default="routing_balance", help="results/<date>-NAME.json and .svg; empty: do not")
    arguments = parser.parse_args()
    rows = []
    for name, router in ROUTERS.items():
        row = summarise(name, on_ranks(2, _train, router, arguments.steps))
        rows.append(row)
        print(
            f"{name:16} MaxVio {row['first_max_vio']:.2f} -> {row['max_vio']:.2f}, load entropy "
            f"{row['first_load_entropy']:.3f} -> {row['load_entropy']:.3f}, validation loss {row['val_loss']:.3f}"
        )
    held = verdicts(rows)
    print("MaxVio falls, and ends lower than without:", ", ".join(f"{name}: {ok}" for name, ok in held.items()))
    if arguments.name:
        RESULTS.mkdir(exist_ok=True)
        stem = RESULTS / f"{datetime.now(timezone.utc):%Y-%m-%d}-{arguments.name}"
        facts = environment()
        text = ",\n".join(json.dumps(row) for row in rows)
        document = f'{{"holds": {json.dumps(held)},\n"environment": {json.dumps(facts)},\n"rows": [\n{text}\n]}}\n'
        Path(f"{stem}.json").write_text(document)
        Path(f"{stem}.svg").write_text(picture(rows, facts))
        print(f"written to {stem}.json and .svg")


if __name__ == "__main__":
    main()
