"""The program's entry: argv -> exit code. Routes words, turns every error into its shape and code.

Imports stay small here and in what it imports first: no torch, no Hydra, no rich before a word asks for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from parallelrun import __version__
from parallelrun.cli import errors, stdout
from parallelrun.cli.words import TOOLS
from parallelrun.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED


class Terminated(BaseException):
    """SIGTERM has come while nobody else was watching for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (None: the process's own), and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbose = any(word in ("-v", "--verbose") for word in words) or os.environ.get("HYDRA_FULL_ERROR") == "1"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of ending the run
    with _sigterm_raises():
        try:
            with stdout.guarded():
                return _route(words)
        except KeyboardInterrupt:
            return _ended("interrupted", EXIT_INTERRUPTED)
        except Terminated:
            return _ended("terminated", EXIT_TERMINATED)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else EXIT_OK if error.code is None else 1
        except Exception as error:
            return errors.report(errors.translate(error) or error, verbose)


def _route(words: list[str]) -> int:
    if not words:
        return _help(full=False)
    if words[0] in TOOLS:
        return _tool(words[0], words[1:])
    if any(word in ("-h", "--help") for word in words):
        return _help(full=True)
    if "--version" in words:
        print(f"parallelrun {__version__}")
        return EXIT_OK
    from parallelrun.cli import compute

    return compute.run(words)


def _help(full: bool) -> int:
    from parallelrun.cli import help as texts

    if os.environ.get("RANK", "0") == "0":  # under a launcher, once is enough
        print(texts.full() if full else texts.SHORT)
    return EXIT_OK


def _tool(tool: str, words: list[str]) -> int:
    if tool == "tokenize":
        from parallelrun.data.tokenize import main as tokenize

        return tokenize(words) or EXIT_OK
    if tool == "doctor":
        from parallelrun.cli import doctor

        return doctor.main(words)
    from parallelrun.cli import listing

    return listing.ls(words) if tool == "ls" else listing.show(words)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack once, like Ctrl-C; the launcher sets its own handlers while ranks run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ended(word: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"parallelrun: {word}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
