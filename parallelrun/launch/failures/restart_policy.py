"""Whether a run that has failed is restarted, and whether with all of its ranks. Decides from the attempts alone.

A restart helps if the cause may not recur: a rank that was killed, a crash, a hang, a lost connection, an exception. It
does not help if the same failure would recur, or if the user or the scheduler stopped the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.base import errors
from parallelrun.report.records.attempts import Attempt

MOST_TRIES = 3  # in a row without progress (NVIDIA's resiliency extension has the same rule)
_FINAL = {
    errors.EXIT_CONFIG: "the command must be changed",
    errors.EXIT_ENVIRONMENT: "the machine lacks something, and would lack it again",
    errors.EXIT_MISMATCH: "the same file would be read again",
    errors.EXIT_NUMERICS: "the same steps would give the same numbers",
    errors.EXIT_PREEMPTED: "the run was asked to stop",
    errors.EXIT_INTERRUPTED: "the run was asked to stop",
    errors.EXIT_TERMINATED: "the run was asked to stop",
}


@dataclass(frozen=True)
class Decision:
    """restart: whether to try again; why: not; exit_code: instead of that of the last failure, if not 0.

    without: the rank that cannot be replaced, if there is one; bad_checkpoint: the checkpoint of the last attempt is
    damaged, so the next one needs an older one.
    """

    restart: bool
    why: str = ""
    exit_code: int = 0
    without: int | None = None
    bad_checkpoint: bool = False


def decide(attempts: Sequence[Attempt], max_restarts: int) -> Decision:
    """Return what follows the failure of the last of `attempts`. max_restarts: the key `restarts`."""
    last = attempts[-1]
    bad_checkpoint = last.exit_code == errors.EXIT_MISMATCH and last.stepping is None and last.checkpoint is not None
    if last.exit_code in _FINAL and not bad_checkpoint:
        return Decision(False, _FINAL[last.exit_code])
    if last.raised and len(attempts) == 1 and last.stepping is None:
        return Decision(False, "no step has ever worked, so the next attempt would raise the same exception")
    if _repeats_lack_of_memory(attempts):
        return Decision(False, f"the memory was too small twice, after step {last.step}")
    if num_without_progress(attempts) >= MOST_TRIES:
        why = f"no progress in {MOST_TRIES} attempts: step {max(attempt.step for attempt in attempts)} was not passed"
        return Decision(False, why, errors.EXIT_NO_PROGRESS)
    if len(attempts) > max_restarts:
        return Decision(False, f"restarts={max_restarts} {'is' if max_restarts == 1 else 'are'} used up")
    return Decision(True, without=_not_replaceable(attempts), bad_checkpoint=bad_checkpoint)


def num_without_progress(attempts: Sequence[Attempt]) -> int:
    """Return how many attempts at the end have neither completed nor saved a step that no earlier one had."""
    best = (0, 0)
    count = 0
    for attempt in attempts:
        reached = (max(best[0], attempt.step), max(best[1], attempt.saved))
        count = count + 1 if reached == best else 0
        best = reached
    return count


def _not_replaceable(attempts: Sequence[Attempt]) -> int | None:
    """Return the rank that has failed first in the last two attempts, without progress in the second."""
    if len(attempts) < 2 or num_without_progress(attempts) == 0:
        return None
    before, last = attempts[-2:]
    same = before.rank is not None and (before.rank, before.host, before.world) == (last.rank, last.host, last.world)
    return last.rank if same else None


def _repeats_lack_of_memory(attempts: Sequence[Attempt]) -> bool:
    before, last = attempts[-2:] if len(attempts) > 1 else (attempts[-1], attempts[-1])
    return len(attempts) > 1 and before.memory and last.memory and before.step == last.step
