"""What a step is made of: products alone, the step without communication, copies, waits, Python; beside the peer's.

    python -m benchmarks.native_profile                          # ddp, fsdp, tp and pp at the mixed size, and the ring
    python -m benchmarks.native_profile --case tp --pairs 10

All are timed in turn in the same two processes, one thread each, so both cores compute at the same time:

step, theirs        a full step, as `benchmarks.native` times it
products            the matrix products and attentions of our step, alone, with operands of their shapes and strides
torchs_products     the same by torch's own kernels: no program on these cores that calls those takes less
free                our step with collectives and messages that do nothing: its time if communication were free
copies              what shared memory copies and adds, with its Python, in CPU time (rank 0)
waits               rank 0 waits for the other rank: all that is left of its communication
python              Python of this project and of torch outside operators, by cProfile, which makes it an upper bound

`ring` times the copies and sums of the ring's messages for 16 MiB, without a message, beside gloo's all-reduce.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.native import CASES, LR, make_sides
from benchmarks.native_python import shares
from benchmarks.pairs import WithTorchsProducts, on_ranks, peers_on_gloo, read_arguments, time_pairs, write
from benchmarks.plain_gpt import SIZES
from benchmarks.ring import NUMEL
from parallelrun.distributed.shared_memory.channel import CollectiveChannel
from parallelrun.distributed.shared_memory.engine import Engine
from parallelrun.distributed.shared_memory.group import SharedMemoryGroup
from parallelrun.distributed.shared_memory.messages import MessageChannel
from parallelrun.distributed.shared_memory.named_group import is_operation
from parallelrun.distributed.shared_memory.work import SharedMemoryWork
from parallelrun.strategies.data.common.allreduce.rounds import PIECE_BYTES
from parallelrun.training.loop import step
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.schedules import LossScaler

PROFILED = ("ddp", "fsdp", "tp", "pp", "ring")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward")  # fmt: skip


class Products(TorchDispatchMode):
    """Notes the products of a step; `run` computes them again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        self._operands: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            self._calls.append((function, *tree_map_only(Tensor, self._operand, (args, kwargs or {}))))
        return function(*args, **(kwargs or {}))

    def _operand(self, tensor: Tensor) -> Tensor:
        """One tensor stands for all of its shape, as warm in the caches as can be."""
        key = tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._operands:
            same = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            self._operands[key] = same.copy_(tensor.detach())
        return self._operands[key]

    @torch.no_grad()
    def run(self) -> None:
        for function, args, kwargs in self._calls:
            function(*args, **kwargs)


@contextmanager
def no_communication() -> Iterator[None]:
    """Let the operations of groups in shared memory return at once, with their tensors as they are."""

    def nothing(self: SharedMemoryGroup, *_: Any, **__: Any) -> SharedMemoryWork:
        return SharedMemoryWork(self._engine, (), 1.0, [])

    operations: dict[str, Any] = {
        name: nothing for name, method in vars(SharedMemoryGroup).items() if is_operation(method)
    }
    with mock.patch.multiple(SharedMemoryGroup, **operations):
        yield


