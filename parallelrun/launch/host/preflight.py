"""Checks of this machine before any rank starts: compiler, GPUs, memory, cores, disk."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted, gib
from parallelrun.checkpoint.resume import keeps_last_state
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host import emulation
from parallelrun.launch.host.environment import Attached, host_cores, num_cores
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces import sample_sets
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.rank_classes import rank_classes
from parallelrun.report.records.routing_log import NUMBERS_WRITTEN
from parallelrun.training.verify.checked import checked_config, checked_plan, compared_bytes

CROWDED = 8  # ranks per core beyond which a run mostly waits
PACKED_COMPILE = (2, 12)  # the first torch whose compiler takes DocumentBounds as an argument
_ROW_BYTES = 512  # per step in metrics.jsonl: measured 300 to 450
_NUMBER_BYTES = 6  # in routing.jsonl, which has two numbers per expert, layer and step


def check(config: Config, plan: Plan, attached: Attached | None) -> list[str]:
    """Return notes for the user. Raises ConfigError if the launcher started another number of ranks than the plan has
    or `verify` cannot replay the plan, EnvironmentProblem (with numbers) if the run does not fit on this machine."""
    if config.verb == "verify":
        sample_sets.check_replay(plan)
    if attached and attached.world != plan.world:
        message = f"{attached.source} started {attached.world} ranks, the plan has {plan.world}"
        fix = f"degrees whose product is {attached.world}, or {plan.world} ranks"
        raise ConfigError(Problem(message, "world", fix, kind="arithmetic"))
    if config.compile and plan.spec.packed:
        refuse_packed_compile(version("torch"))
    compiler = os.environ.get("CXX") or "g++"  # torch's inductor generates C++ for the CPU
    if config.compile and plan.device == "cpu" and shutil.which(compiler.split()[0]) is None:
        message = f"compile=true on the CPU needs a C++ compiler, and there is no {compiler}"
        fix = "apt-get install g++, or CXX=<your compiler>"
        raise EnvironmentProblem(Problem(message, "compile", "compile=false", fix))
    if plan.device == "cuda":
        # ranks of another launcher may be on other hosts: each reports its GPU when it joins
        smallest = _check_gpus(needed=1 if attached else plan.num_workers)
        return [] if attached else check_memory(config, plan, smallest, per_rank=True)
    if attached:
        one_host = attached.master_addr in ("127.0.0.1", "localhost", "::1")
        return crowding(plan.world, host_cores()) if one_host else []
    notes = emulation.check(config, plan)
    allow_open_files(plan.world)
    return [*crowding(plan.world, num_cores()), *check_memory(config, plan, available_bytes(), per_rank=False), *notes]


def allow_open_files(num_ranks: int) -> None:
    """Let the ranks of this host, which inherit the limit, open as many files as they need.

    A rank has opened 14 and 5 for each rank of the host (its connections and the memory of the others), measured with
    2, 4 and 8 ranks. Raises EnvironmentProblem if the hard limit is lower.
    """
    needed = 14 + 5 * num_ranks
    soft, hard = (limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in
                  resource.getrlimit(resource.RLIMIT_NOFILE))  # fmt: skip
    if soft >= needed:
        return
    if hard < needed:
        message = f"each of {counted(num_ranks, 'rank')} opens {needed} files, and the limit of this shell is {hard}"
        raise EnvironmentProblem(Problem(message, "ulimit -n", command=f"ulimit -n {needed}, in a new shell"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def refuse_packed_compile(torch: str) -> None:
    """Raise ConfigError if the compiler of this version of torch cannot take the documents of a sample as an argument.

    It fails with "Unexpected type DocumentBounds"; hidden from it, the documents give wrong gradients.
    """
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    if numbers is None or tuple(map(int, numbers.groups())) >= PACKED_COMPILE:
        return
    needed = ".".join(map(str, PACKED_COMPILE))
    message = f"compile=true with dataset.pack=true needs torch {needed}, and torch {torch} is installed"
    fix = "compile=false or dataset.pack=false"
    raise ConfigError(Problem(message, "compile", fix, f"pip install 'torch>={needed}'"))


def crowding(world: int, cores: int) -> list[str]:
    """Return a note if ranks share cores."""
    if world <= cores:
        return []
    note = f"step time is no scaling measurement: {world} ranks on {counted(cores, 'core')}"
    return [note + (f" (more than {CROWDED} a core: expect it to be slow)" if world > CROWDED * cores else "")]


# -- GPUs


class Gpu(NamedTuple):
    """The GPU of one rank. identity: equal in all processes that see this GPU; empty if the process sees no GPU."""

    identity: str = ""
    num_bytes: int = 0
    num_visible: int = 0


def gpu_index(local_rank: int, num_visible: int) -> int:
    """Return the index of a rank's GPU among those that its process sees.

    torchrun shows every process all GPUs of the host. `srun --gpus-per-task=1` shows each process only its own GPUs,
    numbered from 0.
    """
    return local_rank % max(num_visible, 1)  # without any GPU, torch raises a clear error


def gpu_of_rank(local_rank: int) -> Gpu:
    """Return the GPU that the rank of this process would use."""
    import torch

    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_visible:
        return Gpu()
    properties = torch.cuda.get_device_properties(gpu_index(local_rank, num_visible))
    return Gpu(str(properties.uuid), properties.total_memory, num_visible)


def _check_gpus(needed: int) -> int:
    """Return the memory of the smallest visible GPU in bytes. Raises EnvironmentProblem if there are too few GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [item.strip() for item in (visible or "").split(",") if item.strip()]
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if len(set(listed)) < len(listed):
        raise EnvironmentProblem(Problem(f"CUDA_VISIBLE_DEVICES={visible!r} names a GPU twice", "CUDA_VISIBLE_DEVICES"))
    if "torch" not in sys.modules and version("torch").endswith("+cpu"):
        num_gpus, is_cuda = 0, False  # known without importing torch, which takes a second
    else:
        import torch

        num_gpus, is_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0, bool(torch.version.cuda)
    if num_gpus == 0:
        built = "" if is_cuda else f"; torch {version('torch')} is built without CUDA, so without NCCL"
        raise EnvironmentProblem(Problem(f"device=cuda, and 0 GPUs are visible{shown}{built}", "device", "device=cpu"))
    if num_gpus < needed:
        message = f"the plan puts {needed} ranks on this host, one GPU each, and {num_gpus} are visible{shown}"
        fix = f"degrees whose product is at most {num_gpus}, or device=cpu"
        raise EnvironmentProblem(Problem(message, "world", fix))
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus))


