"""Does any legal composition run, equal to one device, with the predicted traffic and memory?

`python -m benchmarks.compositions --draws 300` draws a model, a strategy for every axis and settings of the run by
seeds 0, 1, ...; what `resolve` accepts is verified in fp64 (loss, gradients, norm, updates), and trained for two steps
in its own precision and by its own optimizer, in which every rank counts the bytes that it sends and holds. A
composition that crashes, differs or was predicted wrongly is shown and written with its seed; `--first SEED --draws 1`
repeats it.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.composition_draws import BASE, Overrides, draw
from parallelrun.base.errors import ConfigError
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.models.network import compile_blocks
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces import sample_sets
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop import build as train_build
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.parity import parity, unforetold
from tests.peak_bytes import PeakBytes
from tests.plans import tiny_config
from tests.pool import RanksFailed, run_ranks
from tests.ranks import ps_body

# Of the predicted peak. The sizes here are a quarter of those for which docs/memory.md promises 3 %, so that tensors of
# a few numbers weigh more; the load of experts is taken as even, and those of panels need not receive the last one.
BOUND, UNEVEN = 0.05, 0.1
SECONDS = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300, help="the number of compositions")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--to", type=Path, help="append every composition to this file, as a line of JSON")
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {platform.node()}, Python {platform.python_version()}")
    results: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.draws):
        overrides, plan = draw(seed)
        row = {"seed": seed, "world": plan.world, "overrides": overrides, **examined(overrides, plan)}
        results[row["result"]] += 1
        if row["result"] != "right":
            print(f"seed {seed}: {row['result']}: {row['detail']}\n    {drawn(overrides)}", flush=True)
        if arguments.to is not None:
            with arguments.to.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(", ".join(f"{count} {result}" for result, count in results.most_common()))


def drawn(overrides: Overrides) -> Overrides:
    """Return what distinguishes a composition from the others."""
    return {key: value for key, value in overrides.items() if BASE.get(key) != value}


def examined(overrides: Overrides, plan: Plan) -> dict[str, Any]:
    """Return the result of a composition (right, crashed, differs, sends, holds), its detail, and what was measured."""
    try:
        if plan.data.has_servers:
            return _served(overrides)
        return _differs(overrides, plan) or _trained(overrides, plan)
    except RanksFailed as error:
        first = error.failures[0]
        return {"result": "crashed", "detail": f"rank {first.rank}: {first.kind}: {first.traceback[-1500:]}"}
    except Exception as error:  # a campaign goes on
        return {"result": "crashed", "detail": f"{type(error).__name__}: {error}"}


def _differs(overrides: Overrides, plan: Plan) -> dict[str, Any]:
    """Return what `verify` finds wrong, if it does. It refuses what it cannot replay in one process."""
    sets = {"model.norm_samples": sample_sets.number(plan)} if plan.sample_sets else {}
    try:
        document = parity({**overrides, **sets, "verify.steps": 2}, timeout=SECONDS)
    except ConfigError:
        return {}
    if document["passed"] and not document["surprises"]:
        return {}
    detail = {key: document[key] for key in ("max_error", "worst", "copies_that_disagree", "surprises")}
    return {"result": "sends" if document["passed"] else "differs", "detail": detail}


def _served(overrides: Overrides) -> dict[str, Any]:
    """A parameter server's ranks run a loop of their own, verify and run."""
    with tempfile.TemporaryDirectory() as folder:
        for verb in ("verify", "run"):
            ps_body.run(Path(folder) / verb, overrides, verb, timeout=SECONDS)
        document = json.loads((Path(folder) / "verify" / "verify.json").read_text())
        if not document["passed"]:
            return {"result": "differs", "detail": document["worst"]}
        rows = json.loads((Path(folder) / "run" / "comm.json").read_text())["rows"]
    wrong = [row for row in rows if row["payload_bytes"] != row["predicted_payload_bytes"]]
    return {"result": "sends", "detail": wrong} if wrong else {"result": "right", "detail": ""}


def _trained(overrides: Overrides, plan: Plan) -> dict[str, Any]:
    found = run_ranks(plan.world, trained, overrides, timeout=SECONDS, backend="gloo")
    texts = [text for _, _, texts in found for text in texts]
    is_promised = overrides.get("model.name") != "module" and not overrides.get("compile")
    peaks = [(peak, predicted) for peak, predicted, _ in found]
    errors = [predicted / peak - 1 for peak, predicted in peaks]
    row: dict[str, Any] = {"memory_errors": errors, "peaks": peaks}
    if texts:
        return {"result": "sends", "detail": texts, **row}
    is_uneven = overrides.get("strategy.tensor.form") == "summa" or plan.spec.router is not None
    if is_promised and max(map(abs, errors)) > (UNEVEN if is_uneven else BOUND):
        return {"result": "holds", "detail": [f"{error:+.1%}" for error in errors], **row}
    return {"result": "right", "detail": "", **row}


def trained(overrides: Overrides) -> tuple[int, int, list[str]]:
    """Train as one rank; return the peak of the second step in bytes (of replicas that meet: of the first one from
    then on in which they do), the predicted one, and what was sent otherwise than predicted."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # to look at what was there before would take as long as a step
    gc.disable()  # recomputation leaves cycles, and when they are found is chance
    config = tiny_config(overrides)
    plan = resolve(config)
    try:
        with (
            PeakBytes() as live,
            mock.patch.object(train_build, "compile_blocks", partial(compile_blocks, backend="aot_eager")),
        ):
            training = build(config, plan, torch.device("cpu"))
            scaler, counter = LossScaler(config.precision, plan.precision.scaled), CommunicationCounter(training.mesh)
            full = plan.data.full_step(2)
            for step in range(1, full):
                train_step(training, step, 0.01, scaler)
            gc.collect()
            live.restart()
            with counter:
                train_step(training, full, 0.01, scaler)
        return live.peak, prediction.memory(plan, training.mesh.rank).total, unforetold(training, counter)
    finally:
        gc.enable()
        gc.unfreeze()


if __name__ == "__main__":
    main()
