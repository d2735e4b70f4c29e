"""Jobs over two hosts, started by the real launchers: torchrun on each host, mpirun over ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.launcher import read, wait_for
from tests.hosts.network import Network
from tests.servants import ROOT

PORT = "29500"
PATIENCE_S = 240.0
# as docs/cluster.md says: else mpirun waits for ever for the daemon of a host that was cut off
NOTICES_A_CUT = [word for name, value in (("time", "10"), ("intvl", "3"), ("probes", "3"))
                 for word in ("--mca", f"oob_tcp_keepalive_{name}", value)]  # fmt: skip


@dataclass
class Job:
    """A running job of the processes of a launcher. folder: its working directory; output: what all hosts printed."""

    folder: Path
    processes: Sequence[subprocess.Popen[bytes]]
    began: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return read(self.folder / "output")

    @property
    def run(self) -> Path:
        """The run directory, once it is there."""
        found = wait_for(lambda: next(self.folder.glob("runs/*/*/config.yaml"), None), self.output, PATIENCE_S)
        return Path(found).parent

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        return found

    def wait(self) -> list[int]:
        """The exit codes of the launcher's processes."""
        deadline = time.monotonic() + PATIENCE_S
        return [one.wait(max(1.0, deadline - time.monotonic())) for one in self.processes]


def environ(**more: str) -> dict[str, str]:
    """The variables of a job: one thread a rank, and this source."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "GLOO_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def by_torchrun(network: Network, folder: Path, words: Sequence[str], per_host: int = 2, **more: str) -> Job:
    """A torchrun on each host."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(network.names)),
                "--nproc-per-node", str(per_host),
                "--master-addr", network.address(network.names[0]), "--master-port", PORT]  # fmt: skip
    return Job(folder, [
        network.popen(name, *torchrun, "--node-rank", str(number), *words, output=folder / "output",
                      env=environ(**more))
        for number, name in enumerate(network.names)
    ])  # fmt: skip


def by_mpirun(
    network: Network, folder: Path, words: Sequence[str], ssh_config: Path, per_host: int = 2, **more: str
) -> Job:
    """OpenMPI's mpirun on the first host, which reaches the other by ssh."""
    hosts = ",".join(f"{name}:{per_host}" for name in network.names)
    handed = {
        "MASTER_ADDR": network.address(network.names[0]),
        "MASTER_PORT": PORT,
        "PARALLELRUN_TOKEN": "secret",
        **more,
    }
    names = [word for name in (*handed, "PYTHONPATH", "OMP_NUM_THREADS", "PATH") for word in ("-x", name)]
    command = ["mpirun", "--allow-run-as-root", "--host", hosts, "--mca", "plm_rsh_args", f"-F {ssh_config}",
               *NOTICES_A_CUT, "--bind-to", "none", "--wdir", str(folder), *names, sys.executable, *words]  # fmt: skip
    settings = environ(**handed)
    return Job(folder, [network.popen(network.names[0], *command, output=folder / "output", env=settings)])


def agent(network: Network, name: str) -> int | None:
    """The process that starts the ranks of a host: our agent, or on its own host our launcher; None without one."""
    lines = {pid: read(Path(f"/proc/{pid}/cmdline")).split("\0") for pid in sorted(network.processes(name))}
    ours = (pid for pid, words in lines.items() if words[1:2] == ["-m"] and words[2].startswith("parallelrun"))
    return next(ours, None)


def ranks(network: Network, name: str) -> list[int]:
    """The ranks of a host that our launcher has started, in their order."""
    starter = str(agent(network, name))
    pids = sorted(pid for pid in network.processes(name) if _parent(pid) == starter)
    return [pid for pid in pids if variable(pid, "RANK")]


def _parent(pid: int) -> str:
    return "".join(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1:2])


def variable(pid: int, name: str) -> str:
    """The variable of a process, empty if it is not set."""
    lines = read(Path(f"/proc/{pid}/environ")).split("\0")
    return next((line.partition("=")[2] for line in lines if line.startswith(f"{name}=")), "")
