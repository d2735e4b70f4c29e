"""What a parameter server sends and holds, in closed form, by what `protocol` says. Torch-free.

A worker's step: with each server a header and the gradient of its shards one way, a header and its weights back.
"""

from __future__ import annotations

from parallelrun.plan.messages import Call, Exchange, Explanation, Message, Round
from parallelrun.plan.structure import Collective, Memory, Plan
from parallelrun.precision import BYTES
from parallelrun.wording import counted

from .protocol import AXIS, CONTROL, HEADER_BYTES, NORM_BYTES, PULL, PUSH, has_barrier
from .settings import ParameterServerWay
from .shards import server_bytes


def of_worker(plan: Plan) -> list[Collective]:
    """Rows of one worker for one of its steps."""
    weights = sum(server_bytes(plan))
    return [
        Collective(AXIS, "send", CONTROL, plan.servers, plan.servers * HEADER_BYTES),
        Collective(AXIS, "recv", CONTROL, plan.servers, 0),
        Collective(AXIS, "send", PUSH, plan.servers, _gradient_bytes(plan, weights)),
        Collective(AXIS, "recv", PULL, plan.servers, 0),
    ]


def of_server(plan: Plan, server: int) -> list[Collective]:
    """Rows of one server while every worker does one step."""
    strategy, workers = plan.data, plan.num_workers
    assert isinstance(strategy, ParameterServerWay)
    rows = [
        Collective(AXIS, "send", CONTROL, workers, workers * HEADER_BYTES),
        Collective(AXIS, "recv", CONTROL, workers, 0),
        Collective(AXIS, "send", PULL, workers, workers * server_bytes(plan)[server]),
        Collective(AXIS, "recv", PUSH, workers, 0),
    ]
    if has_barrier(strategy) and plan.servers > 1:
        rows.append(Collective(AXIS, "all_reduce", CONTROL, 1, NORM_BYTES))
    return rows


def explanation(plan: Plan) -> Explanation:
    """Every message of one step of every worker."""
    strategy, owned = plan.data, server_bytes(plan)
    assert isinstance(strategy, ParameterServerWay)
    pushes, pulls = [], []
    for worker in range(plan.num_workers):
        for server, weights in enumerate(owned):
            rank = plan.num_workers + server
            gradient = _gradient_bytes(plan, weights)
            pushes.append(Message(worker, rank, "header: step, loss, norm", HEADER_BYTES, CONTROL))
            pushes.append(Message(worker, rank, f"gradient of server {server}'s shards", gradient, PUSH))
            pulls.append(Message(rank, worker, "header: version, loss, norm", HEADER_BYTES, CONTROL))
            pulls.append(Message(rank, worker, f"weights of server {server}'s shards", weights, PULL))
    rounds = [Round("push: each worker sends its gradient to every server", tuple(pushes))]
    if has_barrier(strategy) and plan.servers > 1:
        servers = tuple(range(plan.num_workers, plan.world))
        norm = Call("all_reduce", servers, "squared norm, stop requests", NORM_BYTES, AXIS, CONTROL)
        rounds.append(Round("the servers agree on the norm of the whole gradient", calls=(norm,)))
    rounds.append(Round("pull: each server sends its updated weights back", tuple(pulls)))
    waits = "waits for all workers" if has_barrier(strategy) else "does not wait for other workers"
    text = (
        "The servers own the weights, cut into shards of about equal bytes, and the optimizer. A worker pushes each "
        f"server the gradient of its shards; the server {waits}, updates, and sends its weights back. The busiest link "
        "is a server's: it carries every worker's bytes."
    )
    ranks = tuple(range(plan.world))
    title = f"one step of {counted(plan.num_workers, 'worker')} and {counted(plan.servers, 'server')}"
    exchange = Exchange(title, tuple(rounds))
    return Explanation("data", strategy.kind, text, "Li et al. 2014; Dean et al. 2012", ranks, 1, AXIS, (exchange,))


def server_memory(plan: Plan, server: int) -> Memory:
    """Its weights, the sum of gradients of an update and one that arrives, and the optimizer's state."""
    weights = server_bytes(plan)[server]
    leaves_out = ("the framework's own memory", "messages on their way")
    return Memory(
        weights, 2 * _gradient_bytes(plan, weights), weights * plan.optimizer_states, 0, leaves_out=leaves_out
    )


def _gradient_bytes(plan: Plan, weights: int) -> int:
    return weights // BYTES[plan.precision.stored] * BYTES[plan.precision.reduce]
