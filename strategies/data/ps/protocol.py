"""What workers and servers say to each other. Torch-free: the plan's half counts by it, the runtime speaks it.

In each of its steps a worker sends every server one header (`control`) and the gradient of that server's shards, flat
and in the order of `shards.of_server`, in the reduce dtype (`push`); each server answers with one header (`control`)
and its shards' weights, flat, in the stored dtype (`pull`). Where one update is made of several pushes (`has_barrier`)
and there are several servers, these sum two numbers per update (`control`): the squared norm, by which all clip alike,
and how many of them stop. All of it is labelled AXIS. Set-up, evaluation and meetings are no part of a steady step.

A header is HEADER_ELEMENTS fp64 numbers: gloo's receives need sizes known beforehand, and integers stay exact.
"""

from __future__ import annotations

from typing import NamedTuple

from parallelrun.plan.structure import DataWay

from .settings import ParameterServerWay

AXIS = "world"
PUSH, PULL, CONTROL = "push", "pull", "control"
HEADER_ELEMENTS = 9
HEADER_BYTES = 8 * HEADER_ELEMENTS
NORM_ELEMENTS = 2
NORM_BYTES = 8 * NORM_ELEMENTS

# operations of a request
READ = 0  # the weights as they are
UPDATE = 1  # here is a gradient; the weights when they may be read
SAVE = 2  # meet: all that live have come to this step, save
END = 3  # meet: all that live are through
LEAVE = 4  # the last word; no answer
KEEP = 5  # to server 0: here are this worker's frozen parameters
READ_FROZEN = 6  # from server 0
READ_GRADIENT = 7  # of the update of step `clock` (verify)


class Request(NamedTuple):
    """From a worker. clock: its step (from 1); pulled: the version of this server's weights that it computed with.

    loss_sum, num_valid: of its samples. norm: of its gradient. finite: 0 where gradient or loss are not. stop: it was
    asked to stop. paused_s: what it spent on evaluation and saving since its last push.
    """

    operation: int
    clock: int = 0
    pulled: int = 0
    loss_sum: float = 0.0
    num_valid: float = 0.0
    norm: float = 0.0
    finite: float = 1.0
    stop: float = 0.0
    paused_s: float = 0.0


class Reply(NamedTuple):
    """From a server. ready: of a meeting, whether it has taken place (0: ask again), -1: it has failed.

    version: of the weights that follow. applied: the update that this push belongs to changed the weights; accepted:
    this push is a part of it (not so for a late one, with backup workers). loss, norm: of that update. stop: somebody
    was asked to stop. clock: the worker's next step is the one after. blocked_s: how long the answer was held back.
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


assert len(Request._fields) == len(Reply._fields) == HEADER_ELEMENTS


def has_barrier(strategy: DataWay) -> bool:
    """Is one update made of several workers' gradients? With staleness 0 a clock's pushes are one, as in sync."""
    assert isinstance(strategy, ParameterServerWay), f"{strategy.kind} has no servers"
    return strategy.consistency == "sync" or (strategy.consistency == "ssp" and strategy.staleness == 0)
