"""What a user is told when something is wrong, and the exit code that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_MISMATCH = 4
EXIT_NUMERICS = 5
EXIT_RANK_DIED = 6
EXIT_HANG = 7
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def printable(text: str) -> str:
    """`text` without what a terminal would obey: control characters, escapes and the like are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what the user asked for.

    what: the broken rule with its numbers; where: key or file (`tp`, `recipe.yaml:3`); suggestion: the nearest legal
    value or name ("did you mean"); command: something to try; kind: `arithmetic` (does not divide), `undefined` (has
    no meaning), `not_built`, `contradiction`, `unread` (a key the chosen strategies do not read) or `usage`. A text may
    quote
    names out of files that others have made: it is made `printable`.
    """

    what: str
    where: str = ""
    suggestion: str = ""
    command: str = ""
    kind: str = "usage"

    def __post_init__(self) -> None:
        for name in ("what", "where", "suggestion", "command"):
            object.__setattr__(self, name, printable(str(getattr(self, name))))


class ParallelrunError(Exception):
    """An error meant for the user: shown without a traceback, ends the program with `exit_code`.

    of_another_rank: all ranks raise this error alike, and another rank is the one whose failure it tells.
    """

    exit_code = EXIT_RUN_FAILED
    of_another_rank = False

    def __init__(self, *problems: Problem | str, exit_code: int | None = None):
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
        if exit_code is not None:
            self.exit_code = exit_code
        super().__init__("; ".join(p.what for p in self.problems))


class ConfigError(ParallelrunError):
    """Wrong usage or configuration: exit 2. Carries every violation of a plan at once."""

    exit_code = EXIT_CONFIG


class EnvironmentProblem(ParallelrunError):
    """The machine lacks something, or the plan does not fit it: exit 3."""

    exit_code = EXIT_ENVIRONMENT


class SaveFailed(EnvironmentProblem):
    """A checkpoint could not be written (a full disk, a lost mount): exit 3 where the loop does not try again."""


class CheckpointError(ParallelrunError):
    """A checkpoint is missing, incomplete, corrupt or of another model: exit 4."""

    exit_code = EXIT_MISMATCH


class VerificationError(ParallelrunError):
    """The training differs from one device by more than its declared equivalence allows: exit 4."""

    exit_code = EXIT_MISMATCH


class NumericsError(ParallelrunError):
    """Non-finite loss or gradient, or too many skipped steps: exit 5."""

    exit_code = EXIT_NUMERICS


class PeerFailed(ParallelrunError):
    """An exception on another rank, which tells it itself, ends this rank too: exit 6."""

    exit_code = EXIT_RANK_DIED
    of_another_rank = True


class CollectiveMismatch(ParallelrunError):
    """Ranks issue different collectives: exit 6."""

    exit_code = EXIT_RANK_DIED


def with_article(name: str) -> str:
    """`a list`, `an int`, `an LSTM`."""
    spelled_out = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"an {name}" if spelled_out or name[0] in "aeioAEIO" else f"a {name}"
