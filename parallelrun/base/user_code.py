"""The part of a traceback that is in the user's own files."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from parallelrun.base.errors import cause_chain

MOST_FRAMES = 6
_BENEATH = ("distributed", "launch")  # packages of ours that say little of where a rank is


def frames(error: BaseException) -> list[str]:
    """Return the frames of `error` in the user's files, outermost first: `net.py:12 in forward: return self.q(x)`."""
    shown = []
    for link in reversed(cause_chain(error)):
        if isinstance(link, SyntaxError) and link.filename and _is_users(link.filename):
            shown.append(_shown(link.filename, link.lineno or 0, "", link.text or ""))
            break
        own = [frame for frame in traceback.extract_tb(link.__traceback__) if _is_users(frame.filename)]
        if own:
            shown = [_shown(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in own]
            break
    return shown if len(shown) <= MOST_FRAMES else [*shown[:2], "...", *shown[3 - MOST_FRAMES :]]


def reason(error: BaseException) -> str:
    """What `error` says, and what its first cause says, with the line that raised it, unless that is a user's:
    libraries such as transformers raise errors of their own that hide why an import fails."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    first = seen[-1]
    said = _said(error)
    if str(first) in said:
        return said
    frames = traceback.extract_tb(first.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith("<") and "importlib" not in frame.filename]
    is_shown = not places or _is_users(places[-1].filename)
    place = "" if is_shown else f" ({places[-1].filename}:{places[-1].lineno}: {places[-1].line})"
    return f"{said.rstrip(': ')}, because of {_said(first)}{place}"


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def absence(package: str, error: ImportError) -> str:
    """`the package NAME, which is not installed`, or why importing it fails."""
    if getattr(error, "name", None) == package and isinstance(error, ModuleNotFoundError):
        return f"the package {package}, which is not installed"
    return f"the package {package}, which cannot be imported: {reason(error)}"


def of_stack(frames: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    """Return the frames of a stack in the user's files and in ours, innermost first, without those that communicate.

    frames: (file, line, function), innermost first. If none is left, they are the innermost ones of any file.
    """
    shown = [(file, line, name) for file, line, name in frames]
    own = [frame for frame in shown if _is_telling(frame[0])] or shown
    return tuple(_shown(file, line, name, linecache.getline(file, line)) for file, line, name in own[:4])


def _is_telling(file: str) -> bool:
    here = Path(__file__).resolve().parents[1]
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    if any(path.startswith(f"{folder}{os.sep}") for folder in (here, here.parent / "strategies")):
        return Path(path).relative_to(here.parent).parts[1] not in _BENEATH
    return _is_users(file)


def _shown(file: str, line: int, function: str, text: str) -> str:
    path = os.path.relpath(file)
    name = file if path.startswith("..") else path
    return f"{name}:{line}{f' in {function}' if function else ''}: {text.strip()}".rstrip(": ")


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    return not any(path.startswith(folder + os.sep) for folder in _others())


@lru_cache(maxsize=1)
def _others() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages and of parallelrun."""
    here = Path(__file__).resolve().parents[1]
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    installed = {os.path.realpath(path) for path in paths}
    # a virtual environment may also use packages of another one
    shared = {os.path.realpath(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    return (str(here), str(here.parent / "strategies"), *sorted(installed | shared))
