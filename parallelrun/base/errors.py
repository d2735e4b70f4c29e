"""Errors that the user sees, and the exit code of each."""

from __future__ import annotations

import errno
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_MISMATCH = 4
EXIT_NUMERICS = 5
EXIT_RANK_DIED = 6
EXIT_HANG = 7
EXIT_NO_PROGRESS = 8
EXIT_CORRUPTION = 9
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_LONGEST = 2000  # characters of a line of an error message


def printable(text: str) -> str:
    """Return `text` with control characters and terminal escapes spelled out, so that a terminal does not obey them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the user's request.

    what: the violated rule with its numbers; where: the key or file (`tp`, `recipe.yaml:3`); suggestion: the nearest
    legal value or name ("did you mean"); command: a command to try; kind: `arithmetic` (does not divide), `undefined`
    (has no meaning), `not_built`, `contradiction`, `unread` (the chosen strategies do not read the key) or `usage`.
    All texts are made `printable`, because they may quote names from files that other people wrote.
    """

    what: str
    where: str = ""
    suggestion: str = ""
    command: str = ""
    kind: str = "usage"

    def __post_init__(self) -> None:
        for name in ("what", "where", "suggestion", "command"):
            object.__setattr__(self, name, printable(str(getattr(self, name))))

    def lines(self) -> list[str]:
        """Return the lines of the error message: `error: ...`, `  where: ...`, `  did you mean: ...`, `  try: ...`."""
        labels = ("error", "  where", "  did you mean", "  try")
        texts = (self.what, self.where, self.suggestion, self.command)
        return [f"{label}: {' '.join(text.split())[:_LONGEST]}" for label, text in zip(labels, texts) if text]


class ParallelrunError(Exception):
    """An error for the user: it is shown without a traceback and ends the program with `exit_code`.

    of_another_rank: this rank raises the error because another rank has failed.
    """

    exit_code = EXIT_RUN_FAILED
    of_another_rank = False

    def __init__(self, *problems: Problem | str, exit_code: int | None = None):
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
        if exit_code is not None:
            self.exit_code = exit_code
        super().__init__("; ".join(p.what for p in self.problems))


class ConfigError(ParallelrunError):
    """Wrong usage or configuration: exit 2. It carries all violations of a plan."""

    exit_code = EXIT_CONFIG


class EnvironmentProblem(ParallelrunError):
    """The machine lacks something, or the plan does not fit on it: exit 3."""

    exit_code = EXIT_ENVIRONMENT


class SaveFailed(EnvironmentProblem):
    """A checkpoint could not be written (full disk, lost mount): exit 3 unless the training loop tries again."""


class DataError(EnvironmentProblem):
    """The content of a data file is broken: exit 4. It names the file and the line or row."""

    exit_code = EXIT_MISMATCH


class CheckpointError(ParallelrunError):
    """A checkpoint is missing, incomplete, corrupt or belongs to another model: exit 4."""

    exit_code = EXIT_MISMATCH


class VerificationError(ParallelrunError):
    """The run differs from its reference by more than the declared equivalence allows: exit 4."""

    exit_code = EXIT_MISMATCH


class NumericsError(ParallelrunError):
    """The loss or a gradient is not finite, or too many steps were skipped: exit 5."""

    exit_code = EXIT_NUMERICS


class CorruptionError(ParallelrunError):
    """A rank computes wrong numbers, or its memory changes, again after its steps were undone: exit 9."""

    exit_code = EXIT_CORRUPTION


class PeerFailed(ParallelrunError):
    """Another rank raised an exception, which that rank reports: exit 6."""

    exit_code = EXIT_RANK_DIED
    of_another_rank = True


class CollectiveMismatch(ParallelrunError):
    """The ranks issued different collectives: exit 6."""

    exit_code = EXIT_RANK_DIED


class RunFailed(ParallelrunError):
    """A run that the Python API started has failed. directory: its files; None if it failed before it had one."""

    def __init__(self, *problems: Problem | str, exit_code: int, directory: Path | None = None):
        super().__init__(*problems, exit_code=exit_code)
        self.directory = directory


def cause_chain(error: BaseException | None) -> list[BaseException]:
    """Return `error` and the exceptions that led to it, the first cause last; of a group, those that it holds too."""
    chain: list[BaseException] = []
    waiting = [error]
    while waiting:
        link = waiting.pop(0)
        if link is not None and not any(link is earlier for earlier in chain):
            chain.append(link)
            waiting += [link.__cause__ or link.__context__, *getattr(link, "exceptions", ())]  # of an ExceptionGroup
    return chain


def full_disk(error: BaseException) -> OSError | None:
    """Return the error of a disk or quota without room, if it is `error` or has led to it."""
    rooms = (link for link in cause_chain(error) if isinstance(link, OSError))
    return next((link for link in rooms if link.errno in (errno.ENOSPC, errno.EDQUOT)), None)


def with_article(name: str) -> str:
    """Return `name` after its indefinite article: `a list`, `an int`, `an LSTM`."""
    spelled_out = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"an {name}" if spelled_out or name[0] in "aeioAEIO" else f"a {name}"
