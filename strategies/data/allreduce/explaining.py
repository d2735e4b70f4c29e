"""The rounds of a written-out all-reduce, every message with its block, for `parallelrun explain`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from parallelrun.plan.explanation import SEND, Step, Transfer

from .settings import Algorithm
from .steps import SCATTER_REDUCE, Message, Round, pieces, segments, table

TITLES = {"scatter_reduce": "scatter-reduce", "all_gather": "all-gather"}


def steps(
    algorithm: Algorithm,
    groups: Sequence[Sequence[int]],
    numel: int,
    element_bytes: int,
    limit: int | None,
    axis: str,
    name: str,
) -> list[Step]:
    """The rounds of one all-reduce of `numel` elements, of all `groups` of ranks side by side. limit: elements of a
    piece of a message; name: of what is summed."""
    size = len(groups[0])
    tables = [table(algorithm.name, size, index, numel, algorithm.group_size) for index in range(size)]
    out = []
    for number in range(max(map(len, tables))):
        phase, found = "", []
        for group in groups:
            for index, rounds in enumerate(tables):
                one: Round | None = rounds[number] if number < len(rounds) else None
                if one is None or one.send is None:
                    continue
                phase = one.phase
                calls = len(list(pieces(one.send, limit))) if limit else 1
                found.append(
                    Transfer(
                        SEND,
                        (group[index], group[one.send.peer]),
                        axis,
                        "gradients",
                        block(one.send, numel, size, algorithm.group_size),
                        one.send.numel * element_bytes,
                        calls,
                        "added" if phase == SCATTER_REDUCE else "kept",
                    )
                )
        if found:
            out.append(Step(f"{name}, round {number + 1}: {TITLES[phase]}", tuple(found)))
    return out


def block(message: Message, numel: int, size: int, group_size: int) -> str:
    """The name of a message's span: a segment of the whole, a segment of an inner group's segment, or its elements."""
    span = message.start, message.stop
    for parts in dict.fromkeys((size, group_size)):
        cut = segments(0, numel, parts)
        if span in cut:
            return f"block {cut.index(span)} of {parts}"
    return f"elements {message.start}-{message.stop - 1}"
