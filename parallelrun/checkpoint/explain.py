"""Says to the user why a save or load of a checkpoint has failed, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from safetensors import SafetensorError

from parallelrun.base.errors import CheckpointError, ParallelrunError, PeerFailed, Problem, SaveFailed
from parallelrun.checkpoint.together import RanksFailed, disk_error, words


@contextmanager
def explained(action: str, rank: int, saving: bool) -> Iterator[None]:
    """Raise on every rank after a save or load failed on some ranks; the message names the first rank that failed.

    rank: of this process among those that save or load together. All ranks raise SaveFailed if a disk cannot be
    written, CheckpointError if a checkpoint cannot be read. Any other exception is raised again on its own rank, and
    PeerFailed on the other ranks.
    """
    try:
        yield
    except RanksFailed as error:
        _raise_for_user(error, action, rank, saving)


def _raise_for_user(error: RanksFailed, action: str, rank: int, saving: bool) -> NoReturn:
    failures = error.failures
    interrupted = [cause for cause in failures.values() if isinstance(cause, (KeyboardInterrupt, SystemExit))]
    if interrupted:
        raise interrupted[0] from None
    ours = [failed for failed, cause in sorted(failures.items()) if isinstance(cause, ParallelrunError)]
    first = ours[0] if ours else min(failures)
    cause = failures[first]
    said = f"{action}: rank {first}: {words(cause)}"
    if len(failures) > 1:
        said += f" (and {len(failures) - 1} more ranks)"
    reported: ParallelrunError | None = cause if isinstance(cause, ParallelrunError) else None
    if disk_error(cause):
        untouched = Problem(f"{said}; earlier checkpoints are untouched", where="runs")
        reported = SaveFailed(untouched) if saving else CheckpointError(Problem(said, where="resume"))
    elif isinstance(cause, SafetensorError) and not saving:
        reported = CheckpointError(Problem(said, where="resume"))
    if reported is None and rank == first:
        raise cause from error
    reported = reported or PeerFailed(Problem(said))
    reported.of_another_rank = rank != first
    raise reported from (None if reported is cause else cause)
