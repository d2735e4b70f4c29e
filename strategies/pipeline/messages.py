"""A schedule's actions with the messages between them, and the bytes that a rank holds on the way. Torch-free.

The same lists are run (`runtime.py`, `evaluation.py`) and measured here, so the prediction cannot drift from the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from parallelrun.plan.pipeline_schedule import Action

from .orders import Orders

# A rank waits for its oldest message before it has more than this many of its own under way: each holds a buffer.
SENDS_IN_FLIGHT = 2
ACTIONS = ("F", "B", "I", "W")


class Step(NamedTuple):
    """One thing a rank does.

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
    """Add sends and receives to the ranks' orders of actions so that both ends of every pair see the same order.

    A receive is put in the receiver's list at the moment its sender has sent: no circular wait can arise, also where
    the backend runs the messages of a pair strictly in order (NCCL). Waiting for any earlier send is safe too.
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
        assert progress, "the ranks' orders wait for each other in a circle"
    return steps


def _can_run(action: Action, ready: set[tuple[str, int, int]], num_stages: int) -> bool:
    if action.kind == "W" or (action.kind != "F" and action.stage == num_stages - 1):
        return True
    return ("F" if action.kind == "F" else "B", action.stage, action.microbatch) in ready


def in_turn(orders: Orders) -> Steps:
    """One stage per rank: every action receives what it needs just before it, and sends what it gives just after."""
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
    """`in_turn` as 1F1B does it: from the last forward of the warm-up to the first backward of the cool-down a message
    is posted together with the one that comes from the same neighbour."""
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
    """Every step with the bytes of activations and message buffers that the rank holds before it, and at most in it.

    kept: per stage what a microbatch keeps for backward, the stage's input included. inputs: per stage the bytes of
    what it takes from the stage before; of none for the first. Sent tensors are held until the rank has waited for
    them; a received activation until the last backward of its microbatch, a received gradient until it has been used.
    """
    live = 0
    sent: deque[int] = deque()
    joined: list[int] = []
    for step in steps:
        taken, given = inputs.get(step.stage, 0), inputs.get(step.stage + 1, 0)
        saved = max(kept.get(step.stage, 0), taken)
        if joined and step.kind in "FBIW":
            live -= sum(joined) + sum(sent)  # messages to one neighbour arrive in order: the earlier ones are over too
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
