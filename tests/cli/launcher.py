"""Warm launchers for tests: `run_launcher` and `run_attached` cost forks instead of four seconds of imports a process.

One helper process (`tests.servants`) has imported torch and parallelrun (one thread, no operation); for each request it
forks a process that is a launcher from then on (or a rank that somebody else has started), in a session of its own: it
calls `start` on the tiny plan (or does as `tests.cli.attached`), with a worker of `tests.cli.workers`, and exits with
its code.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.servants import servant

PATIENCE_S = 60.0  # on a machine that others use too


@dataclass(frozen=True)
class Launched:
    """A running launcher, or attached rank. `folder` holds its pid, exit code and output; `runs` its run directory."""

    folder: Path
    world: int
    runs: Path

    @property
    def directory(self) -> Path:
        """The run directory, once it is there."""
        return wait_for(lambda: next(self.runs.glob("*/*/config.yaml"), None), f"run directory\n{self.stderr}").parent

    @property
    def pid(self) -> int:
        return int(wait_for(lambda: read(self.folder / "pid"), "launcher's pid"))

    def rank_pids(self) -> list[int]:
        """Pids of all ranks, once their workers run."""
        return [int(self.fact("started", rank)) for rank in range(self.world)]

    def fact(self, what: str, rank: int) -> str:
        """What a rank's worker has noted (`tests.cli.workers.note`), once it has."""
        return wait_for(lambda: read(self.directory / f"{what}_{rank}"), f"{what} of rank {rank}\n{self.stderr}")

    def reaches(self, step: int) -> None:
        """Wait until rank 0 is at `step`."""
        wait_for(lambda: int(read(self.directory / "at_0") or 0) >= step, f"step {step}\n{self.stderr}")

    def noticed_after(self, rank: int) -> float:
        """Seconds from a rank's last step to the end of the run."""
        began = (self.directory / f"at_{rank}").stat().st_mtime
        return (self.directory / "status.json").stat().st_mtime - began

    def wait(self) -> int:
        """The exit code; minus the signal's number if one ended the launcher."""
        return int(wait_for(lambda: read(self.folder / "code"), f"end of the launcher\n{self.stderr}"))

    @property
    def stdout(self) -> str:
        return read(self.folder / "stdout")

    @property
    def stderr(self) -> str:
        return read(self.folder / "stderr")

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.directory / "status.json").read_text())

    def log(self, rank: int) -> str:
        return read(self.directory / "logs" / f"rank_{rank}.log")


def run_launcher(
    folder: Path,
    wish: dict[str, Any] | None = None,
    *,
    overrides: dict[str, Any] | None = None,
    worker: str = "train",
    timeout_s: float = 60.0,
    method: str = "fork",
    run_root: Path | None = None,
    environ: dict[str, str] | None = None,
) -> Launched:
    """Start a launcher of 4 ranks (dp=2 tp=2), or of `overrides`, whose worker does `wish`.

    worker: a function of `tests.cli.workers`, or the path of any other.
    """
    overrides = {"dp": 2, "tp": 2} if overrides is None else overrides
    argument = {
        "overrides": overrides,
        "runs": str(folder / "runs"),
        "worker": worker if ":" in worker else f"tests.cli.workers:{worker}",
        "timeout_s": timeout_s,
        "method": method,
        "run_root": str(run_root) if run_root else None,
    }
    request(
        "tests.cli.launcher:launch", folder, argument, {"PARALLELRUN_TEST": json.dumps(wish or {}), **(environ or {})}
    )
    world = math.prod(overrides.get(axis, 1) for axis in ("dp", "tp", "pp"))
    return Launched(folder, world, folder / "runs")


def run_attached(
    folder: Path,
    wish: dict[str, Any] | None = None,
    *,
    world: int = 2,
    environ: dict[str, str] | None = None,
    **wanted: Any,
) -> list[Launched]:
    """Start `world` processes that look as if mpirun had started them; the way of `tests.cli.attached`, by rank."""
    argument = json.dumps({"overrides": {"dp": world}, "runs": str(folder / "runs"), "timeout_s": 60, **wanted})
    ranks = [Launched(folder / f"process_{rank}", world, folder / "runs") for rank in range(world)]
    for rank, one in enumerate(ranks):
        place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world), "PMIX_NAMESPACE": str(folder)}
        place |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world)}
        place |= {"PARALLELRUN_TEST": json.dumps(wish or {}), **(environ or {})}
        request("tests.cli.attached:main", one.folder, argument, place)
    return ranks


def run_stranger(folder: Path) -> Launched:
    """Start a stranger (`tests.cli.stranger`), who has attacked nothing yet when this returns."""
    request("tests.cli.stranger:main", folder, str(folder / "ready"), {})
    wait_for(lambda: read(folder / "ready"), f"stranger\n{read(folder / 'stderr')}")
    return Launched(folder, 0, folder)


def run_program(folder: Path, words: list[str], environ: dict[str, str], world: int) -> Launched:
    """The program itself, as a user calls it with `words`, in a warm process. Its runs go to `folder`/../runs."""
    runs = folder.parent / "runs"
    request("tests.cli.launcher:program", folder, [*words, f"runs={runs}"], environ)
    return Launched(folder, world, runs)


def run_torchrun(folder: Path, *words: str, **environ: str) -> Launched:
    """`torchrun --nproc-per-node 2 <words>` in a warm process. Its two ranks are started by `python`, as ever; those of
    `tests.cli.attached` are forked, and need not import torch.
    """
    request("tests.cli.launcher:torchrun", folder, ["--nproc-per-node", "2", *words], environ)
    return Launched(folder, 2, folder.parent / "runs")


