"""The one file that touches torch's private symbols. Small functions, each saying what it needs them for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti


def schedule_actions(name: str, pp: int, num_microbatches: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """The order of actions of torch's pipeline schedule `name`: (kind, stage, microbatch) per pp rank.

    Public schedules keep their order in attributes only their own runtime reads. For tests: ours must equal it.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    orders = get_schedule_ops(name, pp, num_microbatches, chunks if chunks > 1 else None)
    kinds = ("F", "B", "I", "W")
    return [
        [(str(a.computation_type.value), a.stage_index, a.microbatch_index or 0) for a in order
         if a is not None and a.computation_type.value in kinds]
        for order in orders
    ]  # fmt: skip


def fsdp_initialise(root: FSDPModule) -> None:
    """Do now what FSDP2 does at its root's first forward, which may move shards into padded storage.

    Optimizers that hold local shards must take them after that; there is no public way to ask for it.
    """
    root._get_fsdp_state()._lazy_init()


def fsdp_reduce(root: FSDPModule) -> None:
    """Reduce what gradients the units under an FSDP2 root have accumulated, outside any backward pass.

    As `torch.distributed.pipelining` does after a schedule. A unit without gradients does nothing.
    """
    state = root._get_fsdp_state()
    for one in state._state_ctx.all_states:
        groups = getattr(one, "_fsdp_param_groups", None)  # torch 2.11 has one group per state, under another name
        for group in groups if groups is not None else filter(None, [one._fsdp_param_group]):
            group.post_backward()
    state._root_post_backward_final_callback()


def trust_metadata(stage: PipelineStage) -> None:
    """Let a pipeline stage give what it gives, whatever its metadata say of the last stage's output and of strides.

    As torch 2.13 does by itself; 2.11 compares every input and output, those that are never sent included.
    """
    unchecked: Any = stage
    unchecked._validate_fwd_input = unchecked._validate_fwd_outputs = lambda *_: None


def receive_on_demand(stage: PipelineStage) -> None:
    """Keep a pipeline stage from allocating a buffer per microbatch and direction for the whole step.

    Its descriptions of what it receives get meta tensors; whoever posts a receive puts a buffer in their place.
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
    """Let a schedule of several stages per rank run exactly these (kind, stage, microbatch) per rank.

    torch inserts the messages by itself, in an order that its public interface does not tell.
    """
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    unchecked: Any = schedule
    unchecked.pipeline_order_with_comms = {
        rank: [_Action(stage, _ComputationType.from_str(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(steps)
    }


def greet_others_only(stage: PipelineStage) -> None:
    """Take a stage's messages to its own rank, at the turn of a V, out of those by which torch 2.11 meets neighbours.

    gloo cannot send them. torch 2.13 meets neighbours by others, and sends none to itself.
    """
    patched: Any = stage
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greetings is not None:
        patched._get_init_p2p_neighbors_ops = lambda: [one for one in greetings() if one.peer != dist.get_rank()]


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply many tensors in place with one call from Python: the loop must not pay per parameter."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, 0-d, with one call from Python."""
    return list(torch._foreach_norm(tensors)) if tensors else []


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors with one call from Python."""
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add many tensors in place with one call from Python."""
    if targets:
        torch._foreach_add_(targets, sources)


