"""What a strategy sends in one step, message by message: plain data that `parallelrun explain` shows. Torch-free.

Each strategy's `plan.py` answers `explain(plan) -> Explanation`. What it lists must add up to what it predicts
(`rows_of`, held equal to `account.collectives` by a test).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parallelrun.plan.structure import Collective, Plan

SEND = "send"


@dataclass(frozen=True)
class Transfer:
    """`calls` messages or collectives of `payload_bytes` together.

    operation: `send` from ranks[0] to ranks[1], or a collective of all ranks. block: what is sent, in words; effect:
    what the receiver does with it (`added`, `kept`), empty where the operation says so.
    """

    operation: str
    ranks: tuple[int, ...]
    axis: str
    purpose: str
    block: str
    payload_bytes: int
    calls: int = 1
    effect: str = ""


@dataclass(frozen=True)
class Step:
    """Transfers that may happen at the same time. times: how often the whole step is repeated in a training step."""

    title: str
    transfers: tuple[Transfer, ...]
    times: int = 1


@dataclass(frozen=True)
class Explanation:
    """What one strategy sends, in order. notes: what a reader should know besides."""

    axis: str
    title: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


def rows_of(explanation: Explanation, rank: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(axis, operation, purpose) -> (calls, payload bytes) of `rank`, counted as `Collective` counts."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for step in explanation.steps:
        for one in step.transfers:
            if rank not in one.ranks:
                continue
            receives = one.operation == SEND and one.ranks[0] != rank
            key = one.axis, "recv" if receives else one.operation, one.purpose
            calls, payload = found.get(key, (0, 0))
            payload += 0 if receives else step.times * one.payload_bytes
            found[key] = calls + step.times * one.calls, payload
    return found


def group_of(plan: Plan, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks that meet `rank` in a collective over `axis`: a mesh axis, several joined by `+`, or `embedding`."""
    place = plan.mesh.coordinate(rank)
    if axis == "embedding":
        ends = (0, plan.mesh.size("pp") - 1)
        return tuple(plan.mesh.rank(**{**_leaves(plan, place), "pp": end}) for end in ends)
    free = {leaf for part in axis.split("+") for leaf in plan.mesh.leaf_axes(part)}
    fixed = {leaf: index for leaf, index in _leaves(plan, place).items() if leaf not in free}
    others = range(plan.num_workers)
    return tuple(r for r in others if all(plan.mesh.coordinate(r)[leaf] == index for leaf, index in fixed.items()))


def _leaves(plan: Plan, place: dict[str, int]) -> dict[str, int]:
    return {leaf: place[leaf] for leaf in plan.mesh.leaf_names}


def everywhere(
    plan: Plan, calls_of: Callable[[int], Iterable[tuple[Collective, str]]], ranks: Iterable[int] | None = None
) -> tuple[Transfer, ...]:
    """Each collective once for every group that takes part. calls_of(rank) -> (row, what is sent) of one rank."""
    found: dict[tuple[object, ...], Transfer] = {}
    for rank in range(plan.num_workers) if ranks is None else ranks:
        for number, (row, block) in enumerate(calls_of(rank)):
            group = group_of(plan, row.axis, rank)
            one = Transfer(row.operation, group, row.axis, row.purpose, block, row.payload_bytes, row.calls)
            found.setdefault((number, group, row.axis, row.operation, row.purpose), one)
    return tuple(found.values())


def of_rows(axis: str, title: str, plan: Plan, rows: Callable[[int], list[Collective]]) -> Explanation:
    """The explanation of a strategy that sends collectives of the backend only: its predicted rows."""
    kinds: dict[tuple[str, str, str], None] = {}
    by_rank = {rank: rows(rank) for rank in range(plan.num_workers)}
    for found in by_rank.values():
        kinds.update(dict.fromkeys((row.axis, row.operation, row.purpose) for row in found))
    steps = []
    for over, operation, purpose in kinds:
        key = over, operation, purpose

        def calls_of(rank: int, key: tuple[str, str, str] = key) -> list[tuple[Collective, str]]:
            mine = [row for row in by_rank[rank] if (row.axis, row.operation, row.purpose) == key]
            return [(row, row.purpose.replace("_", " ")) for row in mine]

        name = f"{operation.replace('_', '-')} of {purpose.replace('_', ' ')} over {over}"
        steps.append(Step(name, everywhere(plan, calls_of)))
    return Explanation(axis, title, tuple(steps))
