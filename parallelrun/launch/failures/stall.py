"""Which collective does not end, and which ranks have not come to it, from the positions of all ranks.

A rank that waits in a collective is a victim of a rank that does not join it. If the positions do not tell which
collective that is, the suspect is the rank that is stopped, does not answer, or is outside of collectives (ByteRobust,
SOSP 2025, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelrun.base.context import PendingCollective
from parallelrun.launch.host.output import log_path
from parallelrun.launch.host.position import SILENT, STOPPED, Position, function_of
from parallelrun.planner.contract.mesh_shape import MeshShape

_MOST_RANKS = 4  # whose frames a message shows
_MOST_FRAMES = 3


@dataclass(frozen=True)
class Missing:
    """A rank that has not come. waits_for: the other operation in which it waits, in words."""

    rank: int
    host: str
    activity: str
    frames: tuple[str, ...]
    log: str
    waits_for: str = ""


@dataclass(frozen=True)
class StalledOperation:
    """An operation that does not end.

    axis: as the plan calls the ranks of its group; number: among the group's collectives, from 1, 0 for a message;
    site: where those that wait have called it; arrived: the ranks that wait in it.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    num_bytes: int
    site: str
    arrived: tuple[int, ...]
    missing: tuple[Missing, ...]

    @property
    def reason(self) -> str:
        """Return the activity of the first missing rank, as text."""
        first = self.missing[0]
        where = f" in {function_of(first.frames[0])}" if first.frames and not first.waits_for else ""
        if first.waits_for:
            odd = _named([missing.rank for missing in self.missing])
            return f"{odd} in {first.waits_for}, {_named(self.arrived)} in {self.name}"
        return f"{first.activity}{where}, and has not come to {self.name}"

    @property
    def name(self) -> str:
        number = f" {self.number}" if self.number else ""
        return f"{self.operation}{number} of axis {self.axis}"

    def lines(self) -> list[str]:
        """Return what the user reads, indented."""
        site = f", called at {self.site}" if self.site else ""
        missing = f"not arrived: {_named([absent.rank for absent in self.missing])}"
        lines = [
            f"  stalled: {self.name} ({_named(self.ranks)}), {self.num_bytes:,} bytes{site}",
            f"  arrived: {_named(self.arrived)}; {missing}",
        ]
        for absent in self.missing[:_MOST_RANKS]:
            does = f"{absent.activity}: {absent.waits_for}" if absent.waits_for else absent.activity
            lines.append(f"  rank {absent.rank} ({absent.host}) {does}; log: {absent.log}")
            lines += [f"    in: {frame}" for frame in absent.frames[:_MOST_FRAMES]]
        return lines


def find(
    positions: Mapping[int, Position], mesh: MeshShape, directory: Path, hosts: Mapping[int, str]
) -> StalledOperation | None:
    """Return the operation for which ranks wait, and those that have not come; None if the positions do not tell.

    positions: of all ranks whose position is known, those without frames included; hosts: by rank.
    """
    waits = {rank: own.waits_for for rank, own in positions.items() if own.waits_for is not None}
    blamed = _blamed(positions, waits)
    if blamed is None:
        return None
    shown, absent = blamed
    arrived = tuple(rank for rank in sorted(waits) if _key(waits[rank]) == _key(shown))
    sites = Counter(frame for rank in arrived for frame in positions[rank].frames[:1])
    missing = []
    for rank in absent:
        own = positions.get(rank, Position(""))
        elsewhere = _name(own.waits_for, mesh) if own.waits_for is not None else ""
        log = str(log_path(directory, rank))
        missing.append(Missing(rank, hosts.get(rank, ""), own.activity, own.frames, log, elsewhere))
    return StalledOperation(
        operation=shown.operation,
        axis=axis_of(shown.ranks, mesh),
        ranks=shown.ranks,
        number=shown.number,
        num_bytes=shown.num_bytes,
        site=sites.most_common(1)[0][0] if sites else "",
        arrived=arrived,
        missing=tuple(missing),
    )


def _blamed(
    positions: Mapping[int, Position], waits: Mapping[int, PendingCollective]
) -> tuple[PendingCollective, list[int]] | None:
    """Return the operation that does not end and the ranks that have not come; None if the positions do not tell.

    If several operations do not end, the result is the one for which the others wait: a missing rank that waits
    elsewhere is a victim. A sleeping rank may also be a victim if another rank is stopped: its checkpoint may wait for
    all ranks.
    """
    issued = {rank: own.issued for rank, own in positions.items()}
    absent = {rank: wait.absent(waits, issued) for rank, wait in waits.items()}
    guilty = {rank for ranks in absent.values() for rank in ranks if rank not in waits}
    if stopped := {rank for rank, own in positions.items() if own.activity == STOPPED}:
        guilty &= stopped
        if not guilty:
            return None
    if guilty:  # of the operations to which a guilty rank has not come, the one in which most ranks wait
        shown = _most_common([wait for rank, wait in waits.items() if guilty & set(absent[rank])])
        return shown, sorted(guilty & set(shown.absent(waits, issued)))
    if len(set(map(_key, waits.values()))) < 2:
        return None
    shown = _most_common(list(waits.values()))  # all wait for each other
    odd = [rank for rank in sorted(waits) if _key(waits[rank]) != _key(shown)]
    return shown, [rank for rank in odd if rank in shown.ranks] or odd


def _most_common(waits: Sequence[PendingCollective]) -> PendingCollective:
    counts = Counter(map(_key, waits))
    return max(waits, key=lambda wait: counts[_key(wait)])


def suspects(positions: Mapping[int, Position]) -> tuple[list[int], str]:
    """Return the ranks that are stopped, else those that do not answer, else those outside of collectives, and what
    they do; an empty list if that is so of all or none."""
    for activity in (STOPPED, SILENT):
        odd = [rank for rank, own in positions.items() if own.activity == activity]
        if odd and (activity == STOPPED or len(odd) < len(positions)):
            return odd, activity
    odd = [rank for rank, own in positions.items() if not own.in_collective]
    if odd and len(odd) < len(positions):
        return odd, f"not in a collective: {positions[odd[0]].text}"
    return [], ""


def _key(wait: PendingCollective) -> tuple[str, str, int]:
    return wait.group, wait.operation, wait.number


def axis_of(ranks: Sequence[int], mesh: MeshShape) -> str:
    """Return the axis whose group `ranks` are; `world` for all ranks, if no axis has them all."""
    for axis, degree in mesh.sizes.items():
        if degree == len(ranks) and tuple(ranks) in mesh.groups(axis):
            return axis
    return "world" if len(ranks) == mesh.num_ranks else "other"


def _name(wait: PendingCollective, mesh: MeshShape) -> str:
    number = f" {wait.number}" if wait.number else ""
    return f"{wait.operation}{number} of axis {axis_of(wait.ranks, mesh)}"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, list(ranks)[:8])) + (f", ... {len(ranks)} in all" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown or 'none'}"
