"""The program's entry point: routes the first word, and turns every error into a message and an exit code.

Before the signal handlers are set, only the smallest modules of the standard library are imported: a scheduler may
send a signal in a job's first second. torch, Hydra and rich are imported only by the verbs and tools that need them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from parallelrun.base import stop_signals
from parallelrun.base.stop_signals import Terminated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_OK, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 130, 143  # as in parallelrun.base.errors, which is slow to import


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (None: the process's own, which ends with it); return its exit code."""
    _open_closed_streams()
    if argv is not None:
        return _guarded(list(argv), ends=False)
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first to be registered is the last to run
    codes.append(_guarded(sys.argv[1:], ends=True))
    return codes[0]


def _open_closed_streams() -> None:
    """Open the null device as each standard stream that the shell has closed (`2>&-`): each takes its own number, which
    is the lowest free one, so that no other file takes it, to be written to by a rank or a library."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _leave(codes: list[int]) -> None:
    """End the process here: taking torch apart takes half a second, and what a plan imports some hundredths of one.
    codes: the exit code, if `main` has returned one."""
    if codes:
        with contextlib.suppress(OSError, ValueError):  # Python reports them
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(codes[0])


def _guarded(words: list[str], ends: bool) -> int:
    try:
        with stop_signals.raising(ends):
            return _main(words)
    except KeyboardInterrupt:
        return _ended("interrupted", EXIT_INTERRUPTED)
    except Terminated as error:
        return _ended(f"terminated by {error}", EXIT_TERMINATED)


def _main(words: list[str]) -> int:
    verbose = any(word in ("-v", "--verbose") for word in words) or os.environ.get("HYDRA_FULL_ERROR") == "1"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ?, and the run goes on
    try:
        from parallelrun.launch.host import output

        with output.guarded():
            return _route(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_OK if error.code is None else 1
    except Exception as error:
        stop_signals.raise_pending()  # an interrupted import may raise any exception
        from parallelrun.cli import errors

        return errors.report(errors.translate(error) or error, verbose)


def _route(words: list[str]) -> int:
    from parallelrun.base.version import __version__
    from parallelrun.cli import help as texts

    if words and words[0] in texts.TOOLS:
        return _tool(words[0], words[1:])
    if not words or any(word in ("-h", "--help") for word in words):
        if words and words[0] not in texts.VERBS and "=" not in words[0] and not words[0].startswith("-"):
            from parallelrun.cli import argv

            argv.read(words[:1])  # raises, with the words that are near
        if os.environ.get("RANK", "0") == "0":  # under a launcher, print it once
            verb = next((word for word in words if word in texts.VERBS), "")
            print(texts.of_verb(verb) if verb else texts.full() if words else texts.SHORT)
        return EXIT_OK
    if "--version" in words:
        print(f"parallelrun {__version__}")
        return EXIT_OK
    from parallelrun.cli import node, verbs

    code = node.run(words)
    return verbs.run(words) if code is None else code


def _tool(tool: str, words: list[str]) -> int:
    from importlib import import_module

    from parallelrun.cli import help as texts

    module, function = texts.TOOL_FUNCTIONS[tool].split(":")
    return getattr(import_module(f"parallelrun.{module}"), function)(words) or EXIT_OK


def _ended(word: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"parallelrun: {word}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
