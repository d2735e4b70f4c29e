"""The program's entry: argv -> exit code. Routes words, turns every error into its shape and code.

Nothing but the standard library's smallest modules is imported before the signals are taken: a scheduler may warn a
job in its first second. No torch, no Hydra, no rich before a word asks for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

EXIT_OK, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 130, 143  # as in parallelrun.errors, which takes its time to import
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Terminated(BaseException):
    """SIGTERM, SIGHUP or SIGUSR1 has come while nobody else was watching for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (None: the process's own), and return its exit code."""
    try:
        with _stops_raise() as taken:
            return _main(list(sys.argv[1:] if argv is None else argv), taken)
    except KeyboardInterrupt:
        return _ended("interrupted", EXIT_INTERRUPTED)
    except Terminated as error:
        return _ended(f"terminated by {error}", EXIT_TERMINATED)


def _main(words: list[str], taken: list[str]) -> int:
    """taken: the signals that have come; an import that was interrupted may raise anything."""
    verbose = any(word in ("-v", "--verbose") for word in words) or os.environ.get("HYDRA_FULL_ERROR") == "1"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of ending the run
    try:
        from parallelrun.cli import stdout

        with stdout.guarded():
            return _route(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_OK if error.code is None else 1
    except Exception as error:
        if taken:
            raise Terminated(taken[0]) from error
        from parallelrun.cli import errors

        return errors.report(errors.translate(error) or error, verbose)


def _route(words: list[str]) -> int:
    from parallelrun import __version__
    from parallelrun.cli.words import TOOLS

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
def _stops_raise() -> Iterator[list[str]]:
    """SIGTERM, SIGHUP and SIGUSR1 unwind the stack once, like Ctrl-C.

    What nohup or a shell told us to ignore stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    taken: list[str] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        taken.append(signal.Signals(signum).name)
        if len(taken) == 1:
            raise Terminated(taken[0])

    before = {number: signal.getsignal(number) for number in _STOPS if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield taken
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _ended(word: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"parallelrun: {word}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
