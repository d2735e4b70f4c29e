"""How well a calibrated machine predicts plans that the calibration has not seen.

    python -m benchmarks.calibration                   # about four minutes on two idle cores
    python -m benchmarks.calibration --seconds 60 --only ddp,ring --name ""

Calibrates, then benches every plan below with the real launcher, and prints the predicted beside the measured median
step time, the median error, and the share of pairs in the right order among those that differ by more than a fifth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.pairs import write
from parallelrun.base.errors import ParallelrunError
from parallelrun.cli.calibration.constants import Calibration, calibrated, plan_of_step, step_seconds
from parallelrun.cli.calibration.measurements import Measurements
from parallelrun.cli.calibration.session import Session
from parallelrun.launch.host.environment import num_cores

DIFFERENT = 1.2  # pairs of plans closer than this have no order to predict
TIMED = ("bench.warmup=3", "bench.steps=15", "dataset=synthetic")


def gpt(hidden: int, layers: int, seq: int, batch: int, *more: str) -> tuple[str, ...]:
    sizes = (f"model.hidden={hidden}", f"model.layers={layers}", f"model.seq={seq}", f"global_batch={batch}")
    return ("model=gpt", *sizes, *more)


LLAMA = ("model=llama3_8b", "model.heads=8", "model.kv_heads=4", "model.vocab=256", "model.hidden=128",
         "model.ffn=384", "model.layers=4", "model.seq=64", "global_batch=8")  # fmt: skip
MOE = ("model=moe_gpt", "model.hidden=96", "model.seq=64", "global_batch=8")
PLANS: dict[str, tuple[str, ...]] = {
    "single": gpt(192, 4, 64, 8, "strategy=single"),
    "single, small": gpt(64, 3, 48, 4, "strategy=single"),
    "llama": (*LLAMA, "strategy=ddp", "dp=2"),
    "ddp": gpt(192, 4, 96, 16, "strategy=ddp", "dp=2"),
    "ddp, small": gpt(48, 3, 32, 8, "strategy=ddp", "dp=2"),
    "ddp, 4 ranks": gpt(128, 3, 64, 16, "strategy=ddp", "dp=4"),
    "horovod": gpt(96, 6, 64, 16, "strategy=horovod", "dp=2"),
    "fsdp": gpt(256, 4, 64, 8, "strategy=fsdp", "dp=2"),
    "fsdp, 4 ranks": gpt(96, 3, 64, 16, "strategy=fsdp", "dp=4"),
    "zero1": gpt(160, 5, 64, 16, "strategy=zero1", "dp=2"),
    "zero2": gpt(320, 2, 64, 8, "strategy=zero2", "dp=2"),
    "ring": gpt(192, 3, 64, 16, "strategy=ring", "dp=2"),
    "ring, 4 ranks": gpt(64, 4, 64, 16, "strategy=ring", "dp=4"),
    "ps": gpt(128, 3, 64, 16, "strategy=ps", "dp=2", "servers=1"),
    "ps, async": gpt(192, 2, 64, 12, "strategy=ps", "dp=3", "servers=1", "consistency=async"),
    "tp": gpt(384, 3, 96, 8, "strategy=tp", "tp=2"),
    "tp, 4 ranks": gpt(128, 4, 64, 8, "strategy=tp", "tp=4"),
    "gpipe": gpt(192, 4, 64, 16, "strategy=gpipe", "pp=2", "microbatches=4"),
    "1f1b, 4 ranks": gpt(128, 8, 64, 16, "strategy=1f1b", "pp=4", "microbatches=8"),
    "tp and pipeline": gpt(128, 4, 64, 16, "strategy=ptdp", "tp=2", "pp=2", "microbatches=4"),
    "2D": gpt(256, 2, 64, 8, "strategy=tp2d", "tp=4"),
    "experts, ep=2": (*MOE, "model.layers=4", "strategy=gshard", "ep=2"),
    "experts, ddp": (*MOE, "model.layers=6", "strategy=ddp", "dp=2"),
    "mlp": (
        "model=mlp",
        "model.hidden=256",
        "model.layers=6",
        "model.seq=64",
        "global_batch=16",
        "strategy=ddp",
        "dp=2",
    ),
    "resnet": ("model=resnet", "model.stages=[2,2,2]", "model.image=32", "global_batch=8", "strategy=single"),
    "alexnet": ("model=alexnet", "model.image=64", "global_batch=8", "strategy=ddp", "dp=2"),
}


def row(name: str, words: Sequence[str], measured: Measurements, found: Calibration, root: Path) -> dict[str, Any]:
    """Bench one plan beside its prediction."""
    on_cpu = measured.device == "cpu"
    session = Session(device="cpu" if on_cpu else "auto", timed=TIMED)
    step = session.training(root, name, words, num_cores(), on_cpu)
    plan, seconds = plan_of_step(step), step.sample.seconds
    return {
        "case": name, "degrees": plan.degrees, "ranks": plan.world, "measured_s": seconds,
        "spread": step.sample.spread, "predicted_s": step_seconds(plan, found.cluster),
        "words": " ".join(words),
    }  # fmt: skip


def scores(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Median and largest error, and the share of pairs in the right order among those that differ."""
    timed = list(rows)
    errors = [abs(one["predicted_s"] / one["measured_s"] - 1) for one in timed]
    pairs = [sorted(pair, key=lambda one: float(one["measured_s"])) for pair in combinations(timed, 2)]
    apart = [pair for pair in pairs if pair[1]["measured_s"] > DIFFERENT * pair[0]["measured_s"]]
    right = sum(faster["predicted_s"] < slower["predicted_s"] for faster, slower in apart)
    return {
        "plans": len(timed),
        "median_error": statistics.median(errors) if errors else 0.0,
        "largest_error": max(errors, default=0.0),
        "pairs": len(apart),
        "right_order": right / len(apart) if apart else 1.0,
    }


