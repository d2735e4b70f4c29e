"""The variables that tell how this process was started: directly, or as a rank by torchrun, srun, mpirun, TF_CONFIG.

Sources: the documentation of torch.distributed.run; Slurm's srun manual, OUTPUT ENVIRONMENT VARIABLES
(SLURM_STEP_NUM_TASKS, unlike SLURM_NTASKS, is not set in an sbatch or salloc shell); Open MPI's mpirun manual; MPICH's
PMI.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from parallelrun.base.errors import EnvironmentProblem, Problem

TOKEN = "PARALLELRUN_TOKEN"  # a secret of the run, which a rank must know to join a rendezvous over a network
LOOPBACK = "lo"  # the interface that gloo uses when all ranks share this host
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
    """The rank of this process in a world that another launcher has started.

    master_port: 0 if all ranks share a host, which then meet in a file. source: torchrun | srun | mpirun | TF_CONFIG.
    job: a text that all ranks of this job share, and no other job.
    """

    rank: int
    world: int
    local_rank: int
    master_addr: str
    master_port: int
    source: str
    job: str


def detect(environ: Mapping[str, str]) -> Attached | None:
    """Return the rank that `environ` gives this process; None if no launcher started it.

    Raises EnvironmentProblem naming the variables that are missing, unreadable or contradictory.
    """
    torchrun = [name for name in TORCHRUN if environ.get(name)]
    if "RANK" in torchrun or "WORLD_SIZE" in torchrun or environ.get("TORCHELASTIC_RUN_ID"):
        return _torchrun(environ, torchrun)
    if environ.get("TF_CONFIG") and (task := _tf_config(environ)):
        return task
    if environ.get("SLURM_PROCID") and whole_number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return _srun(environ)
    if environ.get("OMPI_COMM_WORLD_RANK") or environ.get("OMPI_COMM_WORLD_SIZE"):
        prefix, job = "OMPI_COMM_WORLD_", environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        return _mpirun(environ, f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE", job)
    if environ.get("PMI_RANK") or environ.get("PMI_SIZE"):
        return _mpirun(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None)
    return None


def for_rank(environ: Mapping[str, str], rank: int, world: int, threads: int) -> dict[str, str]:
    """Return the variables for a rank of our own launcher: the allowed ones of `environ`, and its rank.

    There is no master address: the ranks inherit the file of their store.
    """
    variables = {name: value for name, value in without_launchers(environ).items() if _FOR_RANKS.match(name)}
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    variables.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    variables.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    return variables


def for_other_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the launcher sends to ranks on other hosts: those that do not describe this host."""
    variables = without_launchers(environ).items()
    return {name: value for name, value in variables if _FOR_RANKS.match(name) and not _OF_ONE_HOST.match(name)}


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that another launcher has set for its ranks."""
    return {name: value for name, value in environ.items() if not _OF_LAUNCHERS.match(name)}


def num_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by the container's quota."""
    return min(len(os.sched_getaffinity(0)), host_cores())


def host_cores() -> int:
    """Return the number of cores of this host or container (cgroup v2's `cpu.max`), whatever mpirun binds a rank to."""
    cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def visible_gpus() -> int:
    """Return how many GPUs torch would count: the driver's, limited by CUDA_VISIBLE_DEVICES; 0 if torch is built for
    CPU."""
    present = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    if not present or _torch_is_cpu_only():
        return 0
    selected = os.environ.get("CUDA_VISIBLE_DEVICES")
    if selected is None:
        return present
    entries = [entry.strip() for entry in selected.split(",")]
    listed = takewhile(lambda entry: entry and not entry.startswith("-"), entries)  # CUDA stops at an invalid entry
    return min(len(list(listed)), present)


def _torch_is_cpu_only() -> bool:
    from importlib import metadata  # imported late: only hosts with GPUs need it

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True


