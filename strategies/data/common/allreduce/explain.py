"""The rounds of an algorithm in words: which blocks are sent, and whose gradients they contain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.planner.contract.messages import ExplainedExchange, ExplainedMessage, ExplainedRound

from .algorithm import Algorithm
from .rounds import ALL_GATHER, SCATTER_REDUCE, PeerMessage, Rounds, Span

MOST_RANKS = 128  # their messages take seconds and tens of megabytes to list; both grow with the cube of the ranks
TITLES = {SCATTER_REDUCE: "scatter-reduce", ALL_GATHER: "all-gather"}


def explain_all_reduce(
    algorithm: Algorithm, ranks: Sequence[int], numel: int, element_bytes: int, title: str
) -> ExplainedExchange:
    """One all-reduce of `numel` elements. Raises ConfigError for more than MOST_RANKS ranks."""
    size = len(ranks)
    if size > MOST_RANKS:
        message = f"{size} ranks exchange messages with each other: explain lists every message of at most {MOST_RANKS}"
        raise ConfigError(Problem(message, "dp", "dp=8"))
    tables = [algorithm.rounds(size, index, numel) for index in range(size)]
    blocks = _blocks(tables, numel)
    summed = [[frozenset({index}) for _ in blocks] for index in range(size)]  # the ranks whose gradients a block sums
    rounds = []
    for number, turns in enumerate(zip(*tables, strict=True)):
        before = [list(of_rank) for of_rank in summed]
        messages = []
        for index, turn in enumerate(turns):
            if sent := turn.send:
                content = _describe(sent, blocks, before[index], ranks)
                num_bytes, target = sent.numel * element_bytes, ranks[sent.peer]
                messages.append(ExplainedMessage(ranks[index], target, content, num_bytes, "gradients"))
            if received := turn.receive:
                for block in _covered(received, blocks):
                    arrived = before[received.peer][block]
                    summed[index][block] = arrived | summed[index][block] if turn.phase == SCATTER_REDUCE else arrived
        text = f"round {number + 1} of {len(tables[0])}, {TITLES[turns[0].phase]}"
        rounds.append(ExplainedRound(text, tuple(messages)))
    assert all(block == frozenset(range(size)) for of_rank in summed for block in of_rank), "a part of the sum is lost"
    return ExplainedExchange(title, tuple(rounds))


def _blocks(tables: Sequence[Rounds], numel: int) -> list[Span]:
    """The spans between all borders of messages: the finest blocks that are sent."""
    parts = [part for rounds in tables for turn in rounds for part in (turn.send, turn.receive) if part]
    return list(pairwise(sorted({0, numel, *(part.start for part in parts), *(part.stop for part in parts)})))


def _covered(part: PeerMessage, blocks: Sequence[Span]) -> list[int]:
    return [number for number, (start, stop) in enumerate(blocks) if part.start <= start and stop <= part.stop]


def _describe(part: PeerMessage, blocks: Sequence[Span], summed: Sequence[frozenset[int]], ranks: Sequence[int]) -> str:
    """`block 2, sum of ranks 0 1`."""
    covered = _covered(part, blocks)
    name = f"block {covered[0]}" if len(covered) == 1 else f"blocks {covered[0]} to {covered[-1]}"
    if len(covered) == len(blocks):
        name = "the whole buffer"
    owners = sorted(ranks[index] for index in summed[covered[0]])
    if len(owners) == len(ranks):
        return f"{name}, the total"
    return f"{name}, {'sum of ranks' if len(owners) > 1 else 'of rank'} {' '.join(map(str, owners))}"
