"""How long a periodic save pauses training, beside a save for which training waits (`checkpoint.asynchronous=false`).

    python -m benchmarks.save_pause                              # 4 ranks, dp=2 tp=2, 19 million weights
    python -m benchmarks.save_pause --words "strategy=fsdp dp=4 model=gpt ..."

Both saves alternate in one training, so that other work on the machine meets both. pause: seconds that a rank stands
still, at the save and before the next update; the slowest rank's. again: a second save for which training waits.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pairs import read_arguments, write
from parallelrun.base.context import WorkerContext
from parallelrun.cli import argv
from parallelrun.config import compose
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.entry.start import start
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.checkpointing import Checkpoints
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from parallelrun.training.metrics.timing import StepClock

BAR = 0.05
WORDS = (
    "model=gpt dataset=synthetic model.layers=6 model.hidden=512 model.heads=8 model.seq=16 "
    "strategy=ptdp dp=2 tp=2 global_batch=4"
)
CASES = {"fp32": "", "bf16": "precision=bf16"}
NAMED = "save_pause.json"
EVERY = 3  # steps between two saves: the first after a save differs from the others


def worker(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The worker of one rank: trains, and saves beside training and waiting by turns; rank 0 writes the seconds."""
    training = build(config, plan, context.device)
    scaler = LossScaler(config.precision, scaled=plan.precision.scaled)
    clock, found = StepClock(training), dict[str, list[float]]()
    sides = {"ours": _saver(training, scaler, context, True), "theirs": _saver(training, scaler, context, False)}
    sides["again"] = sides["theirs"]
    training.data.begin_run(training, context, 0)
    step = 0
    while step + EVERY * len(sides) <= config.steps:
        for name, saver in sides.items():
            for _ in range(EVERY):
                step += 1
                context.heartbeat(step, "step")
                with clock:
                    train_step(training, step, 1e-4, scaler, False, sides["ours"].before_update, clock)
                if step % EVERY:
                    sides["ours"].after_step(step, False)
            sides["ours"].finish()  # not beside the save that follows
            dist.barrier()
            cpu = time.thread_time()
            saver.after_step(step, False)
            found.setdefault(f"{name}_cpu", []).append(time.thread_time() - cpu)
            found.setdefault(f"{name}_began", []).append(len(saver.times.paused) - 1)
    sides["ours"].finish()
    for name, saver in sides.items():
        indices = [int(number) for number in found.pop(f"{name}_began")]
        found[name] = [saver.times.paused[number] for number in indices]
    slowest = {name: _slowest(values) for name, values in found.items()}
    if context.rank == 0:
        (context.directory / NAMED).write_text(json.dumps(slowest))
    return 0


def _saver(training: Training, scaler: LossScaler, context: WorkerContext, asynchronous: bool) -> Checkpoints:
    config = replace(training.config, checkpoint=replace(training.config.checkpoint, asynchronous=asynchronous))
    return Checkpoints(replace(training, config=config), scaler, context)


def _slowest(values: list[float]) -> list[float]:
    seconds = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.tolist()


def measured(words: str, pairs: int) -> dict[str, list[float]]:
    """Run the training of `words`; return the seconds of each save by side, without those of the first."""
    folder = Path(tempfile.mkdtemp())
    overrides = [*words.split(), f"steps={(pairs + 1) * EVERY * 3 + 1}", f"checkpoint.every={EVERY}",
                 "checkpoint.keep=2", f"runs={folder}"]  # fmt: skip
    read = argv.read(["run", *overrides]).overrides
    composed, _ = compose.compose_once(compose.prepare(read, (), "run", False))
    plan = resolve(composed.config, given=composed.given)
    code = start(composed.config, plan, [], overrides, folder / "run", "benchmarks.save_pause:worker")
    assert code == 0, f"{words} ended with exit code {code}: see {folder}"
    found: dict[str, list[float]] = json.loads((folder / "run" / NAMED).read_text())
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    arguments = read_arguments(__doc__, "save_pause", CASES, words=WORDS)
    rows: list[dict[str, Any]] = []
    for case in arguments.case.split(","):
        seconds = measured(f"{arguments.words} {CASES[case]}", arguments.pairs)
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["theirs"])]
        again = [ours / theirs for ours, theirs in zip(seconds["again"], seconds["theirs"])]
        median = {name: statistics.median(values) for name, values in seconds.items()}
        rows.append({"case": case, "words": arguments.words, "ratio": statistics.median(ratios), "bar": BAR,
                     "again": statistics.median(again), "median_s": median, "ratios": ratios})  # fmt: skip
        print(f"{case}: a save beside training pauses it for {median['ours'] * 1e3:.1f} ms, one that waits for "
              f"{median['theirs'] * 1e3:.0f} ms: {statistics.median(ratios):.1%} (bar {BAR:.0%}, A/A "
              f"{statistics.median(again):.2f}, CPU {median['ours_cpu'] * 1e3:.1f} ms)")  # fmt: skip
    if arguments.name:
        print(write(arguments.name, {"command": "python -m benchmarks.save_pause"}, rows))


if __name__ == "__main__":
    main()
