"""What a parameter server sends and holds, in closed form, by what `protocol` says. Torch-free.

A worker's step: with each server a header and the gradient of its shards one way, a header and its weights back.
"""

from __future__ import annotations

from parallelrun.plan.structure import Collective, Memory, Plan
from parallelrun.precision import BYTES

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
    way, workers = plan.data, plan.num_workers
    assert isinstance(way, ParameterServerWay)
    rows = [
        Collective(AXIS, "send", CONTROL, workers, workers * HEADER_BYTES),
        Collective(AXIS, "recv", CONTROL, workers, 0),
        Collective(AXIS, "send", PULL, workers, workers * server_bytes(plan)[server]),
        Collective(AXIS, "recv", PUSH, workers, 0),
    ]
    if has_barrier(way) and plan.servers > 1:
        rows.append(Collective(AXIS, "all_reduce", CONTROL, 1, NORM_BYTES))
    return rows


def server_memory(plan: Plan, server: int) -> Memory:
    """Its weights, the sum of gradients of an update and one that arrives, and the optimizer's state."""
    weights = server_bytes(plan)[server]
    leaves_out = ("the framework's own memory", "messages on their way")
    return Memory(
        weights, 2 * _gradient_bytes(plan, weights), weights * plan.optimizer_states, 0, leaves_out=leaves_out
    )


def _gradient_bytes(plan: Plan, weights: int) -> int:
    return weights // BYTES[plan.precision.stored] * BYTES[plan.precision.reduce]
