"""A schedule's actions with the messages between them, and the bytes that a rank holds meanwhile.

The runtime executes the same lists (`runtime.py`, `evaluation.py`), so the prediction cannot drift from the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from parallelrun.planner.contract.pipeline_schedule import is_pair

from .orders import Orders

# A rank waits for its oldest send before it has more pending sends than this: each holds a buffer.
SENDS_IN_FLIGHT = 2
ACTIONS = ("F", "B", "I", "W")
MESSAGES_SENT = ("SEND_F", "SEND_B")


class Step(NamedTuple):
    """One action or message of a rank.

    kind: an action's (F, B, I, W), or a message: SEND_F and RECV_F carry a stage's output and input, SEND_B and RECV_B
    the gradients of its input and output; `stage` is this rank's own.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int = -1


Steps = list[list[Step]]


def with_messages(orders: Orders, pp_rank: Callable[[int, int], int], num_stages: int, pairs: bool = False) -> Steps:
    """Add sends and receives to the ranks' orders of actions, in the same order at both ends of every pair.

    pairs: actions that are one (`is_pair`) begin when the inputs of both are there, and send what both have computed.

    A receive is added to the receiver's list when its sender has sent, so no circular wait can arise, even where the
    backend runs the messages of a pair strictly in order (NCCL). Waiting for any earlier send is safe too.
    """
    pp, new = len(orders), tuple.__new__  # a Step in half the time: there are tens of thousands
    holder = [pp_rank(stage, pp) for stage in range(num_stages)]
    steps: Steps = [[] for _ in orders]
    ready = {(True, 0, action.microbatch) for order in orders for action in order if action.stage == 0}
    waiting = [deque(order) for order in orders]

    def is_ready(kind: str, stage: int, microbatch: int) -> bool:
        is_free = kind == "W" or (kind != "F" and stage == num_stages - 1)
        return is_free or (kind == "F", stage, microbatch) in ready

    while any(waiting):
        progress = False
        for rank, queue in enumerate(waiting):
            if not queue:
                continue
            joined = pairs and len(queue) > 1 and is_pair(queue[0], queue[1])
            if not (is_ready(*queue[0]) and (not joined or is_ready(*queue[1]))):
                continue
            progress = True
            actions = [queue.popleft() for _ in range(1 + joined)]
            steps[rank] += [new(Step, (*action, -1)) for action in actions]
            for kind, stage, microbatch in actions:
                forward = kind == "F"
                after = stage + 1 if forward else stage - 1
                if kind == "W" or not 0 <= after < num_stages:
                    continue
                ready.add((forward, after, microbatch))
                receiver = holder[after]
                if receiver != rank:
                    sent, received = ("SEND_F", "RECV_F") if forward else ("SEND_B", "RECV_B")
                    steps[rank].append(new(Step, (sent, stage, microbatch, receiver)))
                    steps[receiver].append(new(Step, (received, after, microbatch, rank)))
        assert progress, "the ranks wait for each other in a circle"
    return steps


def live_bytes(
    steps: Sequence[Step], kept: Mapping[int, int], inputs: Mapping[int, int]
) -> Iterator[tuple[Step, int, int]]:
    """Yield every step with the bytes of activations and message buffers held when it begins, and at most during it.

    kept: per stage the bytes a microbatch keeps for backward, the stage's input included. inputs: per stage the bytes
    of its input from the previous stage; the first stage has none. A sent tensor is held until the rank has waited for
    the send; a received activation until the last backward of its microbatch; a received gradient until it is used.
    """
    live = 0
    sent: deque[int] = deque()
    sizes: dict[int, tuple[int, int, int]] = {}
    for step in steps:
        kind, stage, _, _ = step
        if stage not in sizes:
            input_bytes, output_bytes = inputs.get(stage, 0), inputs.get(stage + 1, 0)
            sizes[stage] = input_bytes, output_bytes, max(kept.get(stage, 0), input_bytes)
        input_bytes, output_bytes, saved = sizes[stage]
        before = peak = live
        if kind == "RECV_F":
            live += input_bytes
        elif kind == "RECV_B":
            live += output_bytes
        elif kind == "F":
            live += saved - input_bytes + output_bytes
        elif kind == "B":
            peak = max(
                peak, live - saved + 2 * input_bytes
            )  # at its end: the input, its gradient, the output's gradient
            live += input_bytes - saved - output_bytes
        elif kind == "I" and stage > 0:
            peak = max(peak, live + input_bytes)
            live += input_bytes - output_bytes
        elif kind == "W":  # the first stage does its whole backward here, and needs the output's gradient for it
            live -= saved + (output_bytes if stage == 0 else 0)
        elif kind in MESSAGES_SENT:
            sent.append(output_bytes if kind == "SEND_F" else input_bytes)
            while len(sent) > SENDS_IN_FLIGHT:
                live -= sent.popleft()
        if live > peak:
            peak = live
        yield step, before, peak
