"""A real Slurm on loopback: a controller and four nodes, each a daemon with a host name of its own.

Debian's packages `slurmctld slurmd slurm-client munge` and root are needed, because the node daemons get name spaces
of their own (host name, mounts). Everything is under one directory, and ends with `stop`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.namespaces import processes_beside

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
NODES = ("n0", "n1", "n2", "n3")
PATIENCE_S = 300.0
_BOOT = "/proc/sys/kernel/random/boot_id"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort={controller}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"


def missing() -> str:
    """The reason why no Slurm can be started here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
    if os.geteuid():
        return "only root can give each node daemon a host name"
    own_hosts = f"hostname n0 && mount --bind /etc/hosts /etc/hosts && mount --bind /etc/hosts {_BOOT}"
    tried = subprocess.run(["unshare", "--uts", "--mount", "sh", "-c", own_hosts], capture_output=True)
    return "" if tried.returncode == 0 else "this container cannot give a process a host name and mounts of its own"


@dataclass
class SlurmCluster:
    """Daemons of one Slurm. environ: what its clients need."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start all daemons; return when every node is idle."""
        for name in ("state", "spool", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o700)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(NODE.format(name=name, port=port) for name, port in zip(NODES, ports))
        conf = CONF.format(host=socket.gethostname(), folder=self.folder, controller=controller, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        hosts = "".join(f"127.0.0.1 {name}\n" for name in NODES)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environ = {**clean, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        munge = [f"--{name}={self.folder}/munge.{suffix}" for name, suffix in (
            ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
        )]  # fmt: skip
        self._daemon("munged", ["munged", "--foreground", "--force", *munge])
        wait((self.folder / "munge.sock").exists, "munged", 20)
        self._daemon("slurmctld", ["slurmctld", "-D", "-c"])
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes(NODES)

    def wait_for_nodes(self, nodes: Sequence[str]) -> None:
        """Wait until these nodes are idle."""
        wait(lambda: {self.states().get(node) for node in nodes} == {"idle"}, "idle nodes", 60, self.states)

    def restart_lost_nodes(self) -> None:
        """Start the daemon of every node that was killed."""
        for node in NODES:
            if self._daemons[node].poll() is not None:
                self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, with a host name, a boot and shared memory of its own."""
        boot = self.folder / f"{node}.boot"
        boot.write_text(f"{uuid.uuid4()}\n")  # by it ranks know that they share memory
        script = (
            f"hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && mount -t tmpfs shm /dev/shm && "
            f"mount --bind {boot} {_BOOT} && exec slurmd -D -c -N {node}"
        )
        self._daemon(node, ["unshare", "--uts", "--mount", "sh", "-c", script])

    def kill_node(self, node: str) -> None:
        """Kill a node: its daemon, the steps' daemons and all their processes."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons[node].wait()

    def processes(self, node: str) -> list[int]:
        """All processes in the name space of a node."""
        return processes_beside(self._daemons[node].pid)

    def ranks(self, node: str) -> dict[int, int]:
        """The processes of a node that run our program, by rank."""
        found = {}
        for pid in self.processes(node):
            variables = _read(pid, "environ").split(b"\0")
            rank = [int(one.partition(b"=")[2]) for one in variables if one.startswith(b"SLURM_PROCID=")]
            if rank and b"-m\0parallelrun" in _read(pid, "cmdline") and b"srun\0" not in _read(pid, "cmdline"):
                found[rank[0]] = pid
        return found

    def stop(self) -> None:
        """End all daemons and jobs."""
        for node in NODES:
            if node in self._daemons and self._daemons[node].poll() is None:
                self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def states(self) -> dict[str, str]:
        """State of each node, such as `idle`."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T", "-p", "main").split("\n")
        return dict(line.split() for line in lines if line)  # type: ignore[misc]

    def run(self, *command: str, **options: Any) -> str:
        """Run a client of Slurm; return what it prints."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, **options)
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, cwd: Path) -> str:
        """Submit a batch file; return the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)], env=self.environ, cwd=cwd, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "-o", "show", "job", number)))

    def ended(self, number: str, within_s: float = PATIENCE_S) -> dict[str, str]:
        """Wait until a job has ended; return what Slurm says of it. A job that was queued again starts at once."""

        def has_ended() -> bool:
            self.start_now(number)
            return self.job(number).get("JobState") in _ENDED

        wait(has_ended, f"end of job {number}", within_s, lambda: self.job(number))
        return self.job(number)

    def start_now(self, number: str) -> None:
        """Spare a job that was queued again the two minutes that Slurm lets it wait."""
        if self.job(number).get("Reason") == "BeginTime":
            self.run("scontrol", "update", f"JobId={number}", "StartTime=now")

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(command, env=self.environ, stdout=output, stderr=output)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def wait(
    condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S, state: Callable[[], object] = lambda: ""
) -> Any:
    """Wait until `condition` is true; return its value. state: shown if it is not in time."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {within_s:g} s: {state()}"
        time.sleep(0.1)
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