# -- memory


def available_bytes() -> int | None:
    """Return the memory that a new process can get, by the kernel and the container's limit; None if unknown."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    if match is None:
        return None
    available = int(match.group(1)) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        return available


def check_memory(config: Config, plan: Plan, available: int | None, per_rank: bool) -> list[str]:
    """Return warnings. Raises EnvironmentProblem if weights, gradients and optimizer state do not fit.

    available: bytes of each worker's GPU (per_rank), else of the host for all ranks; None if unknown.
    """
    if available is None:
        return []
    compared = 0  # bytes on the host of rank 0
    if config.verb == "verify":
        config = checked_config(config)
        plan = checked_plan(config, plan)
        compared = compared_bytes(config, plan)
    rows = [row for row in rank_classes(plan) if not per_rank or plan.role(row[0]) == "worker"]
    peaks = [(prediction.memory(plan, rank), 1 if per_rank else count) for rank, count in rows]
    combine = max if per_rank else sum
    state = combine(count * (memory.weights + memory.gradients + memory.optimizer) for memory, count in peaks)
    total = combine(count * memory.total for memory, count in peaks)
    holder = "a rank needs" if per_rank else f"{counted(plan.world, 'rank')} on this host need"
    kinds = "for weights, gradients and optimizer"
    fix = "a smaller model, or more tp, pp or strategy.data.kind=fsdp over more devices"
    if compared:
        fix = "shrink=true, a smaller model, verify.steps=1 or verify.precision=fp32"
        if not per_rank:
            state, total = state + compared, total + compared
            kinds += f", {gib(compared)} of it to compare them with one device"
    if state > available:  # certain, because activations come on top
        message = f"{holder} {gib(state)} {kinds}, and {gib(available)} are available"
        command = "parallelrun plan ... (shows the memory of each rank by kind)"
        raise EnvironmentProblem(Problem(message, "memory", fix, command))
    host = available_bytes() if per_rank else None
    if host is not None and compared > host:
        message = f"verify needs {gib(compared)} on the host of rank 0 for the tensors that it compares"
        raise EnvironmentProblem(Problem(f"{message}, and {gib(host)} are available", "memory", fix))
    if total > available:
        return [f"memory may be too small: {holder} about {gib(total)}, and {gib(available)} are available"]
    return []


# -- disk


class DiskNeed(NamedTuple):
    """The most bytes that a run has on the disk. num_checkpoints: those kept and the one that is being written."""

    checkpoint_bytes: int
    num_checkpoints: int
    record_bytes: int

    @property
    def total(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes + self.record_bytes


def disk_need(config: Config, plan: Plan) -> DiskNeed:
    """Return the disk space that a run of `plan` needs."""
    every, steps = config.checkpoint.every, config.steps
    saves = steps // every if every else 0
    saves += keeps_last_state(config) and (not every or steps % every > 0)
    num_routers = sum(layer.layer_role == "router" for layer in plan.spec.layers())
    loads = min(NUMBERS_WRITTEN, 2 * steps * num_routers * config.model.experts)
    return DiskNeed(
        checkpoint_bytes=prediction.checkpoint_bytes(plan),
        num_checkpoints=min(saves, max(1, config.checkpoint.keep) + 1),
        record_bytes=steps * _ROW_BYTES + int(loads) * _NUMBER_BYTES,
    )


def disk_shortage(config: Config, plan: Plan, folder: Path) -> list[str]:
    """Return a note if the disk of `folder`, which need not exist yet, has less room than the run will write."""
    if config.verb != "run":
        return []
    need, free = disk_need(config, plan), free_bytes(folder)
    if need.total <= free:
        return []
    retained = f" ({need.num_checkpoints - 1} kept while the next is written)" if need.num_checkpoints > 1 else ""
    checkpoints = f"{need.num_checkpoints} checkpoints of {gib(need.checkpoint_bytes)}{retained} and "
    parts = f"{checkpoints if need.num_checkpoints else ''}{gib(need.record_bytes)} of records"
    return [
        f"the disk may become full: the run needs {gib(need.total)} in {folder} ({parts}), and {gib(free)} are "
        "free; try checkpoint.keep=1 or runs=<a folder on a larger disk>"
    ]


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, or of the nearest parent folder that exists."""
    folder = folder.expanduser().absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
