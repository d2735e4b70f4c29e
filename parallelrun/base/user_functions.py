"""Functions of the user's that a key names: `file.py:function` or `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from parallelrun.base import user_code
from parallelrun.base.errors import ConfigError, Problem

EXAMPLES = {"model.source": "./net.py:build", "model.loss": "./net.py:loss", "dataset.source": "./data.py:build"}


def named(key: str, source: str | None) -> tuple[str, str]:
    """(file or module, function) of `key=source`. Raises ConfigError, before the user's code is imported."""
    path, colon, name = (source or "").rpartition(":")
    example = f"{key}={EXAMPLES[key]}"
    if not colon:
        value = key if source is None else f"{key}={source}:"
        raise ConfigError(Problem(f"{value} must name a function in a file or module", key, example))
    if path.endswith(".py") and not Path(path).expanduser().is_file():
        raise ConfigError(Problem(f"{key}={source}: there is no file {Path(path).expanduser().absolute()}", key))
    package = path.partition(".")[0]
    if not path.endswith(".py") and not _has_package(package):
        raise ConfigError(Problem(f"{key}={source}: No module named {package!r}", key, example))
    return path, name


def _has_package(name: str) -> bool:
    _import_from_working_folder()
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _import_from_working_folder() -> None:
    """Let modules of the working folder be imported, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def load(key: str, source: str | None) -> Callable[..., Any]:
    """Return the function that `key=source` names. Raises ConfigError with the user's lines."""
    path, name = named(key, source)
    try:
        module = _from_file(Path(path).expanduser()) if path.endswith(".py") else importlib.import_module(path)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        raise failed(f"{key}={source}", error, key) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        functions = [
            name for name, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)
        ]
        fix = " or ".join(f"{key}={path}:{close}" for close in get_close_matches(name, functions) or functions[:5])
        raise ConfigError(Problem(f"{key}={source}: {path} has no function {name!r}", key, fix))
    return function


def _from_file(path: Path) -> Any:
    """Import a file once as long as it does not change: what two keys name in it are parts of one module."""
    state = path.stat()
    return _import(path.resolve(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _import(path: Path, changed: int, size: int) -> Any:
    """Import a file under a name of its own, with its folder on the path so that it can import its neighbours."""
    name = f"parallelrun_user_{path.stem}_{sha256(os.fsencode(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def parameters_of(function: Callable[..., Any]) -> Collection[str]:
    """Return the names of a function's parameters; none of some functions that are written in C."""
    with suppress(TypeError, ValueError):
        return inspect.signature(function).parameters
    return ()


def call(key: str, source: str | None, offered: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Call the function with `arguments`, and with what is `offered` under a name of its signature.

    Raises ConfigError with the user's lines.
    """
    function = load(key, source)
    names = parameters_of(function)
    try:
        return function(**{**{name: value for name, value in offered.items() if name in names}, **arguments})
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        raise failed(f"{source} fails", error, key) from error


def failed(action: str, error: BaseException, key: str = "model.source") -> ConfigError:
    """Return the error that the user's code has raised, with its own lines in the traceback, the innermost first."""
    frames = " <- ".join(reversed(user_code.frames(error)))
    return ConfigError(Problem(f"{action}: {user_code.reason(error)}", frames or key))
