"""Hosts on this machine: each a network namespace with an address, a host name, a boot and an /etc/hosts of its own.

All hang on one switch (a bridge in a namespace of its own), and share the file system, as hosts of a cluster do. Root
is needed, and iproute2. Nothing of the machine's own network is touched, and everything ends with `stop`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.launcher import read, wait_for
from tests.namespaces import processes_beside

SUBNET = "10.77.0"


def missing() -> str:
    """The reason why no hosts can be made here; empty if they can."""
    absent = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install iproute2 util-linux)"
    if os.geteuid():
        return "only root can make network namespaces"
    script = "hostname x && mount --bind /etc/hosts /etc/hosts && ip link add veth0 type veth peer name veth1"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", script], capture_output=True)
    return "" if tried.returncode == 0 else "this container cannot make network namespaces"


@contextlib.contextmanager
def network_of(*names: str) -> Iterator[Network]:
    """A network of hosts during the block. Skips the test where none can be made."""
    if reason := missing():
        pytest.skip(reason)
    network = Network(Path(tempfile.mkdtemp(prefix="parallelrun-hosts-")), names)
    try:
        network.start()
        yield network
    finally:
        network.stop()
        shutil.rmtree(network.folder, ignore_errors=True)


@dataclass
class Network:
    """Hosts `names`, the first at SUBNET.1; a process that sleeps keeps each alive."""

    folder: Path
    names: Sequence[str]
    _keepers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Make the hosts and the switch."""
        lines = [f"{self.address(name)} {name}" for name in self.names]
        for name in self.names:  # as Debian sets a host up: its own name means an address that others cannot reach
            own = ["127.0.0.1 localhost", f"127.0.1.1 {name}"]
            others = [line for line in lines if not line.endswith(f" {name}")]
            (self.folder / f"{name}.hosts").write_text("\n".join([*own, *others, ""]))
            (self.folder / f"{name}.boot").write_text(f"{uuid.uuid4()}\n")  # by it ranks know that they share memory
        self._keep("switch", "ip link add sw type bridge && ip link set sw up")
        for name in self.names:
            self._keep(
                name,
                f"hostname {name} && mount --bind {self.folder}/{name}.hosts /etc/hosts && "
                f"mount --bind {self.folder}/{name}.boot /proc/sys/kernel/random/boot_id && "
                "mount -t tmpfs shm /dev/shm && ip link set lo up",
            )
        for number, name in enumerate(self.names):
            keeper = self._keepers[name].pid
            port = f"port{number}"
            cable = f"ip link add {port} type veth peer name eth0 netns {keeper} && ip link set {port} master sw up"
            self.check("switch", "sh", "-c", cable)
            self.check(name, "sh", "-c", f"ip address add {self.address(name)}/24 dev eth0 && ip link set eth0 up")

    def _keep(self, name: str, script: str) -> None:
        ready = self.folder / f"{name}.ready"
        script = f"{script} && touch {ready} && exec sleep infinity"
        self._keepers[name] = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", script])
        wait_for(ready.exists, f"host {name}")

    def address(self, name: str) -> str:
        return f"{SUBNET}.{1 + list(self.names).index(name)}"

    def keeper(self, name: str) -> int:
        """The process that keeps a host alive."""
        return self._keepers[name].pid

    def command(self, name: str, *words: str) -> list[str]:
        """The command that runs `words` on a host."""
        return ["nsenter", "--target", str(self._keepers[name].pid), "--net", "--uts", "--mount", *words]

    def check(self, name: str, *words: str) -> str:
        """Run a command on a host to its end; return what it prints. It must succeed."""
        done = subprocess.run(self.command(name, *words), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def popen(self, name: str, *words: str, output: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on a host, in the folder of its `output`, to which it writes stdout and stderr."""
        inside = ("sh", "-c", 'cd "$0" && exec "$@"', str(output.parent), *words)  # nsenter changes to /
        with output.open("ab") as file:
            return subprocess.Popen(self.command(name, *inside), stdout=file, stderr=file, env=env)

    def serve_ssh(self) -> Path:
        """Start an sshd on every host; return a configuration for ssh with which each reaches each. Skips the test
        where there is none."""
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        if sshd is None:
            pytest.skip("no sshd here (openssh-server)")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation needs it
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(key, check=True, stdin=subprocess.DEVNULL)
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host\nPidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
            f"AuthorizedKeysFile {self.folder}/user.pub\nPermitRootLogin prohibit-password\n"
        )
        (self.folder / "known_hosts").write_text(f"hosts {read(self.folder / 'host.pub')}")
        client = self.folder / "ssh_config"
        client.write_text(
            f"Host *\n  HostKeyAlias hosts\n  UserKnownHostsFile {self.folder}/known_hosts\n"
            f"  IdentityFile {self.folder}/user\n  IdentitiesOnly yes\n"
        )
        for name in self.names:
            log = self.folder / f"{name}.sshd"
            self.popen(name, sshd, "-D", "-e", "-f", str(self.folder / "sshd_config"), output=log)
            wait_for(lambda log=log: "Server listening" in read(log), f"sshd of {name}: {read(log)}")
        return client

    def processes(self, name: str) -> list[int]:
        """All processes of a host."""
        return processes_beside(self._keepers[name].pid)

    def clear(self) -> None:
        """Kill what still runs on the hosts, but for sshd."""
        for name in self.names:
            for pid in self.processes(name):
                with contextlib.suppress(OSError):
                    if pid != self._keepers[name].pid and b"sshd" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End everything on all hosts, and the hosts."""
        for name in self._keepers:
            for pid in self.processes(name):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for keeper in self._keepers.values():
            keeper.wait()
