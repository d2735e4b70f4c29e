"""Fixtures of the whole suite, and in which order two workers share it.

Helpers are imported by name: `from tests.pool import run_ranks`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["PARALLELRUN_COLUMNS"] = "10000"  # texts are found in outputs however long their lines would be
os.environ["PARALLELRUN_CONFIG"] = "/proc/none"  # no clusters of whoever runs the tests, and nobody can make one

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import servants
from tests.pool import run_ranks as _run_ranks

# A matrix whose cells share nothing comes last, cell by cell: it keeps every worker busy to the end, where files as a
# whole would leave one of them alone with the last one.
CELL_BY_CELL = ("tests/ranks/test_grid_parity.py", "tests/ranks/test_mutants.py", "tests/ranks/test_parity.py")

# New objects that may wait for the garbage collector: with Python's 700, unit tests spend a fifth of their time on it,
# with a million 7 %.
MOST_GARBAGE = 10_000_000


@pytest.fixture
def run_ranks():
    """`run_ranks(world, function, *args, timeout=60)` of `tests.pool`: real gloo ranks, results by rank."""
    return _run_ranks


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal command lines are composed by Hydra once (`tests.compositions`)."""
    from tests.compositions import keep

    keep(monkeypatch)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--matrix=full`: everything that CONTRIBUTING.md lists, instead of the choice of each run."""
    parser.addoption("--matrix", choices=("chosen", "full"), default="chosen", help="cells of parity matrices to run")


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules are imported: `tests.matrix` reads it, in this process and in those that it starts."""
    os.environ["PARALLELRUN_FULL_MATRIX"] = str(int(config.getoption("matrix") == "full"))
    # A shell's background job ignores Ctrl-C, and so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of processes import the program: without compiled files, each compiles it again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_sessionstart(session: pytest.Session) -> None:
    """A worker keeps to itself what nobody reads: that a test begins, and that it was set up and torn down well."""
    options = session.config.option
    if not hasattr(session.config, "workerinput") or options.durations or options.xmlpath or options.verbose > 0:
        return
    (worker,) = [one for one in session.config.pluginmanager.get_plugins() if type(one).__name__ == "WorkerInteractor"]
    send = worker.sendevent

    def send_what_is_read(name: str, **values: Any) -> None:
        report = values.get("data", {}) if name == "testreport" else {}
        is_plain = report.get("outcome") == "passed" and report["when"] != "call" and not report["sections"]
        if name != "logstart" and not is_plain:
            send(name, **values)

    worker.sendevent = send_what_is_read


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """No garbage is collected while test modules import torch, and what they have imported is never visited again."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()
    gc.set_threshold(MOST_GARBAGE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """In a run of all tests, workers share their imports."""
    if config.args_source is config.ArgsSource.TESTPATHS:
        from tests import forked_workers

        forked_workers.start(config.rootpath, specs)


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Processes that tests start for themselves are copies of this one, before it runs the first (`tests.servants`)."""
    if session.items and not session.config.option.collectonly:
        from tests.compositions import keep_merged

        keep_merged()
        servants.fork_now()
    yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which files are handed out to workers; without workers it stays as it was asked for.

    The files of each folder are spread over the whole run: those of `tests/cli`, which wait for processes, then stand
    beside others, which compute, and two workers seldom wait at the same time.
    """
    if not hasattr(config, "workerinput"):
        return
    by_folder: dict[str, list[Path]] = {}
    for file in dict.fromkeys(item.path for item in items):
        by_folder.setdefault(_folder(config, file), []).append(file)
    shares = {file: at / len(files) for files in by_folder.values() for at, file in enumerate(files)}
    items.sort(key=lambda item: (item.nodeid.startswith(CELL_BY_CELL), shares[item.path]))


def _folder(config: pytest.Config, file: Path) -> str:
    """cli, ranks, unit, ..."""
    return file.relative_to(config.rootpath).parts[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, except that the cells of `CELL_BY_CELL` are handed out one by one, and in our order."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(CELL_BY_CELL) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
