"""`doctor`: is this machine fit to run? A table of checks, pass, warn or fail; exit 3 if a run could not work."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path

from parallelrun.cli import gpu_reduce
from parallelrun.errors import EXIT_ENVIRONMENT, EXIT_OK

_OLDEST_TORCH = (2, 11)
_TESTED_TORCH = ("2.11", "2.13")
_REDUCE_S = 30.0


@dataclass(frozen=True)
class Check:
    """One line of the table. state: pass | warn | fail."""

    name: str
    state: str
    detail: str


def main(words: list[str]) -> int:
    """`parallelrun doctor [--json]`."""
    parser = argparse.ArgumentParser("parallelrun doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(words)
    checks = examine()
    usable = all(check.state != "fail" for check in checks)
    if arguments.json:
        from parallelrun.cli.compute import print_json

        print_json({"usable": usable, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, usable)
    return EXIT_OK if usable else EXIT_ENVIRONMENT


def examine() -> list[Check]:
    """All checks, in the order of the table; one that breaks is a failed check, not a crash."""
    checks: list[Check] = []
    for check in (
        _python,
        _packages,
        _torch,
        _gpus,
        _cores,
        _memory,
        _shared_memory,
        _limits,
        _disk,
        _loopback,
        _reduce,
        _gpu_reduce,
    ):
        try:
            found = check()
        except Exception as error:
            found = Check(check.__name__.strip("_").replace("_", " "), "fail", f"{type(error).__name__}: {error}")
        checks += found if isinstance(found, list) else [found]
    return checks


def _python() -> Check:
    state = "pass" if sys.version_info >= (3, 10) else "fail"
    return Check("python", state, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Check:
    names = ("parallelrun", "hydra-core", "omegaconf", "numpy", "rich", "safetensors")
    return Check("packages", "pass", ", ".join(f"{name} {metadata.version(name)}" for name in names))


def _torch() -> list[Check]:
    import torch
    import torch.distributed as dist

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        found = Check("torch", "fail", f"{torch.__version__}; at least {oldest} is needed")
    else:
        minor = ".".join(map(str, version))
        tested = "" if minor in _TESTED_TORCH else f" (tested: {', '.join(_TESTED_TORCH)})"
        found = Check("torch", "pass", torch.__version__ + tested)
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    lacks_nccl = torch.cuda.is_available() and not nccl
    return [
        found,
        Check("gloo", "pass" if gloo else "fail", "available" if gloo else "not built into this torch"),
        Check("nccl", "warn" if lacks_nccl else "pass", _nccl_version() if nccl else "not built in; only GPUs need it"),
    ]


def _nccl_version() -> str:
    import torch

    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _gpus() -> Check:
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for CPU"
        return Check("gpus", "pass", f"none visible ({built}); runs use the CPU and gloo")
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties)
    return Check("gpus", "pass", f"{len(properties)}: {names}; CUDA {torch.version.cuda}")


def _cores() -> Check:
    from parallelrun.launch.environment import num_cores

    cores = num_cores()
    return Check("cores", "pass" if cores > 1 else "warn", f"{cores}, load {os.getloadavg()[0]:.1f}")


def _memory() -> Check:
    from parallelrun.launch.preflight import available_bytes

    available = available_bytes()
    if available is None:
        return Check("memory", "warn", "unknown")
    return Check("memory", "pass" if available > 2 * 2**30 else "warn", f"{available / 2**30:.1f} GiB available")


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("/dev/shm", "warn", "absent")
    free = shutil.disk_usage(folder).free
    hint = "" if free > 2**26 else "; with docker: --ipc=host"
    return Check("/dev/shm", "warn" if hint else "pass", f"{free / 2**20:.0f} MiB free{hint}")


def _limits() -> Check:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shown = "unlimited" if processes == resource.RLIM_INFINITY else str(processes)
    return Check("ulimit", "warn" if files < 1024 else "pass", f"open files {files}, processes {shown}")


def _disk() -> Check:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("disk", "warn", f"{folder} is not writable; give runs=<a writable folder>")
    return Check("disk", "warn" if free < 2**30 else "pass", f"{free / 2**30:.1f} GiB free in {folder}")


def _loopback() -> Check:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname(), timeout=5):
            return Check("loopback", "pass", "127.0.0.1 can be listened on and reached")


def _reduce() -> Check:
    """Two forked ranks add two numbers over gloo on the loopback interface."""
    began = time.monotonic()
    name = "all-reduce"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        import torch.distributed  # noqa: F401  # imported once, before the fork

        children = [_fork(partial(_rank, rank, listener)) for rank in range(2)]
    codes = [_wait(child, began + _REDUCE_S) for child in children]
    if codes != [0, 0]:
        return Check(name, "fail", f"two gloo ranks ended with {codes} (0, 0 expected)")
    return Check(name, "pass", f"two gloo ranks in {time.monotonic() - began:.1f} s")


def _gpu_reduce(backend: str = gpu_reduce.NCCL) -> list[Check]:
    """Each visible GPU adds a number to the others', over NCCL."""
    import torch

    if not torch.cuda.is_available():
        return []
    num_gpus = torch.cuda.device_count()
    name, each = f"{backend} all-reduce", f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
    try:
        seconds = gpu_reduce.run(num_gpus, backend)
    except gpu_reduce.Failed as error:
        return [Check(name, "fail", str(error))]
    return [Check(name, "pass", f"{each}, {gpu_reduce.NUM_ELEMENTS * 4 / 2**20:.0f} MiB in {1000 * seconds:.1f} ms")]


def _rank(rank: int, listener: socket.socket) -> bool:
    import torch
    import torch.distributed as dist

    from parallelrun.launch.environment import loopback_interface

    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    port, timeout = listener.getsockname()[1], timedelta(seconds=_REDUCE_S)
    descriptor = listener.detach() if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout, False, master_listen_fd=descriptor)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()
    return bool(value.item() == 3.0)


def _fork(body: Callable[[], bool]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = 0 if body() else 2
    finally:
        os._exit(code)


def _wait(child: int, deadline: float) -> int:
    """The child's exit code; -9 if it had to be ended."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.02)


def _print(checks: list[Check], usable: bool) -> None:
    from rich.table import Table

    from parallelrun.report.screen import open_console

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    colors = {"pass": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        table.add_row(check.name, f"[{colors[check.state]}]{check.state}[/]", check.detail)
    console = open_console()
    console.print(table)
    console.print("ready" if usable else "not usable: see the failed checks")
