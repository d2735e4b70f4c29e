"""A pipeline stage at run time: metadata of its input and output, its messages, and buffers that are freed early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.torch_private.pipelining import PipelineStage
from parallelrun.distributed.turns import Turns
from parallelrun.models.autograd import apply
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.metrics.schedule_actions import ActionClock

from .messages import SENDS_IN_FLIGHT
from .schedule import boundary_shape

PURPOSES = {"F": "activations", "B": "gradients"}


def compute_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype of activations and of their gradients."""
    dtype: torch.dtype = getattr(torch, plan.precision.compute)
    return dtype


def input_example(plan: Plan, stage: int) -> Tensor:
    """Return a meta tensor like a stage's input: samples on the first, activations that need a gradient on others."""
    if stage > 0:
        return torch.empty(boundary_shape(plan, stage), dtype=compute_dtype(plan), device="meta", requires_grad=True)
    dtype = torch.int64 if plan.spec.kind == "tokens" else compute_dtype(plan)
    first, *rest = plan.spec.sample_shape
    return torch.empty((plan.batch.micro_batch, first // plan.mesh.size("cp"), *rest), dtype=dtype, device="meta")


def output_example(plan: Plan, stage: int) -> Tensor:
    """Return a meta tensor like a stage's output. The last stage's is never used: its output goes into the loss."""
    shape = boundary_shape(plan, min(stage + 1, len(plan.stages) - 1))
    return torch.empty(shape, dtype=compute_dtype(plan), device="meta", requires_grad=True)


class _Plain(nn.Module):
    """The module of a stage: a model part called with the microbatch's sample ids and packed documents; on the last
    stage with the loss.

    It hides FSDP from torch's schedules, which would unshard, reshard and reduce an FSDP module themselves. The data
    strategy alone decides that, and under zero bubble torch's handling silently loses gradients. Schedules keep a
    stage's output until its backward: a loss is small, whereas logits hold a vocabulary per token.
    """

    def __init__(self, part: Network, is_last: bool, before_loss: Callable[[], None] | None):
        super().__init__()
        self.part = part
        self.is_last = is_last
        self.before_loss = before_loss
        self.sample_ids: Tensor | None = None
        self.documents: DocumentBounds | None = None
        self.targets: Tensor | None = None
        self.ahead: Tensor | None = None
        self.scale = 1.0
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Any = self.part(x, self.sample_ids, self.documents, self.ahead)
        if not self.is_last:
            return cast(Tensor, output)
        assert self.targets is not None, "the last stage needs targets"
        if self.before_loss is not None:
            self.before_loss()
        loss = self.part.total_loss(output, self.targets, self.ahead)
        self.losses.append(loss.detach())
        return loss * self.scale


class _WithoutStorage(torch.autograd.Function):
    """A tensor with x's shape and graph but no storage: backward starts from it after x has been sent and freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty_strided(x.shape, (0,) * x.dim())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Sends:
    """The pending sends of one rank, each with the tensor that it reads."""

    def __init__(self) -> None:
        self._pending: deque[tuple[list[dist.Work], Tensor]] = deque()

    def add(self, works: list[dist.Work], tensor: Tensor) -> None:
        """Add a send of `tensor`, and wait for the oldest ones beyond the limit."""
        self._pending.append((works, tensor))
        self._wait(SENDS_IN_FLIGHT)

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(0)

    def _wait(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            works, _ = self._pending.popleft()
            for work in works:
                work.wait()


class ScheduledStage(PipelineStage):
    """torch's PipelineStage with static metadata, contiguous messages, tags for counting them, and early freed buffers.

    torch's own stage holds a buffer per microbatch and direction from the first step on, and every output until its
    backward, even after it was sent; `messages.live_bytes` predicts what this one holds.

    Without static metadata torch infers it in the first step with messages and an extra forward and backward. If inputs
    do not claim to need a gradient, one rank crashes and its neighbour hangs.
    """

    def __init__(
        self,
        part: Network,
        index: int,
        plan: Plan,
        device: torch.device,
        group: dist.ProcessGroup,
        sends: Sends,
        actions: ActionClock,
        turns: Turns,
    ):
        # A loss in chunks computes gradients, for which autograd has no second thread on a device.
        before_loss = turns.let_other_end if plan.loss_chunks > 1 else None
        self.plain = _Plain(part, index == len(plan.stages) - 1, before_loss)
        self._micro_batch = plan.batch.micro_batch
        self.sample_ids = torch.empty(0, dtype=torch.int64)  # of the whole step, as the targets; set before it
        self.documents: DocumentBounds | None = None
        self.targets: Tensor | None = None
        self.ahead: Tensor | None = None
        # Templates of the buffers, and their placeholders while no buffer is allocated.
        self._no_activation, self._no_gradient = input_example(plan, index), output_example(plan, index).detach()
        self._sends, self._actions, self._turns = sends, actions, turns
        self.partners: dict[int, tuple[ScheduledStage, int]] = {}  # of the forward pass of a microbatch: see `is_pair`
        self._early: set[int] = set()  # microbatches whose backward pass has run as a partner
        self._receives: dict[tuple[str, int], list[dist.Work]] = {}
        self._outputs: dict[int, Tensor] = {}  # not yet sent
        super().__init__(
            self.plain,
            index,
            len(plan.stages),
            device,
            input_args=input_example(plan, index),
            output_args=output_example(plan, index),
            group=group,
        )
        torch_private.trust_metadata(self)
        torch_private.greet_others_only(self)
        torch_private.receive_on_demand(self)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        forward = partial(self._forward_one_chunk, fwd_chunk_id, *args, **options)
        if fwd_chunk_id not in self.partners:
            return forward()
        stage, microbatch = self.partners[fwd_chunk_id]
        return self._turns.run(forward, partial(stage.backward_early, microbatch))

    def backward_early(self, microbatch: int) -> None:
        """Run a full backward pass before torch asks for it, which it does next."""
        (output, *_), _ = self.fwd_cache[microbatch]
        self.backward_one_chunk(microbatch, output if self.is_last else None)
        self._early.add(microbatch)

    def _forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._wait("RECV_F", fwd_chunk_id)
        # Not an argument of `step`: torch assumes that every tensor argument may need a gradient.
        start = fwd_chunk_id * self._micro_batch
        stop = start + self._micro_batch
        self.plain.sample_ids = self.sample_ids[start:stop]
        if self.documents is not None:
            self.plain.documents = self.documents.samples(start, stop)
        if self.targets is not None:
            self.plain.targets = self.targets[start:stop]
            self.plain.ahead = None if self.ahead is None else self.ahead[start:stop]
        with self._actions.action("F", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if self.is_last:
            return output
        stand_in = apply(_WithoutStorage, output)
        self.fwd_cache[fwd_chunk_id] = ((stand_in,), self.fwd_cache[fwd_chunk_id][1])
        if self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank:
            return output  # the turn of a V: torch hands it to the next stage
        self._outputs[fwd_chunk_id] = output.detach()
        return stand_in

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if bwd_chunk_id in self._early:
            return self._early.remove(bwd_chunk_id)
        self._wait("RECV_B", bwd_chunk_id)
        with self._actions.action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if full_backward:
                self.plain.part.after_weight_gradients()
        if loss is not None:
            loss.detach_()  # torch keeps the loss until the step ends, and with it the graph
        if not self.is_first:
            self.args_recv_info[bwd_chunk_id][0].buffer = self._no_activation
        if not self.is_last:
            self.grad_recv_info[bwd_chunk_id][0].buffer = self._no_gradient
        if not full_backward and not self.is_first:
            # The weight pass starts from inner gradients: neither that of the output nor that of the input is needed.
            inputs, groups, outputs, _ = self.backward_state[bwd_chunk_id]
            for value in inputs:
                value.grad = None
            self.backward_state[bwd_chunk_id] = (inputs, groups, outputs, None)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._actions.action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.plain.part.after_weight_gradients()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        output = self._outputs.pop(fwd_chunk_id)
        return self._post("SEND_F", fwd_chunk_id, output, self.stage_index + 1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        buffer = self.args_recv_info[fwd_chunk_id][0].buffer = self._buffer(self._no_activation).requires_grad_()
        return self._post("RECV_F", fwd_chunk_id, buffer, self.stage_index - 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        assert gradient is not None, "only activations are received"
        return self._post("SEND_B", bwd_chunk_id, gradient, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        buffer = self.grad_recv_info[bwd_chunk_id][0].buffer = self._buffer(self._no_gradient)
        return self._post("RECV_B", bwd_chunk_id, buffer, self.stage_index + 1)

    def _buffer(self, template: Tensor) -> Tensor:
        """Return uninitialised memory. `empty_like` of a meta tensor takes ten times as long, in Python."""
        return torch.empty(template.shape, dtype=template.dtype, device=self.device)

    def _post(self, kind: str, microbatch: int, tensor: Tensor, stage: int) -> list[dist.P2POp]:
        """Start a message to or from another stage, contiguous (a block may end in a permutation). Return no operation:
        none is left to torch."""
        tensor, tag = tensor.contiguous(), comm.MESSAGE_TAGS[PURPOSES[kind[-1]]]
        peer, function = self.stage_index_to_group_rank[stage], dist.isend if kind.startswith("SEND") else dist.irecv
        works = torch_private.start_messages([dist.P2POp(function, tensor, None, self.group, tag, peer)])
        if function is dist.isend:
            self._sends.add(works, tensor)
        else:
            self._receives[kind, microbatch] = works
        return []

    def _wait(self, kind: str, microbatch: int) -> None:
        """Wait for what an action needs, if it comes from another rank."""
        for work in self._receives.pop((kind, microbatch), ()):
            work.wait()
