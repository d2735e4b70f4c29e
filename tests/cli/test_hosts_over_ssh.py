"""`-np N -H h1:2,h2:2` from one machine: real sshd on loopback, real ranks; all "hosts" are names of this one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.launch.over_ssh import hosts
from parallelrun.launch.over_ssh import ssh as over_ssh
from tests.cli.launcher import read, survivors, wait_for
from tests.cli.test_launch_supervisor import listening_addresses
from tests.servants import ROOT

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
TINY = ("model=gpt", "strategy=ddp", "dataset=synthetic", "model.layers=1", "model.hidden=16", "model.seq=8")
ENDLESS = ("steps=1000000", "eval.every=0", "checkpoint.every=0")
AGENT = "\0parallelrun.launch.over_ssh.ssh_agent"  # as a word of its own: ssh has it in the middle of one
GONE_S = 10.0

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(SSHD is None, reason="no sshd here (openssh-server)"),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here (openssh-client)"),
]


@pytest.fixture(scope="module")
def ssh_config(tmp_path_factory) -> Iterator[Path]:
    """An sshd of our own on 127.0.0.1, and the client's configuration that reaches it as worker1 and worker2."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = _free_port()
    config = folder / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nAuthorizedKeysFile {folder}/user.pub\n"
        "PermitRootLogin prohibit-password\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation needs it
    (folder / "known_hosts").write_text(f"workers {read(folder / 'host.pub')}")
    client = folder / "ssh_config"
    client.write_text(
        f"Host worker1 worker2\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias workers\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
    )
    with open(folder / "log", "w") as log:
        daemon = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)], stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: daemon.poll() is not None or "Server listening" in read(folder / "log"), "sshd")
        if daemon.poll() is not None:
            pytest.skip(f"sshd does not start here: {read(folder / 'log').strip()[-200:]}")
        yield client
    finally:
        daemon.terminate()
        daemon.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Run:
    """A running launcher. All its processes, on every "host", work in `folder`."""

    process: subprocess.Popen
    folder: Path

    def pids(self, word: str = "") -> list[int]:
        """Its living processes, or those that have `word` in their command line."""
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _cwd(entry) == self.folder]
        return [int(entry.name) for entry in entries if word in read(entry / "cmdline")]

    def agents(self) -> list[int]:
        """The agents of its hosts."""
        return self.pids(AGENT)

    def ranks(self, *agents: int) -> list[int]:
        """The ranks of these agents."""
        return [pid for pid in self.pids() if _parent(pid) in agents]

    @property
    def stdout(self) -> str:
        return read(self.folder / "stdout")

    @property
    def stderr(self) -> str:
        return read(self.folder / "stderr")

    def trains(self) -> None:
        """Wait for the second step."""
        wait_for(lambda: self.process.poll() is not None or self.steps() > 1, f"a step\n{self.stderr}")
        assert self.process.poll() is None, self.stderr

    def steps(self) -> int:
        return sum(len(read(file).splitlines()) for file in self.folder.glob("runs/gpt*/*/metrics.jsonl"))

    def ended(self, within_s: float = 200.0) -> tuple[int, list[int]]:
        """(exit code, processes of it that are left)."""
        code = self.process.wait(within_s)
        return code, survivors(self.pids(), GONE_S)


def _cwd(entry: Path) -> Path | None:
    try:
        return Path(os.readlink(entry / "cwd"))
    except OSError:
        return None


def _parent(pid: int) -> int:
    return int(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])


def start(folder: Path, ssh_config: Path, hosts: str, *words: str) -> Run:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "parallelrun", "-H", hosts, "--ssh-config", str(ssh_config), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=folder, env=environ)
    return Run(process, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, ssh_config) -> Iterator[dict[str, Run]]:
    """Runs of two ranks that share their start-up time, and what each test then does to its own."""
    folder = tmp_path_factory.mktemp("runs")
    words = {
        "ends well": ("worker1:1,worker2:1", *TINY, "steps=2", "eval.batches=1"),
        "ctrl-c": ("localhost:1,worker2:1", *TINY, *ENDLESS),
        "lost host": ("worker1:1,worker2:1", *TINY, *ENDLESS),
        "lost launcher": ("worker1:1", *TINY, *ENDLESS),
    }
    # a folder's name reaches the remote shell: it must not be read by it
    names = {name: f"{name}; touch pwned $(touch pwned) 'x" for name in words}
    started = {name: start(folder / names[name], ssh_config, *words[name]) for name in words}
    yield started
    for run in started.values():
        run.process.kill()
        run.process.wait()


def test_ranks_on_two_hosts_make_one_run_and_their_output_names_the_host(runs):
    run = runs["ends well"]
    code, left = run.ended()
    assert (code, left) == (0, []), run.stderr
    assert run.steps() == 2
    assert re.search(r"^\[worker1\] step 2/2 .*tokens/s$", run.stdout, re.MULTILINE)
    assert all(line.startswith("[worker1] ") for line in run.stdout.splitlines())  # rank 0 alone speaks
    assert "starting rank 0 on worker1, rank 1 on worker2" in run.stderr
    assert not list(run.folder.parent.rglob("pwned"))


def test_ctrl_c_ends_the_ranks_on_all_hosts_and_all_listen_on_loopback_until_then(runs):
    run = runs["ctrl-c"]
    run.trains()
    assert len(run.agents()) == 2
    assert listening_addresses(run.ranks(*run.agents())) == {"0100007F"}
    run.process.send_signal(signal.SIGINT)
    assert run.ended() == (130, []), run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert (
        re.search(r"^step +1/", run.stdout) and "[localhost]" not in run.stdout
    )  # rank 0 of this host has our own terminal


def test_when_a_host_is_lost_the_ranks_of_the_others_end(runs):
    run = runs["lost host"]
    run.trains()
    (second,) = [pid for pid in run.agents() if not listening_addresses(run.ranks(pid))]  # rank 0 listens
    began = time.monotonic()
    os.kill(second, signal.SIGKILL)
    assert run.ended() == (6, []), run.stderr
    assert time.monotonic() - began < 25
    lost = "error: the connection to host worker2 (rank 1) was lost"
    assert lost in run.stderr
    assert re.search(rf"^\[worker1\] (error: rank 1 .*died|{re.escape(lost)})", run.stderr, re.MULTILINE)


def test_a_killed_launcher_leaves_nothing_on_any_host(runs):
    run = runs["lost launcher"]
    run.trains()
    run.process.kill()
    assert run.ended() == (-9, [])


def test_every_host_that_cannot_be_reached_or_has_no_such_python_is_named(monkeypatch, ssh_config):
    monkeypatch.setattr(sys, "executable", "/no such/python")
    placed = hosts.read(None, "worker1:1,nosuch.invalid:1")
    with pytest.raises(EnvironmentProblem) as caught:
        over_ssh.run(placed, ["steps=1"], hosts.SshOptions(config=str(ssh_config)))
    first, second = caught.value.problems
    assert re.match("worker1 cannot start parallelrun: .*/no such/python", first.what)
    assert "nosuch.invalid cannot be reached by ssh: ssh: Could not resolve hostname" in second.what
    assert second.command == f"ssh -F {ssh_config} nosuch.invalid ''\"'\"'/no such/python'\"'\"' -m parallelrun doctor'"
