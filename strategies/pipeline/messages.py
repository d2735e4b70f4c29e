"""A schedule's actions with the messages between them, and the bytes that a rank holds meanwhile. Torch-free.

The runtime executes the same lists (`runtime.py`, `evaluation.py`), so the prediction cannot drift from the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from parallelrun.plan.pipeline_schedule import Action

from .orders import Orders

# A rank waits for its oldest send before it has more pending sends than this: each holds a buffer.
SENDS_IN_FLIGHT = 2
ACTIONS = ("F", "B", "I", "W")


class Step(NamedTuple):
    """One action or message of a rank.

    kind: an action's (F, B, I, W), or a message: SEND_F and RECV_F carry a stage's output and input, SEND_B and RECV_B
    the gradients of its input and output; `stage` is this rank's own. joined: torch posts a send and a receive as one
    batch and waits for both before the next action, so that two neighbours cannot block each other.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int = -1
    joined: bool = False


Steps = list[list[Step]]


def with_messages(orders: Orders, pp_rank: Callable[[int, int], int], num_stages: int) -> Steps:
    """Add sends and receives to the ranks' orders of actions, in the same order at both ends of every pair.

    A receive is added to the receiver's list when its sender has sent, so no circular wait can arise, even where the
    backend runs the messages of a pair strictly in order (NCCL). Waiting for any earlier send is safe too.
    """
    pp = len(orders)
    steps: Steps = [[] for _ in orders]
    ready = {("F", 0, action.microbatch) for order in orders for action in order if action.stage == 0}
    waiting = [deque(order) for order in orders]
    while any(waiting):
        progress = False
        for rank, queue in enumerate(waiting):
            if not queue or not _can_run(queue[0], ready, num_stages):
                continue
            action = queue.popleft()
            progress = True
            kind, stage, microbatch = action
            steps[rank].append(Step(*action))
            direction, after = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
            if kind == "W" or not 0 <= after < num_stages:
                continue
            ready.add((direction, after, microbatch))
            receiver = pp_rank(after, pp)
            if receiver != rank:
                steps[rank].append(Step(f"SEND_{direction}", stage, microbatch, receiver))
                steps[receiver].append(Step(f"RECV_{direction}", after, microbatch, rank))
        assert progress, "the ranks wait for each other in a circle"
    return steps


def _can_run(action: Action, ready: set[tuple[str, int, int]], num_stages: int) -> bool:
    if action.kind == "W" or (action.kind != "F" and action.stage == num_stages - 1):
        return True
    return ("F" if action.kind == "F" else "B", action.stage, action.microbatch) in ready


def in_turn(orders: Orders) -> Steps:
    """One stage per rank: every action receives its input just before it runs, and sends its output just after."""
    last = len(orders) - 1
    steps: Steps = []
    for rank, order in enumerate(orders):
        mine: list[Step] = []
        for action in order:
            direction = "F" if action.kind == "F" else "B"
            sender, receiver = (rank - 1, rank + 1) if direction == "F" else (rank + 1, rank - 1)
            if 0 <= sender <= last:
                mine.append(Step(f"RECV_{direction}", rank, action.microbatch, sender))
            mine.append(Step(*action))
            if 0 <= receiver <= last:
                mine.append(Step(f"SEND_{direction}", rank, action.microbatch, receiver))
        steps.append(mine)
    return steps


def joined_in_turn(orders: Orders) -> Steps:
    """`in_turn` as in 1F1B: from the last forward of the warm-up to the first backward of the cool-down, a send and the
    receive from the same neighbour are posted together."""
    pp, num_microbatches = len(orders), len(orders[0]) // 2
    steps = []
    for rank, order in enumerate(in_turn(orders)):
        warmup = min(num_microbatches, pp - rank)
        steady = num_microbatches - warmup  # backwards that are followed by a forward
        joined = {  # from which microbatch on, and up to which
            "SEND_F": range(warmup - 1, num_microbatches),
            "RECV_B": range(steady + 1),
            "SEND_B": range(steady),
            "RECV_F": range(warmup, num_microbatches),
        }
        steps.append([step._replace(joined=step.microbatch in joined.get(step.kind, ())) for step in order])
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
    joined: list[int] = []
    for step in steps:
        taken, given = inputs.get(step.stage, 0), inputs.get(step.stage + 1, 0)
        saved = max(kept.get(step.stage, 0), taken)
        if joined and step.kind in "FBIW":
            live -= sum(joined) + sum(sent)  # messages to one neighbour finish in order: earlier sends are over too
            joined.clear()
            sent.clear()
        before = peak = live
        if step.kind == "RECV_F":
            live += taken
        elif step.kind == "RECV_B":
            live += given
        elif step.kind == "F":
            live += saved - taken + given
        elif step.kind == "B":
            peak = max(peak, live - saved + 2 * taken)  # at its end: the input, its gradient, the output's gradient
            live += taken - saved - given
        elif step.kind == "I" and step.stage > 0:
            peak = max(peak, live + taken)
            live += taken - given
        elif step.kind == "W":  # the first stage does its whole backward here, and needs the output's gradient for it
            live -= saved + (given if step.stage == 0 else 0)
        elif step.kind.startswith("SEND"):
            (joined if step.joined else sent).append(given if step.kind == "SEND_F" else taken)
            while len(sent) > SENDS_IN_FLIGHT:
                live -= sent.popleft()
        yield step, before, max(peak, live)