def keep_compiled_buffers() -> None:
    """Let compiled backwards run more than once, as zero bubble does; by default they give their buffers away."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


# Set inside `timed_waits`, in its thread alone: another thread's waits keep nobody from computing. On a device any
# thread's waits hold up the stream that computes (autograd has threads of its own there), so those go by `_ON_DEVICE`.
_WAITED: ContextVar[_Watch | None] = ContextVar("parallelrun_waited", default=None)
_ON_DEVICE: list[_Watch] = []


@dataclass(frozen=True)
class _Watch:
    """mark: the present moment, on whatever clock; waited(is_message, began, ended): told of a wait by its moments."""

    mark: Callable[[], Any]
    waited: Callable[[bool, Any, Any], None]


def _watch() -> _Watch | None:
    return _ON_DEVICE[-1] if _ON_DEVICE else _WAITED.get()


@contextmanager
def timed_waits(
    waited: Callable[[bool, Any, Any], None], mark: Callable[[], Any] = time.perf_counter, on_device: bool = False
) -> Iterator[None]:
    """Call `waited(is_message, began, ended)` after every `Work.wait` inside: ours, FSDP2's, the pipeline schedules'.

    is_message: of a send or a receive. torch has no hook for waits, so the method is replaced meanwhile; nothing is
    paid outside. Waits of other threads are not told.

    on_device: for CUDA, where `wait` returns at once and holds up the stream. mark records an event there, waits of
    the stream for an event (FSDP2's) count as well, and so do blocking collectives, which run in that stream
    (`in_stream`). Waits of all threads are told.
    """
    work_type: Any = dist.Work
    c10d: Any = torch._C._distributed_c10d
    op_type = c10d.OpType
    original, messages = work_type.wait, {int(op_type.SEND), int(op_type.RECV), int(op_type.RECVANYSOURCE)}

    def wait(work: Any, *args: Any, **options: Any) -> Any:
        watch = _watch()
        if watch is None:
            return original(work, *args, **options)
        began = watch.mark()
        result = original(work, *args, **options)
        watch.waited(work._get_op_type() in messages, began, watch.mark())
        return result

    watch = _Watch(mark, waited)
    with ExitStack() as undo:
        work_type.wait = wait
        undo.callback(setattr, work_type, "wait", original)
        if on_device:
            undo.enter_context(_stream_waits())
            _ON_DEVICE.append(watch)
            undo.callback(_ON_DEVICE.pop)
        else:
            undo.callback(_WAITED.reset, _WAITED.set(watch))
        yield


@contextmanager
def _stream_waits() -> Iterator[None]:
    """Tell the watch when the current stream is made to wait for an event of another."""
    stream_type: Any = torch.cuda.Stream
    original = stream_type.wait_event

    def wait_event(stream: Any, event: Any) -> None:
        watch = _watch()
        if watch is None or stream != torch.cuda.current_stream():
            original(stream, event)
            return
        began = watch.mark()
        original(stream, event)
        watch.waited(False, began, watch.mark())

    stream_type.wait_event = wait_event
    try:
        yield
    finally:
        stream_type.wait_event = original


@contextmanager
def in_stream(is_message: bool) -> Iterator[None]:
    """Around a blocking collective: under `timed_waits(on_device=True)` it counts as a wait from begin to end."""
    if not _ON_DEVICE:
        yield
        return
    watch = _ON_DEVICE[-1]
    began = watch.mark()
    _ON_DEVICE.append(_Watch(lambda: None, lambda *_: None))  # its own `Work.wait`, if any, is a part of it
    try:
        yield
    finally:
        _ON_DEVICE.pop()
        watch.waited(is_message, began, watch.mark())


def timed(wait: Callable[[], object]) -> None:
    """Call `wait`, which waits for a collective that is no `Work` of torch, timed like those."""
    watch = _watch()
    if watch is None:
        wait()
        return
    began = watch.mark()
    wait()
    watch.waited(False, began, watch.mark())


@contextmanager
def dispatch_modes(modes: list[Any]) -> Iterator[None]:
    """Inside, this thread's operations are seen by `modes`: those of another thread (they are kept per thread)."""
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        yield


def current_dispatch_modes() -> list[Any]:
    """The dispatch modes that this thread is in, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def default_store() -> dist.Store:
    """The store by which the ranks met. Small facts go through it where a collective might pair with a wrong one."""
    return dist.distributed_c10d._get_default_store()


def has_grouped_product(rows: Tensor, weights: Tensor) -> bool:
    """Can `grouped_product` take them? Not fp64, nothing without rows, and lines of memory must be of 16 bytes."""
    line = 16 // rows.element_size()
    aligned = rows.size(-1) % line == 0 and weights.size(1) % line == 0
    return rows.dtype in (torch.float32, torch.bfloat16, torch.float16) and aligned and rows.size(0) > 0


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows (n, in), sorted by group, times weights (groups, out, in), counts (groups,) rows each: (n, out).

    Public since torch 2.10 or so as `functional.grouped_mm`; before that under a private name.
    """
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return grouped(rows.contiguous(), weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
