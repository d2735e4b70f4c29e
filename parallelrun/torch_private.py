"""The one file that touches torch's private symbols. Small functions, each saying what it needs them for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti


def schedule_actions(name: str, pp: int, num_microbatches: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """The order of actions of torch's pipeline schedule `name`: (kind, stage, microbatch) per pp coordinate.

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


# Set inside `timed_waits`, in its thread alone: another thread's waits keep nobody from computing.
_WAITED: ContextVar[Callable[[bool, float], None] | None] = ContextVar("parallelrun_waited", default=None)


@contextmanager
def timed_waits(waited: Callable[[bool, float], None]) -> Iterator[None]:
    """Call `waited(is_message, seconds)` after every `Work.wait` inside: ours, FSDP2's, the pipeline schedules'.

    is_message: of a send or a receive. torch has no hook for waits, so the method is replaced meanwhile; nothing is
    paid outside. Waits of other threads are not told. Not for CUDA, where `wait` returns at once.
    """
    work_type: Any = dist.Work
    c10d: Any = torch._C._distributed_c10d
    op_type = c10d.OpType
    original, messages = work_type.wait, {int(op_type.SEND), int(op_type.RECV), int(op_type.RECVANYSOURCE)}

    def wait(work: Any, *args: Any, **options: Any) -> Any:
        if _WAITED.get() is None:
            return original(work, *args, **options)
        began = time.perf_counter()
        result = original(work, *args, **options)
        waited(work._get_op_type() in messages, time.perf_counter() - began)
        return result

    work_type.wait = wait
    token = _WAITED.set(waited)
    try:
        yield
    finally:
        _WAITED.reset(token)
        work_type.wait = original


def timed(wait: Callable[[], object]) -> None:
    """Call `wait`, which waits for a collective that is no `Work` of torch, timed like those."""
    waited, began = _WAITED.get(), time.perf_counter()
    wait()
    if waited is not None:
        waited(False, time.perf_counter() - began)


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
