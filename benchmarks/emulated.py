"""`emulate=true` against the prediction: all-reduces between four emulated hosts, and what strategies wait for there.

    python -m benchmarks.emulated                       # as root: all-reduces of 1 to 64 MiB, then training steps
    python -m benchmarks.emulated --case all_reduce --cluster ethernet_25g

all_reduce: seconds of one all-reduce of fp32 numbers, as the ranks of a run see it, beside those that the links of the
emulated cluster are predicted to take, with the latency of a small message between two of its hosts, measured in the
same run: it is that of this machine and its load, and of netem where the kernel has it. steps: seconds that a rank of a
training run waits for others in a step, beside those predicted for its collectives. Both predictions are those of
`parallelrun plan` (plan/step_time).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
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
from parallelrun.launch.host import emulation
from parallelrun.launch.host.job import WORKER
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import Rates, rates_of
from parallelrun.planner.resolve.resolve_config import resolve

WITHIN = 0.15
SIZES = {"1M": 2**20, "4M": 2**22, "16M": 2**24, "64M": 2**26}
REPEATED = {"1M": 9, "4M": 9, "16M": 7, "64M": 5}
NAMED, LATENCY, MESSAGES = "emulated.json", "latency", 50
# 6.3 million weights in few products, so that most of a step is communication
MODEL = "model=gpt dataset=synthetic model.layers=2 model.hidden=512 model.heads=8 model.seq=16 steps=7"
STEPS = {
    "ddp": "strategy=ddp dp=4 global_batch=4",
    "ring": "strategy=ring dp=4 global_batch=4",
    "parameter server": "strategy=ps servers=1 world=5 global_batch=4",
    "hierarchical": "strategy=ring strategy.data.algorithm=hierarchical dp=8 cluster.gpus_per_node=2 global_batch=8",
    "flat ring": "strategy=ring strategy.data.algorithm=ring dp=8 cluster.gpus_per_node=2 global_batch=8",
    "1D": "strategy=tp tp=4 global_batch=4",
    "2D": "strategy=tp2d tp=4 global_batch=4",
}
SMALL = "model=gpt dataset=synthetic model.layers=2 model.hidden=32 model.heads=2 model.seq=16 strategy=ddp dp=4"


def exchange(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The worker of one rank: all-reduces of every size; rank 0 writes the seconds of each."""
    found: dict[str, list[float]] = {LATENCY: [_latency(context) for _ in range(MESSAGES)]}
    for name, num_bytes in SIZES.items():
        numbers = torch.zeros(num_bytes // 4)  # zeros: summed again and again, other numbers would overflow
        for repeat in range(REPEATED[name] + 1):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(numbers)
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            context.heartbeat(1, "step")
            if repeat:  # the first one opens connections
                found.setdefault(name, []).append(float(seconds))
    if context.rank == 0:
        (context.directory / NAMED).write_text(json.dumps(found))
    return 0


def _latency(context: WorkerContext) -> float:
    """Seconds of a small message between the first two hosts: half a round trip. 0 on other ranks."""
    number, first = torch.zeros(1), context.rank == 0
    dist.barrier()
    context.heartbeat(1, "step")
    begin = time.perf_counter()
    if context.rank < 2:
        for sends in (first, not first):
            (dist.send if sends else dist.recv)(number, 1 - context.rank)
    return (time.perf_counter() - begin) / 2 if first else 0.0


def _launched(words: str, cluster: str, worker: str = WORKER) -> tuple[Config, Plan, Path]:
    """Run a command with `emulate=true` to its end. Return its config, its plan and the run directory."""
    folder = Path(tempfile.mkdtemp())
    overrides = [f"cluster={cluster}", *words.split(), "emulate=true", f"runs={folder}", "checkpoint.last=false"]
    read = argv.read(["run", *overrides]).overrides
    composed, _ = compose.compose_once(compose.prepare(read, (), "run", False))
    plan = resolve(composed.config, given=composed.given)
    code = start(composed.config, plan, [], overrides, folder / "run", worker)
    assert code == 0, f"{words} ended with exit code {code}: see {folder}"
    return composed.config, plan, folder / "run"


def _links(config: Config, plan: Plan, latency_s: float | None = None) -> tuple[Any, Rates]:
    """The emulated cluster, and its rates. Ranks of a host share memory, which costs nothing beside these ports.

    latency_s: of a message between hosts, if it was measured.
    """
    network = emulation.network_of(config, plan, emulation.can_delay())
    cluster = replace(network.cluster(config.cluster), memory_gb_s=900.0, intra_gb_s=1000.0)
    if latency_s is not None:
        cluster = replace(cluster, latency_us=latency_s * 1e6)
    rates = rates_of(cluster, "fp32")
    assert rates is not None
    return cluster, rates


def _all_reduces(cluster: str) -> list[dict[str, Any]]:
    config, plan, folder = _launched(SMALL, cluster, "benchmarks.emulated:exchange")
    measured = json.loads((folder / NAMED).read_text())
    latency_s = statistics.median(measured.pop(LATENCY))
    print(f"a small message between hosts takes {latency_s * 1e6:.0f} us")
    emulated, rates = _links(config, plan, latency_s)
    rows = []
    for name, seconds in measured.items():
        row = Collective("dp", "all_reduce", "gradients", 1, SIZES[name])
        predicted = collective_s(row, plan, emulated, rates)
        assert predicted is not None
        rows.append(_row("all_reduce", name, cluster, statistics.median(seconds), predicted))
    return rows


def _steps(cluster: str) -> list[dict[str, Any]]:
    rows = []
    for name, words in STEPS.items():
        config, plan, folder = _launched(f"{MODEL} {words}", cluster)
        summary = json.loads((folder / "summary.json").read_text())
        seconds = partial(_predicted, config, plan)
        rows.append(_row("steps", name, cluster, summary["comm_exposed_s"], max(map(seconds, range(plan.world)))))
    return rows


def _predicted(config: Config, plan: Plan, rank: int) -> float:
    """Seconds of what a rank sends in a step. A server sends as much again as it has received before."""
    cluster, rates = _links(config, plan)
    rows = [row for row in prediction.collectives(plan, rank) if row.operation != "recv"]
    seconds = sum(collective_s(row, plan, cluster, rates) or 0.0 for row in rows)
    return 2 * seconds if plan.role(rank) == "server" else seconds


def _row(case: str, name: str, cluster: str, measured_s: float, predicted_s: float) -> dict[str, Any]:
    ratio = measured_s / predicted_s
    print(f"{case:10} {name:16} measured {measured_s:8.4f} s  predicted {predicted_s:8.4f} s  ratio {ratio:.2f}")
    return {"case": case, "size": name, "cluster": cluster, "measured_s": measured_s, "predicted_s": predicted_s,
            "ratio": ratio}  # fmt: skip


def main() -> None:
    cases = {"all_reduce": _all_reduces, "steps": _steps}
    arguments = read_arguments(__doc__, "emulated", cases, cluster="ethernet_25g")
    rows = [row for case in arguments.case.split(",") for row in cases[case](arguments.cluster)]
    missed = [row["size"] for row in rows if row["case"] == "all_reduce" and abs(row["ratio"] - 1) > WITHIN]
    print(f"all-reduces within {WITHIN:.0%}: {'all' if not missed else 'all but ' + ', '.join(missed)}")
    if arguments.name:
        print(write(arguments.name, {"command": "python -m benchmarks.emulated"}, rows))


if __name__ == "__main__":
    main()
