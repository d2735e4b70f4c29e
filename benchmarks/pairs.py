"""Paired timing on shared ranks: both sides alternate inside the same processes; ratios, medians, bootstrap bounds.

Each side uses what its user gets on CPUs of one host: ours shared memory and the products of
`torch_private.use_fast_products`, peers gloo and torch's own products.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallelrun.distributed import shared_memory, torch_private

RESULTS = Path(__file__).parent / "results"


def read_arguments(
    description: str | None, name: str, cases: Iterable[str], sizes: Iterable[str] = (), **others: str
) -> argparse.Namespace:
    """The command line of a paired benchmark: case, size (comma-separated), pairs, warmup, name; others by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default=",".join(cases))
    if sizes:
        parser.add_argument("--size", default=",".join(sizes))
    for option, default in others.items():
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--name", default=name, help="results/<date>-NAME.json; empty: do not write")
    return parser.parse_args()


@dataclass(frozen=True)
class WithTorchsProducts:
    """A step of a peer, timed with torch's own products; whatever was built for ours may have replaced them."""

    step: Callable[[], Any]

    def __call__(self) -> None:
        self.step()


def time_pairs(
    ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int, warmup: int, **beside: Callable[[], Any]
) -> dict[str, list[float]]:
    """Seconds of each step, the slowest rank's: `ours`, `theirs`, `again` (theirs once more, for the A/A ratio), and
    whatever else is to be timed beside them. `<name>_cpu`: CPU seconds of all ranks together, with the threads that
    send and receive; other work on the machine hardly changes them.

    Every step follows one of another side, because it would find its own weights in the cache: ours is run twice in a
    pair (timed once), between theirs and theirs again, and the order changes from pair to pair. A barrier stands before
    each.
    """
    sides = {"ours": ours, "theirs": theirs, "again": theirs, **beside}
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    orders = (("ours", "theirs", "", "again", *beside), ("", "again", "ours", "theirs", *beside))
    for number in range(warmup + pairs):
        for name in orders[number % 2]:
            if not name:
                ours()
                continue
            step = sides[name]
            is_peer = isinstance(step, WithTorchsProducts)
            with torch_private.torchs_own_products() if is_peer else nullcontext():
                _barrier()
                began, began_cpu = time.perf_counter(), time.process_time()
                step()
                took, took_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            if number >= warmup:
                times[name].append(took)
                cpu[name].append(took_cpu)
    slowest = {name: _over_ranks(values, dist.ReduceOp.MAX) for name, values in times.items()}
    return slowest | {f"{name}_cpu": _over_ranks(values, dist.ReduceOp.SUM) for name, values in cpu.items()}


def _has_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _barrier() -> None:
    if _has_ranks():
        dist.barrier()


def _over_ranks(values: list[float], operation: Any) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    if _has_ranks():
        dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


def summarise(times: dict[str, list[float]], bar: float | None) -> dict[str, Any]:
    """Median ratio ours/theirs with a 95 % bootstrap interval, the A/A ratio beside it, and whether `bar` holds.

    A bar holds if the median of the paired ratios is <= bar + 0.03 and the lower bootstrap bound is <= bar. cpu_ratio:
    the median ratio of CPU seconds, if they were measured.
    """
    ratios = [a / b for a, b in zip(times["ours"], times["theirs"])]
    control = [a / b for a, b in zip(times["again"], times["theirs"])]
    median = statistics.median(ratios)
    low, high = bootstrap(ratios)
    cpu = [a / b for a, b in zip(times.get("ours_cpu", ()), times.get("theirs_cpu", ()))]
    return {
        "ours_median_s": statistics.median(times["ours"]),
        "theirs_median_s": statistics.median(times["theirs"]),
        "ratio": median,
        "ratio_low": low,
        "ratio_high": high,
        "a_a_ratio": statistics.median(control),
        "cpu_ratio": statistics.median(cpu) if cpu else None,
        "pairs": len(ratios),
        "bar": bar,
        "holds": None if bar is None else median <= bar + 0.03 and low <= bar,
    }