def threads_per_rank(environ: Mapping[str, str], local_ranks: int) -> int:
    """Return the compute threads for each of `local_ranks` ranks on this host: OMP_NUM_THREADS, else its cores."""
    requested = environ.get("OMP_NUM_THREADS", "")
    return int(requested) if requested.isdigit() and int(requested) else max(1, num_cores() // local_ranks)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gpu[003-005,9],x1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _torchrun(environ: Mapping[str, str], present: list[str]) -> Attached:
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if missing := [name for name in TORCHRUN if name not in present]:
        shown = _shown(environ, *present, "TORCHELASTIC_RUN_ID")
        message = f"{shown} is set, but {', '.join(missing)} is not: left over from another job, or not all passed on"
        raise _problem(message, [*present, "TORCHELASTIC_RUN_ID"][0], f"unset {' '.join(TORCHRUN)} TORCHELASTIC_RUN_ID")
    rank = whole_number(environ, "RANK")
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        # srun or mpirun may start one torchrun per host; then only torchrun's variables count
        if environ.get(name) and not run_id and whole_number(environ, name) != rank:
            raise _problem(f"RANK={rank} contradicts {name}={environ[name]}", "RANK", f"unset {' '.join(TORCHRUN)}")
    job = f"{run_id or 'env'}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return _checked(environ, names, environ["MASTER_ADDR"], whole_number(environ, "MASTER_PORT"), "torchrun", job)


def _tf_config(environ: Mapping[str, str]) -> Attached | None:
    """Return this process's rank in a TensorFlow cluster; None if the cluster has no other tasks."""
    from parallelrun.launch.host import tf_config
    from parallelrun.planner.pieces import cluster_spec

    spec, rank = tf_config.read_cluster(environ)
    if spec is None or rank is None or spec.world == 1:
        return None
    addresses = [address for _, _, address in spec.tasks]
    hosts = [cluster_spec.split(address)[0] for address in addresses]
    contact = cluster_spec.split(addresses[0])
    local_rank = hosts[:rank].count(hosts[rank])
    return Attached(rank, spec.world, local_rank, *contact, tf_config.NAME, " ".join(addresses))


def _srun(environ: Mapping[str, str]) -> Attached:
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    one_host = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "")) == "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else first_host(nodes))
    if not address:
        raise _problem("under srun on several hosts neither SLURM_STEP_NODELIST nor MASTER_ADDR is set", "MASTER_ADDR")
    reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
    derived = 0 if one_host else 20000 + zlib.crc32(job.encode()) % 10000
    port = whole_number(environ, "MASTER_PORT", reserved.group() if reserved else str(derived))
    return _checked(environ, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), address, port, "srun", job)


def _mpirun(
    environ: Mapping[str, str], rank: str, world: str, local_rank: str, local_world: str, job: str | None
) -> Attached:
    num_ranks = whole_number(environ, world)
    one_host = whole_number(environ, local_world, str(num_ranks)) == num_ranks
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else "")
    port = whole_number(environ, "MASTER_PORT", "0")
    if not address or not (port or one_host):
        message = f"mpirun started {num_ranks} ranks on several hosts, and MASTER_ADDR or MASTER_PORT is not set"
        probes = " ".join(f"--mca oob_tcp_keepalive_{name}" for name in ("time 10", "intvl 3", "probes 3"))
        command = f"mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 {probes} ..."
        raise _problem(message, "MASTER_ADDR", command)
    job = job or f"parent-{os.getppid()}"  # without a job name, the parent process identifies the job
    return _checked(environ, (rank, world, local_rank), address, port, "mpirun", job)


def _checked(
    environ: Mapping[str, str], names: tuple[str, str, str], address: str, port: int, source: str, job: str
) -> Attached:
    """Return the rank whose numbers the variables `names` (rank, world, local rank) have, if they are consistent."""
    rank, world = whole_number(environ, names[0]), whole_number(environ, names[1])
    local_rank = whole_number(environ, names[2], "0" if source == "srun" else str(rank))
    for name, number, label in ((names[0], rank, "rank"), (names[2], local_rank, "local rank")):
        if number >= world:
            raise _problem(f"{_shown(environ, *names)}: the {label} must be below the world size {world}", name)
    if port >= 65536 or (port == 0 and source == "torchrun"):
        raise _problem(f"MASTER_PORT={port} is not a port (1 to 65535)", "MASTER_PORT")
    return Attached(rank, world, local_rank, address, port, source, job)


def _shown(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def whole_number(environ: Mapping[str, str], name: str, default: str | None = None, minimum: int = 0) -> int:
    """Return the number in a variable. Raises EnvironmentProblem if it is none, or not set and there is no default."""
    text = environ.get(name) or default
    if text is None or not re.fullmatch(r"\d{1,9}", text) or int(text) < minimum:
        message = f"{name} is not set" if text is None else f"{name}={text} is not a whole number from {minimum}"
        raise _problem(message, name, f"unset {name}")
    return int(text)


def _problem(message: str, where: str, command: str = "") -> EnvironmentProblem:
    return EnvironmentProblem(Problem(message, where, command=command))
