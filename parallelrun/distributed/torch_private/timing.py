"""Times of waits for communication, which torch has no hook for, and names of phases for torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

T = TypeVar("T")

# On CPU, `timed_waits` times only its own thread, because waits of other threads do not block computation. On a device,
# a wait of any thread blocks the computing stream (autograd has its own threads), so that case uses `_ON_DEVICE`.
_WAITED: ContextVar[_Watch | None] = ContextVar("parallelrun_waited", default=None)
_ON_DEVICE: list[_Watch] = []
_NOTHING = nullcontext()


@dataclass(frozen=True)
class _Watch:
    """mark: returns the present moment of some clock; waited(is_message, began, ended): called after each wait."""

    mark: Callable[[], Any]
    waited: Callable[[bool, Any, Any], None]


@contextmanager
def timed_waits(
    waited: Callable[[bool, Any, Any], None], mark: Callable[[], Any] = time.perf_counter, on_device: bool = False
) -> Iterator[None]:
    """Call `waited(is_message, began, ended)` after every `Work.wait` inside, including those of FSDP2 and pipelines.

    is_message: whether the Work is a send or a receive. torch has no hook for waits, so `Work.wait` is replaced
    meanwhile. Waits of other threads are ignored.

    on_device: for CUDA, where `wait` returns at once and blocks the stream. `mark` then records an event. The stream's
    waits for events (FSDP2) count too, and so do blocking collectives, which run in the stream (`in_stream`). Waits of
    all threads count.
    """
    work_type: Any = dist.Work
    stream_type: Any = torch.cuda.Stream
    c10d: Any = torch._C._distributed_c10d
    op_type = c10d.OpType
    messages = {int(op_type.SEND), int(op_type.RECV), int(op_type.RECVANYSOURCE)}
    wait, wait_event = work_type.wait, stream_type.wait_event

    def timed_wait(work: Any, *args: Any, **options: Any) -> Any:
        return timed(lambda: wait(work, *args, **options), lambda: work._get_op_type() in messages)

    def timed_wait_event(stream: Any, event: Any) -> None:
        if stream == torch.cuda.current_stream():
            timed(lambda: wait_event(stream, event))
        else:
            wait_event(stream, event)

    watch = _Watch(mark, waited)
    with ExitStack() as undo:
        undo.callback(setattr, work_type, "wait", wait)
        work_type.wait = timed_wait
        if on_device:
            undo.callback(setattr, stream_type, "wait_event", wait_event)
            stream_type.wait_event = timed_wait_event
            _ON_DEVICE.append(watch)
            undo.callback(_ON_DEVICE.pop)
        else:
            undo.callback(_WAITED.reset, _WAITED.set(watch))
        yield


def in_stream() -> AbstractContextManager[None]:
    """Count a blocking collective as one wait under `timed_waits(on_device=True)`."""
    return _in_stream(_ON_DEVICE[-1]) if _ON_DEVICE else _NOTHING


@contextmanager
def _in_stream(watch: _Watch) -> Iterator[None]:
    began = watch.mark()
    _ON_DEVICE.append(_Watch(lambda: None, lambda *_: None))  # its own `Work.wait` is part of it
    try:
        yield
    finally:
        _ON_DEVICE.pop()
        watch.waited(False, began, watch.mark())


def timed(wait: Callable[[], T], is_message: Callable[[], bool] = lambda: False) -> T:
    """Return `wait()`, timed as `Work.wait` is. A wait inside it, such as gloo's for a message to another host, is a
    part of it."""
    watch = _ON_DEVICE[-1] if _ON_DEVICE else _WAITED.get()
    if watch is None:
        return wait()
    began = watch.mark()
    inner = _WAITED.set(None)
    try:
        result = wait()
    finally:
        _WAITED.reset(inner)
    watch.waited(is_message(), began, watch.mark())
    return result


def import_profiler() -> None:
    """Import what torch's optimizers import at their first step, whether a profiler runs or not."""
    with record_function("first"):
        pass


def phase(name: str) -> AbstractContextManager[Any]:
    """Return a context that names what is done inside in the trace of torch's profiler, if one runs.

    `record_function` takes 7 microseconds even if none does.
    """
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()