def beyond(times: dict[str, list[float]], floor: str, theirs_floor: str) -> dict[str, float]:
    """What ours takes beyond the work that `floor` timed and theirs beyond that of `theirs_floor`: the ratio of the
    medians' excess, with a 95 % bootstrap interval over pairs, and the A/A ratio."""
    indices = range(len(times["ours"]))

    def excess(side: str, drawn: Sequence[int]) -> float:
        least = statistics.median(times[floor if side == "ours" else theirs_floor][i] for i in drawn)
        return statistics.median(times[side][i] for i in drawn) - least

    def ratio(side: str, drawn: Sequence[int]) -> float:
        return excess(side, drawn) / max(excess("theirs", drawn), 1e-9)

    draw = random.Random(0)
    ratios = sorted(ratio("ours", draw.choices(indices, k=len(indices))) for _ in range(2000))
    return {
        "ours_beyond_s": excess("ours", indices),
        "theirs_beyond_s": excess("theirs", indices),
        "beyond_ratio": ratio("ours", indices),
        "beyond_low": ratios[int(0.025 * 2000)],
        "beyond_high": ratios[int(0.975 * 2000)],
        "beyond_a_a": ratio("again", indices),
    }


def bootstrap(values: list[float], rounds: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def on_ranks(world: int, function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call `function(*args)` on `world` ranks with one thread each; rank 0's result. Their groups use shared memory,
    except those that `peers_on_gloo` yields or are created under it."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_entry, (world, scratch, function, args), nprocs=world)  # type: ignore[attr-defined]
        return json.loads((Path(scratch) / "result.json").read_text())


def _entry(rank: int, world: int, scratch: str, function: Callable[..., dict[str, Any]], args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{scratch}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group(shared_memory.register(), store=store, rank=rank, world_size=world)
    assert world == 1 or shared_memory.is_ours(dist.group.WORLD), "no shared memory between the ranks"
    result = function(*args)
    if rank == 0:
        (Path(scratch) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def peers_on_gloo() -> Iterator[dist.ProcessGroup]:
    """Yield a gloo group of all ranks for a peer to use as its world; groups that are created meanwhile use gloo."""
    create = dist.new_group

    def on_gloo(*args: Any, **options: Any) -> Any:
        return create(*args, **{**options, "backend": "gloo"})

    with mock.patch.object(dist, "new_group", on_gloo), mock.patch.object(dist.distributed_c10d, "new_group", on_gloo):
        group = on_gloo()
        assert isinstance(group, dist.ProcessGroup)
        yield group


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "commit": git.stdout.strip(),
    }


def compare(
    name: str,
    results: Iterable[tuple[dict[str, Any], float | None]],
    about: Callable[[dict[str, Any]], str] = lambda row: "",
) -> list[dict[str, Any]]:
    """Summarise each result of `time_pairs` with its bar, print it with what `about` says of it, and write all rows."""
    print(f"{'case':34}{'size':>9}{'ours ms':>10}{'theirs ms':>11}{'ratio':>8}{'95 %':>12}{'A/A':>7}{'CPU':>7}")
    rows = []
    for result, bar in results:
        row = {**result, **summarise(result["times"], bar)}
        interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
        verdict = "" if bar is None else f"  {'holds' if row['holds'] else 'DOES NOT HOLD'} <= {bar}"
        print(
            f"{row['case']:34}{row.get('size', ''):>9}{row['ours_median_s'] * 1e3:10.2f}"
            f"{row['theirs_median_s'] * 1e3:11.2f}{row['ratio']:8.2f}{interval:>12}{row['a_a_ratio']:7.2f}"
            f"{row['cpu_ratio'] or 0:7.2f}{verdict}  {about(row)}".rstrip(),
            flush=True,
        )
        rows.append(row)
    if name:
        print("written to", write(name, {}, rows))
    return rows


def write(name: str, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Path:
    """Write `results/<date>-<name>.json`, each row with the environment it was measured in and `facts` (the peer).
    Rows of the same day of other cases stay."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    surroundings = {**environment(), "command": shlex.join(sys.orig_argv), **facts}
    new = [{**row, "environment": surroundings} for row in rows]
    measured = {_what(row) for row in new}
    kept = [row for row in earlier if _what(row) not in measured]
    path.write_text(json.dumps({"rows": [*kept, *new]}, indent=1) + "\n")
    return path


def _what(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(str(row.get(key)) for key in ("case", "size", "model", "compiled", "degrees"))
