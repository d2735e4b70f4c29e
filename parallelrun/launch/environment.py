"""Who started this process: nobody (we launch), or torchrun, srun, mpirun, or who has set TF_CONFIG (we attach).

Torch-free. Sources: torch.distributed.run's documented variables; Slurm's srun manual (OUTPUT ENVIRONMENT VARIABLES:
unlike SLURM_NTASKS, SLURM_STEP_NUM_TASKS is not set in a bare sbatch or salloc shell); Open MPI's mpirun manual;
MPICH's PMI.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from parallelrun.errors import EnvironmentProblem, Problem

LISTENER = "PARALLELRUN_LISTENER"  # the descriptor of a listening socket that rank 0 inherits for the rendezvous
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_ADDR|MASTER_PORT"
    r"|TF_CONFIG|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|SLURM_\w+|OMPI_\w+|PMI_\w+|PMIX_\w+|PMI|MPI_\w+)$"
)
_OF_ONE_HOST = re.compile(
    r"^(HOME|USER|LOGNAME|SHELL|PWD|TERM|COLORTERM|COLUMNS|LINES|TMPDIR|TMP|TEMP|XDG_\w+|\w+_VISIBLE_DEVICES)$"
)
_FOR_RANKS = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|COLORTERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|CI|TZ|LANG|LANGUAGE|LC_\w+"
    r"|TMPDIR|TMP|TEMP|XDG_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|LD_\w+|DYLD_\w+|CUDA\w*|NVIDIA_\w+|CUBLAS\w*|NCCL_\w+"
    r"|GLOO_\w+|UCX_\w+|FI_\w+|TORCH\w*|PYTORCH_\w+|TRITON_\w+|OMP_\w+|MKL_\w+|KMP_\w+|GOMP_\w+|OPENBLAS_\w+"
    r"|NUMEXPR_\w+|HF_\w+|HUGGINGFACE_\w+|TRANSFORMERS_\w+|WANDB_\w+|MLFLOW_\w+|PARALLELRUN_\w+|COVERAGE_\w+"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|\w+_proxy|\w+_PROXY|CC|CXX|MALLOC_\w+|ASAN_\w+)$"
)


@dataclass(frozen=True)
class Attached:
    """This process's place in a world that somebody else started.

    master_port: 0 when all ranks share a host and rank 0 picks a port itself, announced in a private file named by
    `job`. source: torchrun | srun | mpirun | TF_CONFIG. job: one text for all ranks of the job and no other job on
    these hosts.
    """

    rank: int
    world: int
    local_rank: int
    master_addr: str
    master_port: int
    source: str
    job: str


def detect(environ: Mapping[str, str]) -> Attached | None:
    """Where `environ` places this process; None when nobody started it as a rank.

    Raises EnvironmentProblem naming the variables that are missing, unreadable or contradict each other.
    """
    torchrun = [name for name in TORCHRUN if environ.get(name)]
    if "RANK" in torchrun or "WORLD_SIZE" in torchrun or environ.get("TORCHELASTIC_RUN_ID"):
        if len(torchrun) < len(TORCHRUN):
            _refuse_partial(environ, torchrun)
        return _checked(_torchrun(environ), environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    if environ.get("TF_CONFIG") and (task := _tf_config(environ)):
        return task
    if environ.get("SLURM_PROCID") and _number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return _checked(_srun(environ), environ, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
    if environ.get("OMPI_COMM_WORLD_RANK") or environ.get("OMPI_COMM_WORLD_SIZE"):
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        return _checked(_mpirun(environ, *names, "OMPI_COMM_WORLD_LOCAL_SIZE", job), environ, names)
    if environ.get("PMI_RANK") or environ.get("PMI_SIZE"):
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
        return _checked(_mpirun(environ, *names, "MPI_LOCALNRANKS", None), environ, names)
    return None


def for_rank(environ: Mapping[str, str], rank: int, world: int, threads: int) -> dict[str, str]:
    """The variables a rank of our own launcher gets: an allow-list of `environ` and its place. No master address: the
    store is handed over as an open socket, and nothing else may connect by accident."""
    kept = {k: v for k, v in environ.items() if _FOR_RANKS.match(k) and not _OF_LAUNCHERS.match(k)}
    kept.setdefault("OMP_NUM_THREADS", str(threads))
    kept.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    kept.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    return kept


def for_other_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts get from the launcher: those for ranks that are not about this host."""
    return {
        name: value
        for name, value in environ.items()
        if _FOR_RANKS.match(name) and not _OF_LAUNCHERS.match(name) and not _OF_ONE_HOST.match(name)
    }


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what another launcher has said about a rank's place."""
    return {name: value for name, value in environ.items() if not _OF_LAUNCHERS.match(name)}


def loopback_interface() -> str:
    """The interface gloo is pinned to when all ranks share this host."""
    return "lo0" if os.uname().sysname == "Darwin" else "lo"


