"""Our action lists are what torch's schedules run, and they obey the rules that any schedule must obey."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from parallelrun.strategies.pipeline import messages
from parallelrun.strategies.pipeline import orders as schedules
from parallelrun.strategies.pipeline.orders import of_ranks
from parallelrun.strategies.pipeline.plan import ZBV, Interleaved

SIZES = [(pp, m) for pp in (2, 3, 4) for m in (1, 2, 3, 4, 8, 9)]


def in_rounds(pp: int, m: int) -> bool:
    return m % schedules.num_rounds(pp, m) == 0


CASES = [("gpipe", pp, 1, m) for pp, m in SIZES]
CASES += [("1f1b", pp, 1, m) for pp, m in SIZES if m >= pp]
CASES += [
    (kind, pp, c, m) for kind in ("interleaved", "zero_bubble") for c in (2, 3) for pp, m in SIZES if in_rounds(pp, m)
]
CASES += [("zbv", pp, 2, m) for pp, m in SIZES]
CASES += [("dualpipev", pp, 2, m) for pp, m in SIZES if m >= 2 * pp]
FUNCTIONS = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero_bubble": schedules.zero_bubble,
    "zbv": schedules.zbv,
    "dualpipev": schedules.dualpipev,
}
TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def torchs_actions(name: str, pp: int, m: int, virtual_stages: int) -> list[list[tuple[str, int, int]]]:
    """The actions of torch's schedule in order: (kind, stage, microbatch) per pp rank."""
    orders = get_schedule_ops(name, pp, m, virtual_stages if virtual_stages > 1 else None)
    actions = [
        [part for action in order if action is not None for part in action.sub_actions or (action,)] for order in orders
    ]
    return [
        [(str(a.computation_type.value), a.stage_index, a.microbatch_index or 0) for a in order
         if a.computation_type.value in ("F", "B", "I", "W")]
        for order in actions
    ]  # fmt: skip


@pytest.fixture
def silence():
    """torch warns of every schedule that is drawn; whoever is tested next may log again."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_actions_are_those_of_torch(kind, silence):
    for name, pp, virtual_stages, m in CASES:
        if name == kind:
            theirs = torchs_actions(TORCH_NAMES[kind], pp, m, virtual_stages)
            ours = [
                [(a.kind, a.stage, a.microbatch) for a in order]
                for order in of_ranks(FUNCTIONS[kind], pp, virtual_stages, m)
            ]
            if kind == "1f1b":  # the last coordinate's microbatches are numbered from 1 in torch's drawing of it
                ours, theirs = ([[action[:2] for action in order] for order in orders] for orders in (ours, theirs))
            assert ours == theirs, (kind, pp, virtual_stages, m)


def peak_in_flight(order):
    """Per stage of one rank: the most microbatches between their forward and their B (or W)."""
    alive, peak = Counter(), Counter()
    for action in order:
        alive[action.stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        peak[action.stage] = max(peak[action.stage], alive[action.stage])
    return dict(peak)


def test_the_v_meets_itself_at_the_last_rank():
    assert [ZBV.pp_rank(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [Interleaved.pp_rank(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("schedule", [Interleaved, ZBV])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_evaluation_passes_messages_in_the_same_order_at_both_ends(schedule, pp, m):
    virtual_stages = 2
    orders = schedule.forward_only(pp, virtual_stages, m)
    steps = messages.with_messages(orders, schedule.pp_rank, pp * virtual_stages)
    for a in range(pp):
        for b in range(pp):
            sent = [(s.stage + 1, s.microbatch) for s in steps[a] if s.kind == "SEND_F" and s.peer == b]
            received = [(s.stage, s.microbatch) for s in steps[b] if s.kind == "RECV_F" and s.peer == a]
            assert sent == received
            between = [(s.kind == "SEND_F", s.stage, s.microbatch) for s in steps[a] if s.peer == b]
            mirrored = [(s.kind == "RECV_F", s.stage + (1 if s.kind == "SEND_F" else -1), s.microbatch)
                        for s in steps[b] if s.peer == a]  # fmt: skip
            assert between == mirrored, "a pair that runs its messages in order would wait for ever"
    assert sum(s.kind == "F" for order in steps for s in order) == pp * virtual_stages * m
