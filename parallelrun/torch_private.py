"""The only file that uses torch's private symbols. Each function says why it needs them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

T = TypeVar("T")


def fsdp_initialise(root: FSDPModule) -> None:
    """Run the initialisation that FSDP2 otherwise does in its root's first forward.

    It may move shards into padded storage, so an optimizer must take the local shards afterwards.
    """
    root._get_fsdp_state()._lazy_init()


def fsdp_reduce(root: FSDPModule) -> None:
    """Reduce the gradients that the units of an FSDP2 root have accumulated, outside any backward pass.

    `torch.distributed.pipelining` does the same after a schedule.
    """
    state = root._get_fsdp_state()
    for one in state._state_ctx.all_states:
        groups = getattr(one, "_fsdp_param_groups", None)  # torch 2.11 has one group per state, under another name
        for group in groups if groups is not None else filter(None, [one._fsdp_param_group]):
            group.post_backward()
    state._root_post_backward_final_callback()


def trust_metadata(stage: PipelineStage) -> None:
    """Switch off a pipeline stage's check that its inputs and outputs have the shapes and strides of its metadata.

    torch 2.11 also checks tensors that are never sent; torch 2.13 does not.
    """
    unchecked: Any = stage
    unchecked._validate_fwd_input = unchecked._validate_fwd_outputs = lambda *_: None


def receive_on_demand(stage: PipelineStage) -> None:
    """Prevent a pipeline stage from allocating one buffer per microbatch and direction for the duration of a step.

    Its receive buffers become meta tensors; the caller replaces one by a real buffer when it posts the receive.
    """
    patched: Any = stage
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        prepare = getattr(stage, name)

        def prepare_on_meta(*args: Any, prepare: Callable[..., Any] = prepare, **options: Any) -> Any:
            device, patched.device = patched.device, torch.device("meta")
            try:
                return prepare(*args, **options)
            finally:
                patched.device = device

        setattr(patched, name, prepare_on_meta)


def start_messages(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Post sends or receives as torch's pipeline schedules do, so that both ends of a message use one communicator."""
    from torch.distributed.pipelining.schedules import _batch_p2p

    return _batch_p2p(operations)


