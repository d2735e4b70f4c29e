"""The messages between workers and servers, and their traffic in closed form. Torch-free.

In each step a worker sends every server one header (`control`) and the gradient of that server's shards (`push`, in the
reduce dtype). Each server answers with one header (`control`) and its weights (`pull`, in the stored dtype). Payloads
are flat, in the order of `shards.assign`. Where one update averages several pushes and there are several servers,
these sum two numbers per update (`control`): the squared gradient norm, so that all clip alike, and the number of stop
requests. Set-up, evaluation and barriers are outside a steady step and not counted.

A header is HEADER_ELEMENTS fp64 numbers: gloo's receives need a size known beforehand, and fp64 keeps integers exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from parallelrun.plan.messages import Call, ExplainedExchange, ExplainedMessage, ExplainedRound, Explanation
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES
from parallelrun.wording import counted

AXIS = "world"
PUSH, PULL, CONTROL = "push", "pull", "control"
HEADER_ELEMENTS = 9
HEADER_BYTES = 8 * HEADER_ELEMENTS
NORM_BYTES = 8 * 2


class Ask(IntEnum):
    """What a worker asks of a server."""

    READ = 0  # the weights as they are
    UPDATE = 1  # a gradient follows; reply with the weights when this worker may read them
    SAVE = 2  # barrier of the running workers; the servers write a checkpoint
    END = 3  # barrier of the live workers after their last step
    LEAVE = 4  # close the connection; no reply
    KEEP_FROZEN = 5  # server 0: this worker's frozen parameters follow
    READ_FROZEN = 6  # server 0: the frozen parameters
    READ_GRADIENT = 7  # the gradient of update number `clock` (verify)


class WorkerRequest(NamedTuple):
    """A worker's header. clock: its step (from 1). pulled: the version of this server's weights that it used.

    loss_sum, num_valid: of its samples. norm: of its gradient. finite: 0 if the loss or gradient is not finite. stop: 1
    if it was asked to stop. paused_s: seconds of evaluation and saving since its last push.
    """

    ask: Ask
    clock: int = 0
    pulled: int = 0
    loss_sum: float = 0.0
    num_valid: float = 0.0
    norm: float = 0.0
    finite: float = 1.0
    stop: float = 0.0
    paused_s: float = 0.0


class ServerReply(NamedTuple):
    """A server's header. ready: of a barrier, 1 = released, 0 = ask again, -1 = released, but its action failed.

    version: of the weights that follow. clock: the last step that this worker has completed. applied: whether the
    update changed the weights. accepted: whether this push is part of it (0 for a late one, with backup workers). loss,
    norm: of the update. stop: 1 if a worker was asked to stop. blocked_s: seconds for which the reply was held back.
    """

    ready: int
    version: int = 0
    clock: int = 0
    applied: float = 1.0
    accepted: float = 1.0
    loss: float = 0.0
    norm: float = 0.0
    stop: float = 0.0
    blocked_s: float = 0.0


assert len(WorkerRequest._fields) == len(ServerReply._fields) == HEADER_ELEMENTS


def gradient_bytes(plan: Plan, weight_bytes: int) -> int:
    """Bytes of the gradient of that many bytes of weights."""
    return weight_bytes // BYTES[plan.precision.stored] * BYTES[plan.precision.reduce]


def worker_traffic(plan: Plan, shard_bytes: Sequence[int]) -> list[Collective]:
    """Messages of one worker in one step. shard_bytes: weights of each server."""
    servers = plan.servers
    return [
        Collective(AXIS, "send", CONTROL, servers, servers * HEADER_BYTES),
        Collective(AXIS, "recv", CONTROL, servers, 0),
        Collective(AXIS, "send", PUSH, servers, gradient_bytes(plan, sum(shard_bytes))),
        Collective(AXIS, "recv", PULL, servers, 0),
    ]


def server_traffic(plan: Plan, weight_bytes: int, synchronous: bool) -> list[Collective]:
    """Messages of one server while every worker does one step."""
    workers = plan.num_workers
    rows = [
        Collective(AXIS, "send", CONTROL, workers, workers * HEADER_BYTES),
        Collective(AXIS, "recv", CONTROL, workers, 0),
        Collective(AXIS, "send", PULL, workers, workers * weight_bytes),
        Collective(AXIS, "recv", PUSH, workers, 0),
    ]
    if synchronous and plan.servers > 1:
        rows.append(Collective(AXIS, "all_reduce", CONTROL, 1, NORM_BYTES))
    return rows


def explanation(plan: Plan, shard_bytes: Sequence[int], synchronous: bool) -> Explanation:
    """Every message of one step of every worker."""
    pushes, pulls = [], []
    for worker in range(plan.num_workers):
        for server, weights in enumerate(shard_bytes):
            rank, gradient = plan.num_workers + server, gradient_bytes(plan, weights)
            pushes.append(ExplainedMessage(worker, rank, "header: step, loss, norm", HEADER_BYTES, CONTROL))
            pushes.append(ExplainedMessage(worker, rank, f"gradient of server {server}'s shards", gradient, PUSH))
            pulls.append(ExplainedMessage(rank, worker, "header: version, loss, norm", HEADER_BYTES, CONTROL))
            pulls.append(ExplainedMessage(rank, worker, f"weights of server {server}'s shards", weights, PULL))
    rounds = [ExplainedRound("push: each worker sends its gradient to every server", tuple(pushes))]
    if synchronous and plan.servers > 1:
        servers = tuple(range(plan.num_workers, plan.world))
        norm = Call("all_reduce", servers, "squared norm, stop requests", NORM_BYTES, AXIS, CONTROL)
        rounds.append(ExplainedRound("the servers sum the squared norm of the gradient", calls=(norm,)))
    rounds.append(ExplainedRound("pull: each server sends its updated weights back", tuple(pulls)))
    waits = "waits for all workers" if synchronous else "does not wait for other workers"
    text = (
        "The servers own the weights, cut into shards of about equal bytes, and the optimizer. A worker pushes each "
        f"server the gradient of its shards; the server {waits}, updates, and sends its weights back. The busiest link "
        "is a server's: it carries every worker's bytes."
    )
    title = f"one step of {counted(plan.num_workers, 'worker')} and {counted(plan.servers, 'server')}"
    exchanges = (ExplainedExchange(title, tuple(rounds)),)
    source, ranks = "Li et al. 2014; Dean et al. 2012", tuple(range(plan.world))
    return Explanation("data", plan.data.kind, text, source, ranks, 1, AXIS, exchanges)
