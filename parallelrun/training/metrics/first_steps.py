"""Watches the first two steps of a process: counts the traffic of the second, and compares the ranks' collectives.

If replicas exchange something only in some steps, the first such step from the second on is the counted one.

A difference between ranks is a bug of a strategy or of a user's module (a layer that depends on the rank or on data).
After each watched step, every rank compares its sequence of collectives with that of the preceding member of each
group. The sequences go through the store, because a collective could match one that is left over. If the ranks hang,
the launcher compares the same sequences.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from parallelrun.base.errors import CollectiveMismatch
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import sequences, torch_private
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Mesh
from parallelrun.distributed.sequences import CollectiveSequence, Lane, SequenceFile
from parallelrun.planner.contract.collective import Collective

# Counted from the start of the process. Its first step has set-up traffic, so a run of one step is not counted.
COUNTED_STEP = 2


class FirstSteps:
    """Watches steps `start + 1` and `start + 2` (or the next full one); `counted` is the second's traffic, or None."""

    def __init__(
        self, mesh: Mesh, config: Config, start: int, directory: Path, full_step: Callable[[int], int] = lambda s: s
    ):
        self._counted_step = full_step(start + COUNTED_STEP)
        self._watched = [step for step in (start + 1, self._counted_step) if step <= config.steps]
        self._mesh, self._directory = mesh, directory
        self._timeout_s = 2 * config.timeout_s  # the launcher's watchdog acts first, and knows more
        self._file: SequenceFile | None = None
        self.counted: list[Collective] | None = None

    def watch(self, step: int) -> AbstractContextManager[object]:
        """Return a context for the training step. It raises CollectiveMismatch at its end; other steps cost nothing."""
        return self._watch(step) if step in self._watched else nullcontext()

    @contextmanager
    def _watch(self, step: int) -> Iterator[None]:
        if self._file is None and self._mesh.shape.num_ranks > 1:
            self._file = SequenceFile(self._directory, self._mesh.rank)
        if self._file is not None:
            self._file.begin(step)
        with CommunicationCounter(self._mesh, self._file.note if self._file is not None else None) as counter:
            yield
        if self._file is not None:
            self._file.end(step)
            compare(self._file.path, step, self._mesh.rank, self._timeout_s)
        if step == self._counted_step:
            self.counted = counter.rows()
        if self._file is not None and step == self._watched[-1]:
            self._file.remove()
        self._watched.remove(step)  # a step that is undone and repeated is not watched again


def compare(path: Path, step: int, rank: int, timeout_s: float) -> None:
    """Publish the sequence in `path`, and compare it with that of the preceding member of every lane.

    If each member equals its predecessor, all are equal, so a rank reads one sequence per lane for any group size.
    Raises CollectiveMismatch with each member's collective on the ranks that see a difference.
    """
    store = torch_private.default_store()
    text = path.read_text()
    store.set(_key(step, rank), b64encode(zlib.compress(text.encode())).decode())
    mine = sequences.parse(text)
    sequence_of = {rank: mine}
    for lane in mine.issued:
        before = lane.ranks[lane.ranks.index(rank) - 1]
        if before not in sequence_of:
            sequence_of[before] = _fetch(store, step, before, timeout_s)
        if sequences.first_mismatch(sequence_of, [lane]) is not None:
            _blame(store, step, lane, sequence_of, timeout_s)


def _blame(store: Any, step: int, lane: Lane, sequence_of: dict[int, CollectiveSequence], timeout_s: float) -> None:
    """Raise CollectiveMismatch with the collectives of all members of the lane that publish theirs soon."""
    for member in lane.ranks:
        if member not in sequence_of:
            try:
                sequence_of[member] = _fetch(store, step, member, min(timeout_s, 1.0))
            except RuntimeError:  # DistStoreError: the member has not ended the step
                continue
    mismatch = sequences.first_mismatch(sequence_of, [lane])
    assert mismatch is not None, "two sequences that differ stay different"
    raise CollectiveMismatch(mismatch.problem())


def _fetch(store: Any, step: int, rank: int, timeout_s: float) -> CollectiveSequence:
    store.wait([_key(step, rank)], timedelta(seconds=timeout_s))
    return sequences.parse(zlib.decompress(b64decode(store.get(_key(step, rank)))).decode())


def _key(step: int, rank: int) -> str:
    return f"collectives/{step}/{rank}"
