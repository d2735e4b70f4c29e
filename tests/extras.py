"""The mark of tests that need a library of the extra `all`, which the README's test command does not install."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import pytest

Test = TypeVar("Test")


def needs(library: str) -> Callable[[Test], Test]:
    """A decorator: the test is skipped without `library`; `.ci/run` installs it and runs all tests of this mark.

    library: a module, such as `hydra_plugins.hydra_joblib_launcher`, without which joblib alone is of no use.
    """

    def mark(test: Test) -> Test:
        reason = f"{library} is not installed: pip install 'parallelrun[all]'"
        return pytest.mark.extras(pytest.mark.skipif(not _is_installed(library), reason=reason)(test))

    return mark


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
