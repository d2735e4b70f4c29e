"""Which collective does not end, and which ranks have not come to it, from the positions of all ranks.

A rank that waits in a collective is a victim of a rank that does not join it. If the positions do not tell which
collective that is, the suspect is the rank that is stopped, outside of collectives, or at another step than the
majority (ByteRobust, SOSP 2025, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


def from_json(fields: dict[str, Any] | None) -> StalledOperation | None:
    """Return the operation whose fields were written as JSON; None for None."""
    if fields is None:
        return None
    missing = tuple(Missing(**{**absent, "frames": tuple(absent["frames"])}) for absent in fields["missing"])
    return StalledOperation(
        **{**fields, "ranks": tuple(fields["ranks"]), "arrived": tuple(fields["arrived"]), "missing": missing}
    )


def document(stall: StalledOperation | None) -> dict[str, Any] | None:
    """Return a stall for JSON."""
    return asdict(stall) if stall is not None else None


def find(
    positions: Mapping[int, Position], mesh: MeshShape, directory: Path, hosts: Mapping[int, str]
) -> StalledOperation | None:
    """Return the operation for which ranks wait, and those that have not come; None if the positions do not tell.

    positions: of all ranks whose position is known, those without frames included; hosts: by rank. If several
    operations do not end, the result is the one for which the others wait: a missing rank that waits elsewhere is a
    victim. A sleeping rank may also be a victim if another rank is stopped: its checkpoint may wait for all ranks.
    """
    waits = {rank: own.waits_for for rank, own in positions.items() if own.waits_for is not None}
    issued = {rank: own.issued for rank, own in positions.items()}
    absent = {rank: wait.absent(waits, issued) for rank, wait in waits.items()}
    guilty = sorted({rank for ranks in absent.values() for rank in ranks if rank not in waits})
    if stopped := [rank for rank, own in positions.items() if own.activity == STOPPED]:
        guilty = [rank for rank in guilty if rank in stopped]
        if not guilty:
            return None
    if not guilty:  # all wait for each other
        counts = Counter(map(_key, waits.values()))
        if len(counts) < 2:
            return None
        ((common, _),) = counts.most_common(1)
        guilty = [rank for rank in sorted(waits) if _key(waits[rank]) != common]
        shown = next(wait for wait in waits.values() if _key(wait) == common)
        members = [rank for rank in guilty if rank in shown.ranks] or guilty
        return _stall(shown, waits, members, positions, mesh, directory, hosts)
    # of the operations to which a guilty rank has not come, the one in which most ranks wait
    candidates = [wait for rank, wait in waits.items() if set(absent[rank]) & set(guilty)]
    ((key, _),) = Counter(map(_key, candidates)).most_common(1)
    shown = next(wait for wait in candidates if _key(wait) == key)
    here = [rank for rank in guilty if rank in shown.absent(waits, issued)]
    return _stall(shown, waits, here, positions, mesh, directory, hosts)


def suspects(positions: Mapping[int, Position], steps: Mapping[int, int]) -> tuple[list[int], str]:
    """Return the ranks whose position differs from that of the others, and how; an empty list if all are identical."""
    states = {"is stopped (SIGSTOP)": STOPPED, "does not answer": SILENT}
    for reason, activity in states.items():
        odd = [rank for rank, own in positions.items() if own.activity == activity]
        if odd and (activity == STOPPED or len(odd) < len(positions)):
            return odd, reason
    odd = [rank for rank, own in positions.items() if not own.in_collective]
    if odd and len(odd) < len(positions):
        return odd, f"not in a collective: {positions[odd[0]].text}"
    values: dict[str, Callable[[int], object]] = {
        "at step": lambda rank: steps[rank],
        "in": lambda rank: ", ".join(map(function_of, positions[rank].frames[:2])),
    }
    for label, value in values.items():
        ((common, count),) = Counter(map(value, positions)).most_common(1)
        odd = [rank for rank in positions if value(rank) != common]
        if odd and count > len(odd):
            return odd, f"{label} {value(odd[0])}, all others {label} {common}"
    return [], ""


def _stall(
    wait: PendingCollective,
    waits: Mapping[int, PendingCollective],
    guilty: Sequence[int],
    positions: Mapping[int, Position],
    mesh: MeshShape,
    directory: Path,
    hosts: Mapping[int, str],
) -> StalledOperation:
    arrived = tuple(rank for rank in sorted(waits) if _key(waits[rank]) == _key(wait))
    sites = [frame for rank in arrived for frame in positions[rank].frames[:1]]
    missing = []
    for rank in guilty:
        elsewhere = waits.get(rank)
        text = _name(elsewhere, mesh) if elsewhere is not None else ""
        own = positions.get(rank)
        missing.append(Missing(rank, hosts.get(rank, ""), own.activity if own else "", own.frames if own else (),
                               str(log_path(directory, rank)), text))  # fmt: skip
    site = Counter(sites).most_common(1)[0][0] if sites else ""
    axis = axis_of(wait.ranks, mesh)
    return StalledOperation(
        wait.operation, axis, wait.ranks, wait.number, wait.num_bytes, site, arrived, tuple(missing)
    )


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
