"""How torch's pipeline stages and schedules are made to do what they have no option for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti


def trust_metadata(stage: PipelineStage) -> None:
    """Switch off a pipeline stage's check that its inputs and outputs have the shapes and strides of its metadata.

    torch 2.11 also checks tensors that are never sent; torch 2.13 does not. It cleans up after an inference of metadata
    that did not take place, and with that drops buffers of gradients in the first step.
    """
    unchecked: Any = stage
    unchecked._post_metadata_inference_cleanup = lambda: None
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


def make_schedule(
    stages: Sequence[PipelineStage],
    steps: list[list[tuple[str, int, int]]],
    num_microbatches: int,
    loss_of_output: Callable[[Tensor, Tensor], Tensor],
) -> PipelineScheduleMulti:
    """Return a schedule that runs these (kind, stage, microbatch) of each rank, messages included.

    Each public schedule inserts the messages itself, in an order that has no public access. torch's averaging
    of gradients is off.
    """
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(
        list(stages), n_microbatches=num_microbatches, loss_fn=loss_of_output, scale_grads=False
    )
    unchecked: Any = schedule
    unchecked.pipeline_order_with_comms = {
        rank: [_Action(stage, _ComputationType.from_str(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(steps)
    }
    ranks = {stage: rank for rank, order in enumerate(steps) for kind, stage, _ in order if kind == "F"}
    unchecked.stage_index_to_group_rank = ranks
    for stage in stages:
        stage.stage_index_to_group_rank = ranks
    return schedule


def greet_others_only(stage: PipelineStage) -> None:
    """Remove a stage's initial messages to its own rank, which gloo cannot send.

    torch 2.11 sends them to establish connections where a V schedule turns; torch 2.13 does not.
    """
    patched: Any = stage
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greetings is not None:
        patched._get_init_p2p_neighbors_ops = lambda: [
            greeting for greeting in greetings() if greeting.peer != dist.get_rank()
        ]
