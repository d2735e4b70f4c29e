"""The collectives that each rank issues in its first steps, and the first difference between ranks.

gloo and NCCL match the n-th collective of a group on one rank with the n-th on the others, even if they differ. Ranks
that issue different collectives therefore hang, crash, or silently compute wrong numbers. So each rank writes every
collective to a file before it starts it. The files survive a crash; the ranks compare them after the step, and the
launcher compares them while the ranks hang.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from parallelrun.base.errors import Problem

_NOTHING = "nothing (it has ended the step)"
_SHOWN = 8  # ranks of a group that a message names


class Lane(NamedTuple):
    """An ordered stream: the collectives of one group, or the messages of one purpose from one rank to another."""

    axis: str
    ranks: tuple[int, ...]
    messages: str = ""

    def __str__(self) -> str:
        if self.messages:
            return f"{self.axis}, messages from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.axis} (ranks {_numbers(self.ranks)})"


@dataclass
class CollectiveSequence:
    """The collectives that one rank has issued, as (step, description) by lane, and the last step that it has ended."""

    issued: dict[Lane, list[tuple[int, str]]] = field(default_factory=dict)
    ended: int = 0


@dataclass(frozen=True)
class SequenceMismatch:
    """The first collective in which ranks of a lane differ.

    number: of the collective in its step, from 1; by_rank: its description on each rank; suspects: the ranks that
    differ from the majority.
    """

    lane: Lane
    step: int
    number: int
    by_rank: Mapping[int, str]
    suspects: tuple[int, ...]

    def problem(self) -> Problem:
        """Return the error message for the user."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(self.by_rank.items()):
            by_text.setdefault(text, []).append(rank)
        issued = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {_numbers(ranks)}: {text}" for text, ranks in by_text.items()
        )
        message = f"step {self.step}: ranks issue different collectives over {self.lane}"
        return Problem(
            f"{message}; collective {self.number} is: {issued}",
            where=f"rank {_numbers(self.suspects)}",
            command="find the code that depends on the rank or on the data; every rank must run the same layers in the "
            "same order (logs/collectives_rank_<n>.txt lists all collectives)",
        )


class SequenceFile:
    """Writes one rank's sequence: one line per collective, flushed before the collective starts."""

    def __init__(self, directory: Path, rank: int):
        self.path = path_of(directory, rank)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
        self._numbers: dict[Lane, int] = {}
        self._lines: dict[tuple[Lane, str], bytes] = {}  # a step issues the same few again and again

    def begin(self, step: int) -> None:
        self._file.write(f"step {step}\n".encode())

    def end(self, step: int) -> None:
        self._file.write(f"end {step}\n".encode())

    def note(self, lane: Lane, description: str) -> None:
        """Record that the rank is about to issue a collective."""
        line = self._lines.get((lane, description))
        if line is None:
            line = self._lines[lane, description] = f"{self._number(lane)} {description}\n".encode()
        self._file.write(line)

    def _number(self, lane: Lane) -> int:
        """Return the number of a lane, which the file tells before its first collective."""
        number = self._numbers.get(lane)
        if number is None:
            number = self._numbers[lane] = len(self._numbers)
            ranks = ",".join(map(str, lane.ranks))
            self._file.write(f"lane {number} {lane.axis} {ranks} {lane.messages}\n".encode())
        return number

    def remove(self) -> None:
        """Delete the file: the first steps have ended and were the same on all ranks."""
        self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


def path_of(directory: Path, rank: int) -> Path:
    """Return the path of a rank's sequence in a run directory."""
    return directory / "logs" / f"collectives_rank_{rank}.txt"


def parse(text: str) -> CollectiveSequence:
    """Read the text of a SequenceFile, without a last line that is incomplete because the rank was killed."""
    sequence, lanes, step = CollectiveSequence(), {}, 0
    for line in text.split("\n")[:-1]:
        first, _, rest = line.partition(" ")
        if first == "step":
            step = int(rest)
        elif first == "end":
            sequence.ended = int(rest)
        elif first == "lane":
            number, axis, ranks, messages = rest.split(" ", 3)
            lanes[number] = Lane(axis, tuple(map(int, ranks.split(","))), messages)
        else:
            sequence.issued.setdefault(lanes[first], []).append((step, rest))
    return sequence


def num_bytes(directory: Path) -> int:
    """Return the size of all ranks' sequences: it grows as long as any rank issues collectives."""
    total = 0
    for path in (directory / "logs").glob("collectives_rank_*.txt"):
        with contextlib.suppress(OSError):  # its rank has just removed it
            total += path.stat().st_size
    return total


def read_all(directory: Path) -> dict[int, CollectiveSequence]:
    """Return the sequences in a run directory by rank; empty once the first steps have ended."""
    sequences = {}
    for path in (directory / "logs").glob("collectives_rank_*.txt"):
        with contextlib.suppress(OSError):  # its rank has just removed it
            sequences[int(path.stem.rpartition("_")[2])] = parse(path.read_text())
    return sequences


def first_mismatch(
    sequences: Mapping[int, CollectiveSequence], lanes: Iterable[Lane] | None = None
) -> SequenceMismatch | None:
    """Return the earliest certain difference between ranks of a lane, or None.

    A rank that is only slower does not count. A difference is certain when two ranks have issued different collectives
    at the same index, or when one rank has ended the step in which another issued one collective more.
    """
    if lanes is None:
        lanes = [lane for sequence in sequences.values() for lane in sequence.issued]
    mismatches = [mismatch for lane in dict.fromkeys(lanes) if (mismatch := _of_lane(lane, sequences)) is not None]
    return min(mismatches, key=lambda mismatch: mismatch.step, default=None)


def _of_lane(lane: Lane, sequences: Mapping[int, CollectiveSequence]) -> SequenceMismatch | None:
    members = {rank: sequences[rank] for rank in lane.ranks if rank in sequences}
    issued = {rank: sequence.issued.get(lane, []) for rank, sequence in members.items()}
    for index in range(max(map(len, issued.values()), default=0)):
        present = {rank: items[index] for rank, items in issued.items() if index < len(items)}
        step = min(at for at, _ in present.values())
        by_rank = {rank: text if at == step else f"{text}, of step {at}" for rank, (at, text) in present.items()}
        by_rank |= {rank: _NOTHING for rank in members if rank not in present and members[rank].ended >= step}
        if len(set(by_rank.values())) > 1:
            first = next(rank for rank, (at, _) in present.items() if at == step)
            number = 1 + sum(at == step for at, _ in issued[first][:index])
            return SequenceMismatch(lane, step, number, by_rank, _suspects(by_rank))
    return None


def _suspects(by_rank: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks outside the largest group that agrees; all ranks if there is no largest group."""
    (common, count), (_, second) = Counter(by_rank.values()).most_common(2)
    return tuple(sorted(rank for rank, text in by_rank.items() if count == second or text != common))


def _numbers(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return ", ".join(map(str, ranks[:_SHOWN])) + (f", ... {len(ranks)} in all" if len(ranks) > _SHOWN else "")