def num_cores() -> int:
    """Cores this process may use: its affinity, cut by a container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(bound, host_cores())


def host_cores() -> int:
    """Cores of this host, whatever this process is bound to (mpirun binds each rank): cut by cgroup v2's `cpu.max`."""
    cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def threads_per_rank(environ: Mapping[str, str], local_ranks: int) -> int:
    """Compute threads of one of `local_ranks` ranks on this host; the user's OMP_NUM_THREADS wins."""
    given = environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, num_cores() // local_ranks)


def _torchrun(environ: Mapping[str, str]) -> Attached:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    for name, ours in (("SLURM_PROCID", rank), ("OMPI_COMM_WORLD_RANK", rank)):
        # srun or mpirun may start one torchrun per host: then only torchrun's variables count
        if environ.get(name) and not environ.get("TORCHELASTIC_RUN_ID") and _number(environ, name) != ours:
            raise _problem(f"RANK={rank} contradicts {name}={environ[name]}", "RANK", f"unset {' '.join(TORCHRUN)}")
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Attached(
        rank, world, _number(environ, "LOCAL_RANK", str(rank)), environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT"), "torchrun", f"{environ.get('TORCHELASTIC_RUN_ID', 'env')}-{attempt}",
    )  # fmt: skip


def _tf_config(environ: Mapping[str, str]) -> Attached | None:
    """A task of a TensorFlow cluster. One that has no other tasks is nobody's rank."""
    from parallelrun.launch import tf_config

    found = tf_config.read(environ)
    if found is None or found.rank is None or found.spec.world == 1:
        return None
    addresses = " ".join(address for _, _, address in found.spec.tasks)
    return Attached(found.rank, found.spec.world, found.local_rank, *found.address, tf_config.NAME, addresses)


def _srun(environ: Mapping[str, str]) -> Attached:
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    one_host = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "")) == "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else first_host(nodes))
    if not address:
        raise _problem("under srun on several hosts neither SLURM_STEP_NODELIST nor MASTER_ADDR is set", "MASTER_ADDR")
    reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
    derived = 0 if one_host else 20000 + zlib.crc32(job.encode()) % 10000
    port = environ.get("MASTER_PORT") or (reserved.group() if reserved else str(derived))
    return Attached(
        _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS"),
        _number(environ, "SLURM_LOCALID", "0"), address, _number({"MASTER_PORT": port}, "MASTER_PORT"), "srun", job,
    )  # fmt: skip


def _mpirun(
    environ: Mapping[str, str], rank: str, world: str, local_rank: str, local_world: str, job: str | None
) -> Attached:
    place = _number(environ, rank), _number(environ, world), _number(environ, local_rank, environ.get(rank))
    one_host = _number(environ, local_world, str(place[1])) == place[1]
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else "")
    port = _number(environ, "MASTER_PORT", "0")
    if not address or not (port or one_host):
        raise _problem(
            f"mpirun started {place[1]} ranks on several hosts, and MASTER_ADDR or MASTER_PORT is not set",
            "MASTER_ADDR", "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        )  # fmt: skip
    # without a job name, the common parent process names the job
    return Attached(*place, address, port, "mpirun", job or f"parent-{os.getppid()}")


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[003-005,9],x1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _checked(place: Attached, environ: Mapping[str, str], names: tuple[str, ...]) -> Attached:
    shown = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
    if not 0 <= place.rank < place.world:
        raise _problem(f"{shown}: the rank must be below the world size {place.world}", names[0])
    if not 0 <= place.local_rank < place.world:
        raise _problem(f"{shown}: the local rank must be below the world size {place.world}", names[2])
    if not 0 <= place.master_port < 65536 or (place.master_port == 0 and place.source == "torchrun"):
        raise _problem(f"MASTER_PORT={place.master_port} is not a port (1 to 65535)", "MASTER_PORT")
    return place


def _refuse_partial(environ: Mapping[str, str], present: list[str]) -> None:
    shown = ", ".join(f"{name}={environ[name]}" for name in (*present, "TORCHELASTIC_RUN_ID") if environ.get(name))
    missing = ", ".join(name for name in TORCHRUN if name not in present)
    raise _problem(
        f"{shown} is set, but {missing} is not: left over from another job, or not all passed on",
        present[0] if present else "TORCHELASTIC_RUN_ID",
        f"unset {' '.join(TORCHRUN)} TORCHELASTIC_RUN_ID",
    )


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name) or default
    if text is None or not re.fullmatch(r"-?\d{1,9}", text):
        what = f"{name} is not set" if text is None else f"{name}={text} is not a whole number"
        raise _problem(what, name, f"unset {name}")
    return int(text)


def _problem(what: str, where: str, command: str = "") -> EnvironmentProblem:
    return EnvironmentProblem(Problem(what, where=where, command=command))