class Exchange:
    """CPU seconds of copies and seconds of waits of this thread, while its methods stand in for the backend's."""

    def __init__(self) -> None:
        self.copies = self.waits = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        wait = Engine.wait

        def timed_wait(engine: Engine, *args: Any) -> None:
            began, copies = time.perf_counter(), self.copies
            wait(engine, *args)
            self.waits += time.perf_counter() - began - (self.copies - copies)

        with (
            mock.patch.object(CollectiveChannel, "advance", self._copying(CollectiveChannel.advance)),
            mock.patch.object(MessageChannel, "advance", self._copying(MessageChannel.advance)),
            mock.patch.object(Engine, "wait", timed_wait),
        ):
            yield

    def _copying(self, advance: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def timed(channel: Any) -> bool:
            began = time.thread_time()
            try:
                return advance(channel)
            finally:
                self.copies += time.thread_time() - began

        return timed


def _stepper(training: Training) -> Callable[[], None]:
    scaler, number = LossScaler(training.config.precision, scaled=False), 0

    def run() -> None:
        nonlocal number
        number += 1
        assert step.train_step(training, number, LR, scaler).applied, "a step that changes no weights is no full step"

    return run


def _step(case: str, size: str, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank: both sides of `benchmarks.native`, our products, and our step without communication."""
    training, peer = make_sides(case, SIZES[size])
    ours, unconnected = _stepper(training), _stepper(make_sides(case, SIZES[size])[0])

    def free() -> None:  # what has not arrived may be no number; the weights are updated all the same
        with no_communication(), mock.patch.object(step, "isfinite", lambda _: True):
            unconnected()

    for _ in range(3):
        ours()
        unconnected()
        peer.step()
    with Products() as products:
        ours()
    exchange = Exchange()
    with exchange.watched():
        for _ in range(8):
            ours()
    python = shares(ours, 8)
    torchs = WithTorchsProducts(products.run)
    beside = {"products": products.run, "torchs_products": torchs, "free": free}
    times = time_pairs(ours, WithTorchsProducts(peer.step), pairs, warmup, **beside)
    return {
        "times": times,
        "copies_cpu_s": exchange.copies / 8,
        "waits_s": exchange.waits / 8,
        "python_s": python.get("ours", 0.0) + python.get("torch", 0.0),
    }


def _ring(case: str, size: str, pairs: int, warmup: int) -> dict[str, Any]:
    """One rank of two: what the ring copies and adds of 16 MiB, in its pieces."""
    own, staged, arrived = torch.zeros(NUMEL), torch.zeros(NUMEL // 2), torch.zeros(NUMEL // 2)
    halves, piece = (slice(0, NUMEL // 2), slice(NUMEL // 2, NUMEL)), PIECE_BYTES // 4

    def copies() -> None:
        for mine, theirs in (halves, halves[::-1]):  # scatter-reduce, then all-gather
            for start in range(0, NUMEL // 2, piece):
                part = slice(start, start + piece)
                staged[part].copy_(own[mine][part])  # into shared memory
                if (mine, theirs) == halves:
                    arrived[part].copy_(staged[part])  # out of it
                    own[theirs][part].add_(arrived[part])
                else:
                    own[theirs][part].copy_(staged[part])

    with peers_on_gloo() as gloo:

        def theirs() -> None:
            dist.all_reduce(own, group=gloo)

        theirs()
        own.zero_()
        return {"times": time_pairs(copies, theirs, pairs, warmup)}


def _row(case: str, size: str, result: dict[str, Any]) -> dict[str, Any]:
    times = result["times"]
    median = {name: statistics.median(values) for name, values in times.items()}
    theirs = median["theirs"]
    ratios = {name: median[name] / theirs for name in ("ours", "products", "torchs_products", "free") if name in median}
    cpu = {name: median[f"{name}_cpu"] / median["theirs_cpu"] for name in ratios}
    return {"case": case, "size": size, **result, "median_s": median, "ratios": ratios, "cpu_ratios": cpu}


def main() -> None:
    arguments = read_arguments(__doc__, "native-profile", PROFILED, ("mixed",))
    assert set(arguments.case.split(",")) <= set(PROFILED) & {*CASES, "ring"}, f"--case: some of {PROFILED}"
    rows = []
    print("milliseconds of a step, two ranks at once; in brackets CPU milliseconds of a rank")
    for case in arguments.case.split(","):
        for size in arguments.size.split(",") if case != "ring" else ("16 MiB",):
            result = on_ranks(2, _ring if case == "ring" else _step, case, size, arguments.pairs, arguments.warmup)
            row = _row(case, size, result)
            rows.append(row)
            found = [f"{name} {row['median_s'][name] * 1e3:.1f} [{row['median_s'][name + '_cpu'] * 500:.1f}]"
                     for name in row["median_s"] if f"{name}_cpu" in row["median_s"] and name != "again"]  # fmt: skip
            if case != "ring":
                found += [f"{name[:-2]} {row[name] * 1e3:.1f}" for name in ("copies_cpu_s", "waits_s", "python_s")]
            over = [f"{name} {row['ratios'][name]:.2f} [{row['cpu_ratios'][name]:.2f}]" for name in row["ratios"]]
            print(f"{case:5}{size:7} {'  '.join(found)}\n{'':12} over theirs: {'  '.join(over)}", flush=True)
    if arguments.name:
        command = f"python -m benchmarks.native_profile --case {arguments.case} --pairs {arguments.pairs}"
        print("written to", write(arguments.name, {"command": command}, rows))


if __name__ == "__main__":
    main()
