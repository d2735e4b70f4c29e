"""The messages between workers and servers.

In each step a worker sends every server a header (`control`) and the gradient of that server's shards (`push`). Each
server answers with a header (`control`) and its weights (`pull`). Gradients and weights are flat, in the order of
`shards.assign`. Several synchronous servers sum the squared gradient norm (`control`), so that all clip by one norm.

A header is a fixed number of fp64 numbers: a receive of gloo needs the size, and fp64 keeps integers exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import isfinite
from typing import NamedTuple

from .apply_log import Push

AXIS = "world"
PUSH, PULL, CONTROL = "push", "pull", "control"
COUNTED = 2  # the exchange whose messages are counted: the first one has set-up traffic


class Ask(IntEnum):
    """The kind of a worker's request to a server."""

    READ = 0  # the weights as they are
    UPDATE = 1  # a gradient follows; reply with the weights when this worker may read them
    SAVE = 2  # barrier of the running workers; the servers begin to write a checkpoint
    END = 3  # barrier of the live workers after their last step
    LEAVE = 4  # close the connection; no reply
    KEEP_FROZEN = 5  # server 0: this worker's frozen parameters follow
    READ_FROZEN = 6  # server 0: the frozen parameters
    READ_GRADIENT = 7  # the gradient of update number `clock` (verify)


class WorkerRequest(NamedTuple):
    """The header of one rank of a worker. clock: the worker's step (from 1). pulled: the version of this server's
    weights that it used.

    loss_sum, num_valid: that no other rank counts. norm: of the worker's gradient, 0 if the servers measure it. stop: 1
    if the rank was asked to stop. step_time_s: seconds since its last push, without evaluation and saving.
    """

    ask: Ask = Ask.READ
    clock: int = 0
    pulled: int = 0
    loss_sum: float = 0.0
    num_valid: float = 0.0
    norm: float = 0.0
    stop: float = 0.0
    step_time_s: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether the loss and the measured norm are finite."""
        return isfinite(self.loss_sum) and isfinite(self.norm)

    @staticmethod
    def together(requests: Sequence[WorkerRequest]) -> WorkerRequest:
        """Return the request of a worker from those of its ranks: each has counted samples and targets of its own."""
        first = requests[0]
        assert {request[:3] for request in requests} == {first[:3]}, f"ranks of one worker differ: {requests}"
        return first._replace(
            loss_sum=sum(request.loss_sum for request in requests),
            num_valid=sum(request.num_valid for request in requests),
            stop=max(request.stop for request in requests),
            step_time_s=max(request.step_time_s for request in requests),
        )

    def logged(self, worker: int) -> Push:
        """The push as the apply log has it."""
        loss = self.loss_sum / self.num_valid if self.num_valid else float("nan")
        return Push(worker, self.clock, self.pulled, loss, self.num_valid, self.norm)


class ServerReply(NamedTuple):
    """A server's header. ready: 0 = the worker must wait on for the barrier; another reply follows.

    version: of the weights that follow. clock: the last step that this worker has completed; of a barrier, the step
    whose checkpoint could not be written, or 0. applied: whether the update changed the weights. accepted: whether this
    push is part of it (0 for a late one, with backup workers). loss, norm: of the update. stop: 1 if a worker was asked
    to stop.
    """

    ready: int = 1
    version: int = 0
    clock: int = 0
    applied: float = 1.0
    accepted: float = 1.0
    loss: float = 0.0
    norm: float = 0.0
    stop: float = 0.0


REQUEST_BYTES, REPLY_BYTES = (8 * len(header._fields) for header in (WorkerRequest, ServerReply))
NORM_BYTES = 8