def line(one: dict[str, Any]) -> str:
    """One line of the table."""
    ratio, ms = (
        one["predicted_s"] / one["measured_s"] - 1,
        [one[f"{name}_s"] * 1e3 for name in ("predicted", "measured")],
    )
    return f"{one['case']:18}{one['ranks']:6}{ms[0]:12.1f} ms{ms[1]:12.1f} ms{ratio:+9.0%}{one['spread']:9.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="of the calibration")
    parser.add_argument("--only", default="", help="cases that begin so, comma-separated")
    parser.add_argument("--name", default="calibration", help="results/<date>-NAME.json; empty: do not write")
    arguments = parser.parse_args()
    measured = Session(arguments.seconds, say=lambda text: print(f"measuring: {text}", flush=True)).measure()
    found = calibrated(measured, "mine")
    print(f"calibrated in {measured.seconds:.0f} s on {len(found.ratios)} trainings (error {found.error:.1%})")
    print(", ".join(f"{key}={getattr(found.cluster, key):.4g}" for key in found.fitted))
    print(f"{'plan':18}{'ranks':>6}{'predicted':>15}{'measured':>15}{'error':>9}{'spread':>9}")
    rows, wanted = [], [name for name in arguments.only.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="calibration-") as root:
        for name, words in PLANS.items():
            if wanted and not any(name.startswith(one) for one in wanted):
                continue
            try:
                rows.append(row(name, words, measured, found, Path(root)))
            except ParallelrunError as error:
                print(f"{name:18} {error}", file=sys.stderr)
                continue
            print(line(rows[-1]), flush=True)
    total = scores(rows)
    print(
        f"{total['plans']} plans: median error {total['median_error']:.1%}, largest {total['largest_error']:.0%}; "
        f"right order in {total['right_order']:.1%} of {total['pairs']} pairs that differ by more than a fifth"
    )
    if arguments.name:
        print(f"written to {write(arguments.name, {'command': 'python -m benchmarks.calibration', **total}, rows)}")


if __name__ == "__main__":
    main()
