"""Timing of a rank's device: matrix products, copies and collectives. GPUs are timed by CUDA events.

All ranks do the same at the same time, so that cores which share caches and memory are measured as runs use them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from parallelrun.cli.calibration.measurements import Sample, TimedExchange, TimedProduct
from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.mesh import Group

REPEATS = 5
LONG_S = 1.0  # what takes longer is timed once: 64-bit products of GPUs for games and inference
PURPOSE = "calibrate"
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COPIED = (2**18, 2**24)  # bytes: within caches, and beyond most of them
EXCHANGED = (2**10, 2**16, 2**20, 2**23)  # bytes of payload
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Products:
    """The products that are timed on a kind of device. precision: that of trainings there; rows and hidden: of layers,
    large enough that computing and not the start of a product takes the time; misaligned: (rows, inner, columns) that
    are no multiples of tiles; square: the size of the product that shows the peak of a precision."""

    precision: str
    rows: tuple[int, ...]
    hidden: tuple[int, ...]
    misaligned: tuple[tuple[int, int, int], ...]
    square: int


PRODUCTS = {
    "cpu": Products("fp32", (128, 1024), (64, 256, 768), ((257, 250, 1001), (1000, 100, 300), (1023, 513, 513)), 768),
    "cuda": Products(
        "bf16", (1024, 8192), (512, 2048, 5120), ((2057, 2002, 8010), (8000, 1000, 3000), (4095, 4104, 4104)), 8192
    ),
}


@dataclass(frozen=True)
class Clock:
    """Times bodies on a device. seconds: about how long one measurement may take."""

    device: torch.device
    seconds: float = 0.08

    def sample(self, body: Callable[[], object], calls: int | None = None) -> Sample:
        """The times of one call of `body`. calls: how often in each of REPEATS; ranks that meet in it must agree."""
        body()
        if calls is None:
            seconds = self._once(body, 1)
            if seconds > LONG_S:
                return Sample(seconds)
            calls = max(1, int(self.seconds / REPEATS / max(seconds, 1e-7)))
        durations = [self._once(body, calls) for _ in range(REPEATS)]
        median = statistics.median(durations)
        lower, _, upper = statistics.quantiles(durations, n=4)
        return Sample(median, (upper - lower) / median)

    def _once(self, body: Callable[[], object], calls: int) -> float:
        if self.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(calls):
                body()
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3 / calls
        began_s = time.perf_counter()
        for _ in range(calls):
            body()
        return (time.perf_counter() - began_s) / calls


def shapes(timed: Products) -> Iterator[tuple[str, int, int, int]]:
    """(pass, rows, inner, columns): each product of two layers forward, for its input's and its weights' gradient."""
    for rows in timed.rows:
        for hidden in timed.hidden:
            for inner, columns in ((hidden, hidden), (hidden, 4 * hidden)):
                yield "forward", rows, inner, columns
                yield "input", rows, columns, inner
                yield "weight", columns, rows, inner
    for rows, inner, columns in timed.misaligned:
        yield "forward", rows, inner, columns
        yield "weight", columns, rows, inner


def products(clock: Clock, start: Callable[[], None]) -> list[TimedProduct]:
    """Time every shape. start: waits for the other ranks."""
    rows_timed, timed = [], PRODUCTS[clock.device.type]
    for kind, rows, inner, columns in shapes(timed):
        body = _product(kind, rows, inner, columns, PRECISIONS[timed.precision], clock.device)
        start()
        with torch_private.products_of_training(rows * inner * columns):
            rows_timed.append(TimedProduct(rows, inner, columns, clock.sample(body), timed.precision))
    return rows_timed


def peak(clock: Clock, precision: str) -> TimedProduct:
    """Time a large square product."""
    size = PRODUCTS[clock.device.type].square
    sample = clock.sample(_product("forward", size, size, size, PRECISIONS[precision], clock.device))
    return TimedProduct(size, size, size, sample, precision)


def _product(
    kind: str, rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """A product with its operands stored as a linear layer has them."""
    left = torch.randn((inner, rows) if kind == "weight" else (rows, inner), device=device).to(dtype)
    right = torch.randn((columns, inner) if kind == "forward" else (inner, columns), device=device).to(dtype)
    first = left.t() if kind == "weight" else left
    second = right.t() if kind == "forward" else right
    return lambda: torch.mm(first, second)


def copies(clock: Clock) -> float:
    """Bytes a second that the fastest copy reads and writes."""
    fastest = 0.0
    for size in COPIED if clock.device.type == "cpu" else (2**28,):
        source = torch.ones(size // 4, device=clock.device)
        target = torch.empty_like(source)
        sample = clock.sample(lambda: target.copy_(source))  # noqa: B023 - called at once
        fastest = max(fastest, 2 * size / sample.seconds)
    return fastest


def exchanges(clock: Clock, group: Group) -> list[TimedExchange]:
    """Time every collective at every size over the group, on this rank."""
    rows = []
    for operation in OPERATIONS:
        for size in EXCHANGED:
            body = exchange(operation, size, group, clock.device)
            calls = max(2, min(30, 2**21 // size))
            comm.all_reduce(torch.zeros(1, device=clock.device), group, PURPOSE)
            rows.append(TimedExchange(operation, size, group.size, clock.sample(body, calls)))
    return rows


def exchange(operation: str, num_bytes: int, group: Group, device: torch.device) -> Callable[[], object]:
    """One call of a collective with a payload of `num_bytes`; `send`: a message to the next rank and one from the last,
    of which one is counted."""
    full = torch.ones(num_bytes // 4 // group.size * group.size, device=device)
    part = torch.ones(full.numel() // group.size, device=device)
    other = torch.empty_like(full)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size

    def send() -> None:
        for work in comm.exchange([(full, after)], [(other, before)], group, PURPOSE):
            work.wait()

    bodies: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(full, group, PURPOSE, "max"),
        "all_gather": lambda: comm.all_gather_into(full, part, group, PURPOSE),
        "reduce_scatter": lambda: comm.reduce_scatter_into(part, full, group, PURPOSE),
        "all_to_all": lambda: comm.all_to_all(other, full, group, PURPOSE),
        "broadcast": lambda: comm.broadcast(full, group, PURPOSE),
        "send": send,
    }
    return bodies[operation]
