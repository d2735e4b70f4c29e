"""`doctor`: check whether this machine can run. Prints a table of checks; exit 3 if one failed.

The last checks start ranks as a run starts them, which sum a tensor over gloo, through shared memory, and over NCCL if
there are GPUs.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_ENVIRONMENT, EXIT_OK, EnvironmentProblem
from parallelrun.base.wording import counted
from parallelrun.cli.json_output import print_json, screen_on_stderr
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host.environment import num_cores
from parallelrun.launch.host.preflight import available_bytes, free_bytes
from parallelrun.launch.ranks.task import run_task, task_root
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve

_OLDEST_TORCH = (2, 11)
_TESTED_TORCH = ("2.11", "2.13")
NCCL, GLOO, SHM = "nccl", "gloo", "shm"  # values of the key `backend`, but for the first
NUM_ELEMENTS = 2**24  # of the sum on GPUs: 64 MiB of fp32, large enough for the time to show the bandwidth
ALL_REDUCE_TIMEOUT_S = 90.0
_COLORS = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the table. state: pass | warn | fail."""

    name: str
    state: str
    detail: str


def main(words: list[str]) -> int:
    """`parallelrun doctor [--json]`."""
    parser = argparse.ArgumentParser("parallelrun doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(words)
    with screen_on_stderr():  # the ranks of the all-reduce may print to stdout (NCCL_DEBUG=INFO)
        checks = examine()
    usable = all(check.state != "fail" for check in checks)
    if arguments.json:
        print_json({"usable": usable, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, usable)
    return EXIT_OK if usable else EXIT_ENVIRONMENT


def examine() -> list[DoctorCheck]:
    """All checks, in the order of the table. An exception in one of them makes it fail."""
    checks: list[DoctorCheck] = []
    for check in _CHECKS:
        try:
            result = check()
        except Exception as error:
            result = DoctorCheck(
                check.__name__.strip("_").replace("_", " "), "fail", f"{type(error).__name__}: {error}"
            )
        checks += result if isinstance(result, list) else [result]
    return checks


def _python() -> DoctorCheck:
    state = "pass" if sys.version_info >= (3, 10) else "fail"
    return DoctorCheck("python", state, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> DoctorCheck:
    names = ("parallelrun", "hydra-core", "omegaconf", "numpy", "rich", "safetensors")
    return DoctorCheck("packages", "pass", ", ".join(f"{name} {metadata.version(name)}" for name in names))


def _torch() -> list[DoctorCheck]:
    import torch
    import torch.distributed as dist

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    state, hint = "pass", ""
    if version < _OLDEST_TORCH:
        state, hint = "fail", f"; at least {'.'.join(map(str, _OLDEST_TORCH))} is needed"
    elif ".".join(map(str, version)) not in _TESTED_TORCH:
        hint = f" (tested: {', '.join(_TESTED_TORCH)})"
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = "not built in; only GPUs need it"
    if has_nccl := dist.is_available() and dist.is_nccl_available():
        number = torch.cuda.nccl.version()
        nccl = ".".join(map(str, number)) if isinstance(number, tuple) else str(number)
    return [
        DoctorCheck("torch", state, f"{torch.__version__}{hint}"),
        DoctorCheck("gloo", "pass" if gloo else "fail", "available" if gloo else "not built into this torch"),
        DoctorCheck("nccl", "warn" if torch.cuda.is_available() and not has_nccl else "pass", nccl),
    ]


def _gpus() -> DoctorCheck:
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for CPU"
        return DoctorCheck("gpus", "pass", f"none visible ({built}); runs use the CPU and gloo")
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties)
    return DoctorCheck("gpus", "pass", f"{len(properties)}: {names}; CUDA {torch.version.cuda}")


def _cores() -> DoctorCheck:
    cores = num_cores()
    return DoctorCheck("cores", "pass" if cores > 1 else "warn", f"{cores}, load {os.getloadavg()[0]:.1f}")


def _memory() -> DoctorCheck:
    available = available_bytes()
    if available is None:
        return DoctorCheck("memory", "warn", "unknown")
    return DoctorCheck("memory", "pass" if available > 2 * 2**30 else "warn", f"{available / 2**30:.1f} GiB available")


def _shared_memory() -> DoctorCheck:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return DoctorCheck("/dev/shm", "warn", "absent")
    free = free_bytes(folder)
    hint = "" if free > 2**26 else "; with docker: --ipc=host"
    return DoctorCheck("/dev/shm", "warn" if hint else "pass", f"{free / 2**20:.0f} MiB free{hint}")


def _limits() -> DoctorCheck:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shown = "unlimited" if processes == resource.RLIM_INFINITY else str(processes)
    return DoctorCheck("ulimit", "warn" if files < 1024 else "pass", f"open files {files}, processes {shown}")


def _disk() -> DoctorCheck:
    folder = Path.cwd()
    free = free_bytes(folder)
    if not os.access(folder, os.W_OK):
        return DoctorCheck("disk", "warn", f"{folder} is not writable; set runs=<a writable folder>")
    return DoctorCheck("disk", "warn" if free < 2**30 else "pass", f"{free / 2**30:.1f} GiB free in {folder}")


def _gloo() -> DoctorCheck:
    """Two processes add a number over gloo on the loopback interface."""
    return _sum(2, GLOO, "all-reduce", "two gloo ranks in {wall:.1f} s", "two gloo ranks: ")


def _shared_memory_of_ranks() -> DoctorCheck:
    """Two processes add a number through each other's memory: memfd, pidfd and /proc/<pid>/fd work."""
    text = "two ranks map each other's memory, in {wall:.1f} s; CPU runs use it"
    check = _sum(2, SHM, "shared memory", text, "impossible, so CPU ranks use gloo: ")
    return replace(check, state="warn") if check.state == "fail" else check


def _gpu_sum(backend: str = NCCL) -> list[DoctorCheck]:
    """One process per visible GPU adds a tensor over NCCL."""
    import torch

    if not torch.cuda.is_available():
        return []
    num_gpus, size = torch.cuda.device_count(), NUM_ELEMENTS * 4 / 2**20
    text = f"{counted(num_gpus, 'GPU')}, {size:.0f} MiB in {{sum:.1f}} ms"
    return [_sum(num_gpus, backend, f"{backend} all-reduce", text)]


def _sum(num_ranks: int, backend: str, name: str, text: str, failed: str = "") -> DoctorCheck:
    """The check that ranks can sum. text: of success, with the seconds in all (wall) and the ms of one sum (sum)."""
    began = time.monotonic()
    try:
        seconds = all_reduce(num_ranks, backend)
    except EnvironmentProblem as error:
        return DoctorCheck(name, "fail", f"{failed}{error}")
    return DoctorCheck(name, "pass", text.format(wall=time.monotonic() - began, sum=1000 * seconds))


def all_reduce(num_ranks: int, backend: str) -> float:
    """Sum a tensor over `num_ranks` processes; the seconds of one sum. Raises EnvironmentProblem.

    backend: nccl on GPUs, else gloo or shm.
    """
    device, of_cpus = ("cuda", "auto") if backend == NCCL else ("cpu", backend)
    config = replace(Config(), dp=num_ranks, global_batch=num_ranks, device=device, backend=of_cpus,
                     timeout_s=ALL_REDUCE_TIMEOUT_S)  # fmt: skip
    plan = resolve(config)
    with task_root("doctor") as root:
        folder = run_task(root, config, plan, f"{__name__}:sum_twice")
        return max(float(file.read_text()) for file in folder.glob("seconds_*"))


def sum_twice(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The worker of a rank: sum twice (the first sum opens the connections), check every element, note the seconds."""
    import torch
    import torch.distributed as dist

    num_ranks, on_gpu = context.world, context.device.type == "cuda"
    if num_ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(NCCL if on_gpu else GLOO, store=store, rank=0, world_size=1)
    for _ in range(2):
        values = torch.full((NUM_ELEMENTS if on_gpu else 1,), context.rank + 1.0, device=context.device)
        began = time.monotonic()
        dist.all_reduce(values)
        smallest, largest = values.min().item(), values.max().item()  # waits for the sum
        seconds = time.monotonic() - began
    expected = num_ranks * (num_ranks + 1) / 2
    if (smallest, largest) != (expected, expected):
        raise ValueError(f"the sum has elements from {smallest:g} to {largest:g} instead of {expected:g}")
    (context.directory / f"seconds_{context.rank}").write_text(str(seconds))
    return EXIT_OK


_CHECKS = (
    _python, _packages, _torch, _gpus, _cores, _memory, _shared_memory, _limits, _disk, _gloo, _shared_memory_of_ranks,
    _gpu_sum,
)  # fmt: skip


def _print(checks: list[DoctorCheck], usable: bool) -> None:
    from rich.table import Table

    from parallelrun.report.screen import open_console

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        table.add_row(check.name, f"[{_COLORS[check.state]}]{check.state}[/]", check.detail)
    console = open_console()
    console.print(table)
    console.print("ready" if usable else "not usable: see the failed checks")
