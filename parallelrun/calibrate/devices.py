"""Timing of a rank's device: matrix products, copies and collectives. GPUs are timed by CUDA events.

All ranks do the same at the same time, so that cores which share caches and memory are measured as runs use them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from parallelrun import comm, torch_private
from parallelrun.calibrate.measurements import CPU, WALL, Sample, TimedExchange, TimedProduct
from parallelrun.mesh import Group, Mesh

REPEATS = 5
PURPOSE = "calibrate"
ROWS, HIDDEN = (128, 1024), (64, 256, 768)
MISALIGNED = ((257, 250, 1001), (1000, 100, 300), (1023, 513, 513))
PEAK_SIZES = (768, 8192)  # of the square product that shows the peak of a precision: on a CPU, on a GPU
COPIED = (2**18, 2**24)  # bytes: within caches, and beyond most of them
EXCHANGED = (2**10, 2**16, 2**20, 2**23)  # bytes of payload
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Clock:
    """Times bodies on a device. seconds: about how long one measurement may take."""

    device: torch.device
    seconds: float = 0.08

    def sample(self, body: Callable[[], object], calls: int | None = None) -> Sample:
        """The times of one call of `body`. calls: how often in each of REPEATS; ranks that meet in it must agree."""
        body()
        if calls is None:
            wall, _ = self._once(body, 1)
            calls = max(1, int(self.seconds / REPEATS / max(wall, 1e-7)))
        found = [self._once(body, calls) for _ in range(REPEATS)]
        walls, cpus = (sorted(column) for column in zip(*found))
        median = statistics.median(walls)
        lower, _, upper = statistics.quantiles(walls, n=4)
        return Sample(median, statistics.median(cpus), (upper - lower) / median)

    def _once(self, body: Callable[[], object], calls: int) -> tuple[float, float]:
        if self.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(calls):
                body()
            ended.record()
            ended.synchronize()
            seconds = float(began.elapsed_time(ended)) / 1e3 / calls
            return seconds, seconds
        began_s, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            body()
        return (time.perf_counter() - began_s) / calls, (time.process_time() - began_cpu) / calls


def shapes() -> Iterator[tuple[str, int, int, int]]:
    """(pass, rows, inner, columns): each product of two layers forward, for its input's and its weights' gradient."""
    for rows in ROWS:
        for hidden in HIDDEN:
            for inner, columns in ((hidden, hidden), (hidden, 4 * hidden)):
                yield "forward", rows, inner, columns
                yield "input", rows, columns, inner
                yield "weight", columns, rows, inner
    for rows, inner, columns in MISALIGNED:
        yield "forward", rows, inner, columns
        yield "weight", columns, rows, inner


def products(clock: Clock, start: Callable[[], None]) -> list[TimedProduct]:
    """Time every shape in fp32. start: waits for the other ranks."""
    found = []
    for kind, rows, inner, columns in shapes():
        body = _product(kind, rows, inner, columns, torch.float32, clock.device)
        start()
        with torch_private.products_of_training(rows * inner * columns):
            found.append(TimedProduct(rows, inner, columns, clock.sample(body)))
    return found


def peak(clock: Clock, dtype: torch.dtype) -> TimedProduct:
    """Time a large square product."""
    size = PEAK_SIZES[clock.device.type == "cuda"]
    sample = clock.sample(_product("forward", size, size, size, dtype, clock.device))
    return TimedProduct(size, size, size, sample)


def _product(
    kind: str, rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """A product with its operands stored as a linear layer has them."""
    left = torch.randn((inner, rows) if kind == "weight" else (rows, inner), device=device).to(dtype)
    right = torch.randn((columns, inner) if kind == "forward" else (inner, columns), device=device).to(dtype)
    first = left.t() if kind == "weight" else left
    second = right.t() if kind == "forward" else right
    return lambda: torch.mm(first, second)


def copies(clock: Clock) -> dict[str, float]:
    """Bytes a second that the fastest copy reads and writes, by the wall's clock and by CPU time."""
    fastest = {WALL: 0.0, CPU: 0.0}
    for size in COPIED if clock.device.type == "cpu" else (2**28,):
        source = torch.ones(size // 4, device=clock.device)
        target = torch.empty_like(source)
        sample = clock.sample(lambda: target.copy_(source))  # noqa: B023 - called at once
        fastest = {name: max(rate, 2 * size / sample.seconds(name)) for name, rate in fastest.items()}
    return fastest


def exchanges(clock: Clock, mesh: Mesh, group: Group) -> list[TimedExchange]:
    """Time every collective at every size over the group; the wall time of this rank, its CPU seconds."""
    found = []
    for operation in OPERATIONS:
        for size in EXCHANGED:
            body = exchange(operation, size, group, clock.device)
            calls = max(2, min(30, 2**21 // size))
            comm.all_reduce(torch.zeros(1, device=clock.device), group, PURPOSE)
            found.append(TimedExchange(operation, size, group.size, clock.sample(body, calls)))
    return found


def exchange(operation: str, num_bytes: int, group: Group, device: torch.device) -> Callable[[], object]:
    """One call of a collective with a payload of `num_bytes`; `send`: a message to the next rank and one from the last,
    of which one is counted."""
    whole = torch.ones(num_bytes // 4 // group.size * group.size, device=device)
    part = torch.ones(whole.numel() // group.size, device=device)
    other = torch.empty_like(whole)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size

    def send() -> None:
        for work in comm.exchange([(whole, after)], [(other, before)], group, PURPOSE):
            work.wait()

    bodies: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(whole, group, PURPOSE, "max"),
        "all_gather": lambda: comm.all_gather_into(whole, part, group, PURPOSE),
        "reduce_scatter": lambda: comm.reduce_scatter_into(part, whole, group, PURPOSE),
        "all_to_all": lambda: comm.all_to_all(other, whole, group, PURPOSE),
        "broadcast": lambda: comm.broadcast(whole, group, PURPOSE),
        "send": send,
    }
    return bodies[operation]
