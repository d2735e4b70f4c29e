"""What this machine must have before a process is started: GPUs, memory, cores."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.launch.environment import Attached, host_cores, num_cores
from parallelrun.plan.structure import Memory, Plan
from parallelrun.wording import gib

CROWDED = 8  # ranks per core beyond which a run is mostly waiting


def check(config: Config, plan: Plan, attached: Attached | None) -> list[str]:
    """Sentences the user should read before the run. Raises ConfigError when the launcher's world is not the plan's,
    EnvironmentProblem (with numbers) when this machine cannot hold the run."""
    if attached and attached.world != plan.world:
        raise ConfigError(
            Problem(
                f"{attached.source} started {attached.world} ranks, the plan has {plan.world}",
                where="world",
                suggestion=f"degrees whose product is {attached.world}, or {plan.world} ranks",
                kind="arithmetic",
            )
        )
    _check_compiler(config, plan)
    if attached:  # its ranks may be on other hosts: each tells of its GPU when it joins
        if plan.device == "cuda":
            _check_gpus(needed=1)
        on_this_host = plan.device == "cpu" and attached.master_addr in ("127.0.0.1", "localhost", "::1")
        return crowding(plan.world, host_cores()) if on_this_host else []
    if plan.device == "cuda":
        _check_gpus(plan.num_workers)
        return check_gpu_memory(plan, gpu_bytes())
    return [*crowding(plan.world, num_cores()), *_check_memory(plan, available_bytes(), each=False)]


def check_gpu_memory(plan: Plan, available: int) -> list[str]:
    """Sentences of warning. Raises EnvironmentProblem when a rank's state does not fit `available` bytes of a GPU."""
    return _check_memory(plan, available, each=True)


def crowding(world: int, cores: int) -> list[str]:
    """Ranks that share cores are said."""
    if world <= cores:
        return []
    note = f"step time is no scaling measurement: {world} ranks on {cores} core{'s' * (cores > 1)}"
    return [note + (f" (more than {CROWDED} a core: expect it to be slow)" if world > CROWDED * cores else "")]


def _check_compiler(config: Config, plan: Plan) -> None:
    """compile=true makes C++ on the CPU, as torch's inductor does: by CXX, or g++."""
    compiler = os.environ.get("CXX") or "g++"
    if config.compile and plan.device == "cpu" and shutil.which(compiler.split()[0]) is None:
        what = f"compile=true on the CPU needs a C++ compiler, and there is no {compiler}"
        raise EnvironmentProblem(
            Problem(what, "compile", "compile=false", "apt-get install g++, or CXX=<your compiler>")
        )


def _check_gpus(needed: int) -> None:
    """device=cuda needs a GPU for each local rank."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [item.strip() for item in visible.split(",") if item.strip()] if visible is not None else []
    said = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if len(set(listed)) < len(listed):
        raise EnvironmentProblem(Problem(f"CUDA_VISIBLE_DEVICES={visible!r} names a GPU twice", "CUDA_VISIBLE_DEVICES"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        built = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA, so without NCCL"
        raise EnvironmentProblem(
            Problem(f"device=cuda, and 0 GPUs are visible{said}{built}", "device", "device=cpu")
        )  # fmt: skip
    if found < needed:
        raise EnvironmentProblem(
            Problem(
                f"the plan puts {needed} ranks on this host, one GPU each, and {found} are visible{said}",
                where="world",
                suggestion=f"degrees whose product is at most {found}, or device=cpu",
            )
        )


def _check_memory(plan: Plan, available: int | None, each: bool) -> list[str]:
    """each: `available` is per rank (GPUs), else for all ranks together (one host's memory)."""
    if available is None:
        return []
    from parallelrun.plan import prediction

    classes = prediction.rank_classes(plan)
    on_devices = [(rank, count) for rank, count in classes if not each or plan.role(rank) == "worker"]
    rows = [(prediction.memory(plan, rank), count) for rank, count in on_devices]
    state = _sum_or_max([(_state_bytes(memory), count) for memory, count in rows], each)
    total = _sum_or_max([(memory.total, count) for memory, count in rows], each)
    holder = "a rank needs" if each else f"{plan.world} rank{'s' * (plan.world > 1)} on this host need"
    if state > available:
        # certain, whatever the activations are
        raise EnvironmentProblem(
            Problem(
                f"{holder} {gib(state)} for weights, gradients and optimizer, and {gib(available)} are available",
                where="memory",
                suggestion="a smaller model, or more tp, pp or strategy.data.kind=fsdp over more devices",
                command="parallelrun plan ... (memory by rank and by what holds it)",
            )
        )
    if total > available:
        return [f"memory may not do: {holder} about {gib(total)}, and {gib(available)} are available"]
    return []


def _state_bytes(memory: Memory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def _sum_or_max(values: list[tuple[int, int]], each: bool) -> int:
    return max(value for value, _ in values) if each else sum(value * count for value, count in values)


def gpu_bytes() -> int:
    """Memory of the smallest visible GPU, in bytes."""
    import torch

    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def available_bytes() -> int | None:
    """Memory a new process of this host can get: the kernel's estimate, cut by a container's limit. None: unknown."""
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
