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


def exchange(
    algorithm: Algorithm,
    ranks: Sequence[int],
    numel: int,
    element_bytes: int,
    limit: int | None,
    title: str,
    purpose: str = "gradients",
) -> ExplainedExchange:
    """One all-reduce of `numel` elements. limit: elements of a piece of a message; None: messages are sent whole.

    Raises ConfigError for more than MOST_RANKS ranks.
    """
    size = len(ranks)
    if size > MOST_RANKS:
        message = f"{size} ranks exchange messages with each other: explain lists every message of at most {MOST_RANKS}"
        raise ConfigError(Problem(message, "dp", "dp=8"))
    tables = [algorithm.rounds(size, index, numel) for index in range(size)]
    blocks = _blocks(tables, numel)
    holders = [[frozenset({index}) for _ in blocks] for index in range(size)]  # whose gradients a rank's block has
    rounds = []
    for number, together in enumerate(zip(*tables, strict=True)):
        before = [list(held) for held in holders]
        messages = []
        for index, turn in enumerate(together):
            if turn.send is not None:
                content = _what(turn.send, blocks, before[index], ranks)
                size_bytes = turn.send.numel * element_bytes
                calls = 1 if limit is None else sum(1 for _ in turn.send.pieces(limit))
                messages.append(
                    ExplainedMessage(ranks[index], ranks[turn.send.peer], content, size_bytes, purpose, calls)
                )
            if turn.receive is not None:
                for block in _covered(turn.receive, blocks):
                    arrived = before[turn.receive.peer][block]
                    adds = turn.phase == SCATTER_REDUCE
                    holders[index][block] = holders[index][block] | arrived if adds else arrived
        rounds.append(
            ExplainedRound(f"round {number + 1} of {len(tables[0])}, {TITLES[together[0].phase]}", tuple(messages))
        )
    assert all(block == frozenset(range(size)) for held in holders for block in held), "a rank lacks a part of the sum"
    return ExplainedExchange(title, tuple(rounds))


def _blocks(tables: Sequence[Rounds], numel: int) -> list[Span]:
    """The spans between all borders of messages: the finest blocks that are sent."""
    borders = {0, numel}
    for rounds in tables:
        for turn in rounds:
            borders |= {edge for part in (turn.send, turn.receive) if part for edge in (part.start, part.stop)}
    return list(pairwise(sorted(borders)))


def _covered(part: PeerMessage, blocks: Sequence[Span]) -> list[int]:
    return [number for number, (start, stop) in enumerate(blocks) if part.start <= start and stop <= part.stop]


def _what(part: PeerMessage, blocks: Sequence[Span], held: Sequence[frozenset[int]], ranks: Sequence[int]) -> str:
    """`block 2, sum of ranks 0 1`."""
    covered = _covered(part, blocks)
    name = f"block {covered[0]}" if len(covered) == 1 else f"blocks {covered[0]} to {covered[-1]}"
    if len(covered) == len(blocks) > 1 or len(blocks) == 1:
        name = "the whole buffer"
    owners = sorted(ranks[index] for index in held[covered[0]])
    if len(owners) == len(ranks):
        return f"{name}, the total"
    return f"{name}, {'sum of ranks' if len(owners) > 1 else 'of rank'} {' '.join(map(str, owners))}"