def set_messages(schedule: PipelineScheduleMulti, steps: list[list[tuple[str, int, int]]]) -> None:
    """Make a schedule with several stages per rank run exactly these (kind, stage, microbatch) per rank.

    Otherwise torch inserts the messages itself, in an order that has no public access.
    """
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    unchecked: Any = schedule
    unchecked.pipeline_order_with_comms = {
        rank: [_Action(stage, _ComputationType.from_str(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(steps)
    }


def greet_others_only(stage: PipelineStage) -> None:
    """Remove a stage's initial messages to its own rank, which gloo cannot send.

    torch 2.11 sends them to establish connections where a V schedule turns; torch 2.13 does not.
    """
    patched: Any = stage
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greetings is not None:
        patched._get_init_p2p_neighbors_ops = lambda: [one for one in greetings() if one.peer != dist.get_rank()]


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply many tensors in place with one call from Python, which is faster than a loop."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, 0-d, with one call from Python."""
    return list(torch._foreach_norm(tensors)) if tensors else []


def phase(name: str) -> AbstractContextManager[Any]:
    """Return a context that names what is done inside in the trace of torch's profiler, if one runs.

    `record_function` takes 7 microseconds even if none does.
    """
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


def fused_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Take a step of torch's fused AdamW on tensors of one dtype.

    `torch.optim.AdamW.step` does the same after it has collected the lists, in several loops over the parameters.
    """
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors with one call from Python."""
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add many tensors in place with one call from Python."""
    if targets:
        torch._foreach_add_(targets, sources)


def keep_compiled_buffers() -> None:
    """Let compiled backward passes run more than once, for zero bubble; by default they reuse their buffers."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


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


def _watch() -> _Watch | None:
    return _ON_DEVICE[-1] if _ON_DEVICE else _WAITED.get()


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
    """Return `wait()`, timed as `Work.wait` is."""
    watch = _watch()
    if watch is None:
        return wait()
    began = watch.mark()
    result = wait()
    watch.waited(is_message(), began, watch.mark())
    return result


class _Observers:
    """The observers of this thread, outermost first; each has `collective`, which `observe` describes.

    torch hands its own thread-local objects to the threads in which autograd runs backward (on GPUs), as it does with
    dispatch modes. A ContextVar would be empty there.
    """

    _KEY = "parallelrun_observers"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0  # that have observers: mostly none, and torch's storage is slow

    def get(self) -> tuple[Any, ...]:
        if not self._num_threads or not torch._C._is_key_in_tls(self._KEY):
            return ()
        found: tuple[Any, ...] = torch._C._get_obj_in_tls(self._KEY)
        return found

    def set(self, found: tuple[Any, ...]) -> None:
        with self._lock:
            self._num_threads += bool(found) - bool(self.get())
            torch._C._stash_obj_in_tls(self._KEY, found)


observers = _Observers()


def observe(operations: Iterable[str]) -> Callable[[], None]:
    """Let `observers` see some operations of c10d, until the function that is returned is called.

    `observer.collective(name, args)` returns a context to enter around an operation. A dispatch mode would see every
    other operation, too, at 12 microseconds each. The kernels that are registered here precede those of all devices.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in filter(partial(hasattr, torch.ops.c10d), operations):
        kernel = partial(_observed, name, getattr(torch.ops.c10d, name).default)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library._destroy


def _observed(name: str, operation: Any, keyset: Any, *args: Any) -> Any:
    with ExitStack() as entered:
        for observer in observers.get():
            entered.enter_context(observer.collective(name, args))
        return operation.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args)


@contextmanager
def dispatch_modes(modes: list[Any]) -> Iterator[None]:
    """Enter the dispatch modes and observers of another thread in this thread (torch keeps modes per thread)."""
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        yield


def current_dispatch_modes() -> list[Any]:
    """Return the active dispatch modes and observers of this thread, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_dispatch_mode_stack(), *observers.get()]


def default_store() -> Any:
    """Return the store of the rendezvous. It carries small values where a collective might match a wrong one."""
    return dist.distributed_c10d._get_default_store()


def has_grouped_product(rows: Tensor, weights: Tensor) -> bool:
    """Return whether `grouped_product` supports them: not fp64, some rows, lines that are multiples of 16 bytes."""
    line = 16 // rows.element_size()
    aligned = rows.size(-1) % line == 0 and weights.size(1) % line == 0
    return rows.dtype in (torch.float32, torch.bfloat16, torch.float16) and aligned and rows.size(0) > 0


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows (n, in), sorted by group, by their group's weights (groups, out, in); return (n, out).

    counts: (groups,), the rows of each group. `functional.grouped_mm` is private in older versions of torch.
    """
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = grouped(rows.contiguous(), weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    return product


def before_compiling(callback: Callable[[object], None]) -> None:
    """Call `callback` before torch.compile traces anything, if its front end is imported: torch.distributed.pipelining
    imports it, too, and then mostly nothing is compiled. What keeps a function out of graphs costs at each call."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.callback import callback_handler

        if callback not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(callback)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return gloo's implementation of a group, for a backend that uses it."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def is_observed() -> bool:
    """Return whether this thread has `observers` or dispatch modes."""
    return bool(observers.get()) or torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def observed(operation: str, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Let the `observers` see an operation of c10d by a group that is written in Python; suspend dispatch modes inside.

    torch calls the methods of such a group directly, so that `observe` does not see them. Modes do not see how torch's
    own groups copy and sum.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as entered:
        for observer in observers.get():
            entered.enter_context(observer.collective(operation, arguments))
        entered.enter_context(_disable_current_modes())
        yield
