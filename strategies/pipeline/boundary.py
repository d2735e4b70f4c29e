"""What passes between stages at run time: its shape and dtype, and a stage that sends it well-formed and tagged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from parallelrun import comm, torch_private
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from .way import boundary_shape


def compute_dtype(plan: Plan) -> torch.dtype:
    """The dtype of activations and of their gradients."""
    return getattr(torch, plan.precision.compute)


def input_example(plan: Plan, stage: int) -> Tensor:
    """What a stage takes, without data: samples on the first, a boundary that needs a gradient on others."""
    if stage > 0:
        return torch.empty(boundary_shape(plan, stage), dtype=compute_dtype(plan), device="meta", requires_grad=True)
    dtype = torch.int64 if plan.spec.kind == "tokens" else compute_dtype(plan)
    return torch.empty((plan.batch.micro_batch, *plan.spec.sample_shape), dtype=dtype, device="meta")


def output_example(plan: Plan, stage: int) -> Tensor:
    """What a stage gives. Nobody asks the last stage: its output goes into the loss, not over the wire."""
    shape = boundary_shape(plan, min(stage + 1, len(plan.stages) - 1))
    return torch.empty(shape, dtype=compute_dtype(plan), device="meta", requires_grad=True)


class _Plain(nn.Module):
    """What a stage runs: the part, with the microbatch's sample ids.

    It hides from torch's schedules that a part is wrapped by FSDP: they would gather, let go and reduce by themselves.
    The data way alone decides that; under zero bubble torch's way loses gradients without a word.
    """

    def __init__(self, part: Network):
        super().__init__()
        self.part = part
        self.sample_ids: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, self.sample_ids)


class Stage(PipelineStage):
    """torch's PipelineStage with static metadata, contiguous messages, and tags by which they are counted.

    Without static metadata torch infers it in the first step by messages and an extra forward and backward; with inputs
    that do not claim to need a gradient, one rank crashes and its neighbour waits for ever.
    """

    def __init__(self, part: Network, index: int, plan: Plan, device: torch.device, group: dist.ProcessGroup):
        self._plain = _Plain(part)
        self._micro_batch = plan.batch.micro_batch
        self.sample_ids = torch.empty(0, dtype=torch.int64)  # of the whole step; set before it
        super().__init__(
            self._plain,
            index,
            len(plan.stages),
            device,
            input_args=input_example(plan, index),
            output_args=output_example(plan, index),
            group=group,
        )
        torch_private.trust_metadata(self)
        torch_private.greet_others_only(self)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        # Not as an argument of `step`: torch takes every tensor argument for one that may need a gradient.
        start = fwd_chunk_id * self._micro_batch
        self._plain.sample_ids = self.sample_ids[start : start + self._micro_batch]
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_fwd_send_ops(fwd_chunk_id), "activations")

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_fwd_recv_ops(fwd_chunk_id), "activations")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_bwd_send_ops(bwd_chunk_id), "gradients")

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_bwd_recv_ops(bwd_chunk_id), "gradients")


def _tagged(operations: list[dist.P2POp], purpose: str) -> list[dist.P2POp]:
    """The same messages, contiguous (a block may end in a permutation) and with the tag of their purpose."""
    for operation in operations:
        operation.tag = comm.MESSAGE_TAGS[purpose]
        if operation.op is dist.isend:
            operation.tensor = operation.tensor.contiguous()
    return operations