def run_to_end(
    *words: str,
    cwd: Path,
    site: Path | None = None,
    limit: int | None = None,
    timeout: float = 120.0,
    function: str = "tests.cli.launcher:program_in",
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """`parallelrun <words>`, typed in `cwd`, in a warm process: a call that need not prove that the program starts.

    site: a folder of installed plug-ins. limit: the most bytes that a file may have. function: what calls the program.
    Its ranks are forked, where a test that calls `main` itself, beside threads, has each of them import torch.
    """
    call = {"words": words, "cwd": str(cwd), "site": str(site) if site else None, "limit": limit}
    with tempfile.TemporaryDirectory(prefix="parallelrun-call-") as folder:
        request(function, Path(folder), call, environ)
        code = wait_for(lambda: read(Path(folder) / "code"), f"end of {' '.join(words)}", timeout)
        output = [read(Path(folder) / name) for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(words, int(code), *output)


def request(function: str, folder: Path, argument: Any, environ: dict[str, str]) -> None:
    """Let a warm process call `function` with `argument`. `folder` gets its pid, its exit code and its output."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {"function": function, "folder": str(folder), "argument": argument, "environ": environ}
    global _current
    if _current is None:
        _current = servant("tests.cli.launcher")
    _current.sendall(f"{json.dumps(line)}\n".encode())


def wait_for(look: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until `look()` is true; its value."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if value := look():
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {patience_s:g} s for {what}")


def read(path: Path) -> str:
    """A file's text, empty while it is not there."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """False for a process that is gone or only waits to be reaped."""
    state = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
    return bool(state) and state != ["Z"]


def survivors(pids: list[int], within_s: float) -> list[int]:
    """Those of `pids` still running after `within_s` seconds; returns as soon as there are none."""
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


_current: socket.socket | None = None  # one per session: this is what makes it cheap


def main(connection: socket.socket) -> None:
    """The helper: fork a launcher per line that it is sent."""
    from parallelrun.launch.host.job import Job
    from parallelrun.launch.ranks import processes
    from parallelrun.launch.ranks import rank as ranks
    from tests.plans import tiny_config, tiny_plan

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    processes.preload(Job(tiny_config(), tiny_plan({"pp": 2}), Path(), "tests.cli.workers:train"))
    _warm_up()
    helper = os.getpid()
    for line in connection.makefile():
        if os.fork() == 0:
            ranks.leave_with_parent(helper)  # whatever a failing test leaves behind ends with the session
            _keep(json.loads(line))


def _warm_up() -> None:
    """Do once what every launcher would do again, and nobody here changes: import, compose, read the default
    dataset, hash the program's code."""
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401  (of a sweep's picture)

    from parallelrun.data import pystdlib
    from parallelrun.launch.host import directory

    pystdlib._read(Path(sysconfig.get_path("stdlib")), pystdlib.DEFAULT_MAX_BYTES)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        for words in (["plan", "strategy=ddp", "dp=2"], ["plan", "-m", "strategy=ddp", "dp=1,2"]):
            program(words)
    fingerprint, state = directory.code_fingerprint(), directory.git_state()
    directory.code_fingerprint, directory.git_state = lambda: fingerprint, lambda: state
    gc.freeze()


def _keep(request: dict[str, Any]) -> None:
    """Fork the launcher, wait for it, write down how it ended."""
    from parallelrun.launch.ranks import rank as ranks

    folder = Path(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        ranks.leave_with_parent(keeper)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.environ.update(request["environ"])
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        code = 99
        try:
            code = ranks.find_worker(request["function"])(request["argument"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _put(folder / "pid", str(pid))
    _put(folder / "code", str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def _put(path: Path, text: str) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(text)
    aside.rename(path)


def program(words: list[str]) -> int:
    """`parallelrun <words>`."""
    from parallelrun.cli.main import main

    return main(words)


def torchrun(words: list[str]) -> int:
    """`torchrun <words>`."""
    from torch.distributed import run

    if words[-2] == "tests.cli.attached":
        launch = run.elastic_launch
        run.elastic_launch = lambda config, entrypoint: launch(replace(config, start_method="fork"), _attached)
    try:
        run.main(words)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _attached(*command: str) -> None:
    """A rank that torchrun has forked."""
    from tests.cli.attached import main

    sys.exit(main(command[-1]))


def program_in(call: dict[str, Any]) -> int:
    """`parallelrun <words>` as `run_to_end` asks for it."""
    os.chdir(call["cwd"])
    if call["site"]:
        sys.path.insert(0, call["site"])
        for module in [module for name, module in sys.modules.items() if name.startswith("parallelrun.")]:
            for function in vars(module).values():  # what depends on the known strategies, models and datasets
                if hasattr(function, "cache_clear"):
                    function.cache_clear()
    if call["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (call["limit"], call["limit"]))
    return program(list(call["words"]))


def launch(wanted: dict[str, Any]) -> int:
    """What a launcher does: `start`, its errors said as the command line says them."""
    from parallelrun.cli import errors
    from parallelrun.launch.entry.start import start
    from parallelrun.launch.ranks import processes
    from tests.plans import tiny_config, tiny_plan

    processes.method_for = lambda plan: wanted["method"]
    overrides = wanted["overrides"]
    config = replace(tiny_config(overrides), runs=wanted["runs"], timeout_s=wanted["timeout_s"])
    words = [f"{key}={value}" for key, value in overrides.items()]
    root = Path(wanted["run_root"]) if wanted["run_root"] else None
    try:
        return start(config, tiny_plan(overrides), words, words, root, wanted["worker"])
    except Exception as error:
        return errors.report(error, False)
