"""Network namespaces that stand for the hosts of a cluster (`emulate=true`); their ports have its rate and delay.

A bridge in a namespace of its own connects the hosts, so nothing of this machine's network is touched or seen. Only
descriptors keep the namespaces: they vanish with the launcher and its ranks, however those end. Linux and root.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.shared_memory import HOST_VARIABLE
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.hosts import ranks_per_node

INTERFACE, _BRIDGE, _NAME = "eth0", "bridge", "host{}"
CARRIED_BYTES_S = 0.5e9  # of all hosts' ports together, while two cores also train
_NEW_NAMES, _NEW_NETWORK = 0x04000000, 0x40000000  # CLONE_NEWUTS, CLONE_NEWNET of <linux/sched.h>
_BURST_S = 0.0005  # a port may be late by this much: timers and cores are shared
_LEAST_BURST = 80_000  # bytes: more than the 64 KiB that TCP hands over at once
_QUEUE_BYTES = 16 * 2**20  # of a port: as in a deep switch, senders wait instead of losing packets
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EmulatedNetwork:
    """An emulated network: hosts of `ranks_per_host` ranks each, whose ports carry `bytes_s` in each direction.

    delay_s: of a message between hosts; None if this kernel cannot delay packets. slowdown: how many times slower the
    ports are than the cluster's.
    """

    num_hosts: int
    ranks_per_host: int
    bytes_s: float
    delay_s: float | None
    slowdown: float

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def cluster(self, cluster: ClusterConfig) -> ClusterConfig:
        """Return `cluster` with the rate and delay between hosts that are emulated, for a prediction."""
        rate = self.bytes_s / 1e9 / self.ranks_per_host
        return replace(cluster, inter_gb_s=rate, latency_us=(self.delay_s or 0.0) * 1e6)

    def note(self, name: str) -> str:
        """Return what the user is told before the run."""
        slower = f", {self.slowdown:g} times slower than cluster={name}" if self.slowdown > 1 else ""
        delay = f"{self.delay_s * 1e6:g} us" if self.delay_s is not None else "no delay (this kernel has no netem)"
        hosts = f"{counted(self.num_hosts, 'host')} of {counted(self.ranks_per_host, 'rank')}"
        return f"emulated network: {hosts}, ports of {self.bytes_s / 1e6:.4g} MB/s and {delay}{slower}"


def network_of(config: Config, plan: Plan, can_delay: bool) -> EmulatedNetwork:
    """Return the network that `config` asks to emulate. Without `emulate_slowdown`, the ports are slowed down until
    this machine can carry what all of them send."""
    cluster = config.cluster
    assert cluster.inter_gb_s is not None, "rules.check_emulation"
    per_host = ranks_per_node(cluster, plan.world)
    num_hosts = -(-plan.world // per_host)
    port = cluster.inter_gb_s * 1e9 * per_host
    slowdown = config.emulate_slowdown or _round_up(num_hosts * port / CARRIED_BYTES_S)
    delay = (cluster.latency_us or 0.0) * 1e-6 * slowdown
    return EmulatedNetwork(num_hosts, per_host, port / slowdown, delay if can_delay else None, slowdown)


def _round_up(slowdown: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50, ..."""
    power: int = 10 ** max(0, math.floor(math.log10(slowdown)))
    return next(number * power for number in (1, 2, 5, 10) if number * power >= slowdown)


def host_name(config: Config, plan: Plan, rank: int) -> str:
    """Return the name of the host of a rank that this process has started."""
    if not config.emulate:
        return socket.gethostname()
    return _NAME.format(rank // ranks_per_node(config.cluster, plan.world))


def check(config: Config, plan: Plan) -> list[str]:
    """Return notes on the emulated network; none without `emulate`. Raises ConfigError if the plan has no hosts to
    emulate, EnvironmentProblem if this machine cannot emulate them."""
    if not config.emulate:
        return []
    if plan.device == "cuda":
        message = "emulate=true runs CPU ranks: NCCL would use NVLink or PCIe beside the emulated network"
        raise ConfigError(Problem(message, "device", "device=cpu", kind="contradiction"))
    if problem := missing():
        fix = "run as root on Linux with iproute2 (in a container: --privileged)"
        raise EnvironmentProblem(
            Problem(f"emulate=true is impossible here: {problem}", "emulate", "emulate=false", fix)
        )
    return [network_of(config, plan, can_delay()).note(config.cluster.name)]


def can_delay() -> bool:
    """Return whether this kernel can delay packets."""
    return in_thread(lambda: _accepts("netem", "delay", "1us"))


def missing() -> str:
    """Return why hosts cannot be emulated here; empty if they can."""
    if os.geteuid():
        return "only root may create network namespaces"
    absent = [name for name in ("ip", "tc") if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{' and '.join(absent)} of iproute2 is not installed"
    try:
        limits = in_thread(lambda: _accepts("tbf", "rate", "1gbit", "burst", "100k", "limit", "1m"))
    except OSError as error:
        return f"this process may not create network namespaces ({error.strerror})"
    return "" if limits else "this kernel has no tbf, which limits a port's rate"


def _accepts(*discipline: str) -> bool:
    """Return whether the kernel knows a queueing discipline, tried in a new namespace."""
    _call("unshare", _NEW_NETWORK)
    done = subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *discipline], capture_output=True, env=_environ())
    return done.returncode == 0


@contextlib.contextmanager
def namespaces(config: Config, plan: Plan) -> Iterator[Namespaces | None]:
    """Create the hosts that `config` asks to emulate; None if it asks for none."""
    if not config.emulate:
        yield None
        return
    created = Namespaces(network_of(config, plan, can_delay()))
    try:
        yield created
    finally:
        created.close()


class Namespaces:
    """The namespaces of an emulated network. A rank enters those of its host; `close` forgets them."""

    def __init__(self, network: EmulatedNetwork):
        self.network = network
        self._hosts: list[tuple[int, int]] = []  # descriptors: network, host name
        self._descriptors: list[int] = []  # all that keep a namespace
        try:
            in_thread(self._create)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            said = getattr(error, "stderr", "") or str(error)
            raise EnvironmentProblem(Problem(f"the network cannot be emulated: {said.strip()}", "emulate")) from None

    def _create(self) -> None:
        for number in range(self.network.num_hosts):
            _call("unshare", _NEW_NETWORK | _NEW_NAMES)
            socket.sethostname(_NAME.format(number))
            self._hosts.append((self._kept("net"), self._kept("uts")))
        _call("unshare", _NEW_NETWORK)
        self._kept("net")
        _run(f"ip link add {_BRIDGE} type bridge", f"ip link set {_BRIDGE} up")
        for number, (network, _) in enumerate(self._hosts):
            port = f"port{number}"
            _run(
                f"ip link add {port} type veth peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{network}",
                f"ip link set {port} master {_BRIDGE} up",
            )
            _limit(port, self.network, delayed=False)  # what the host receives
        for number, (network, _) in enumerate(self._hosts):
            _call("setns", network, _NEW_NETWORK)
            address = f"ip addr add {address_of(number)}/16 dev {INTERFACE}"
            _run("ip link set lo up", address, f"ip link set {INTERFACE} up")
            _limit(INTERFACE, self.network, delayed=True)

    def _kept(self, kind: str) -> int:
        """Return a descriptor of a namespace of this thread, which keeps it."""
        self._descriptors.append(os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
        return self._descriptors[-1]

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables that tell a rank its host."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, HOST_VARIABLE: _NAME.format(self.network.host_of(rank)) + " "}

    def enter(self, rank: int) -> None:
        """Move the calling thread to the host of `rank`; a process that has one thread moves with it."""
        network, names = self._hosts[self.network.host_of(rank)]
        _call("setns", network, _NEW_NETWORK)
        _call("setns", names, _NEW_NAMES)

    def close(self) -> None:
        """Forget the namespaces: the kernel removes each with the last process in it."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def address_of(host: int) -> str:
    """Return the address of a host in the emulated network, which nothing outside can reach."""
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


def _limit(device: str, network: EmulatedNetwork, delayed: bool) -> None:
    """Limit what a device sends to the port's rate, and delay it."""
    burst = max(_LEAST_BURST, round(network.bytes_s * _BURST_S))
    rate = f"tbf rate {round(network.bytes_s * 8)}bit burst {burst} limit {_QUEUE_BYTES}"
    _run(f"tc qdisc add dev {device} root handle 1: {rate}")
    if delayed and network.delay_s:
        packets = 10 * _QUEUE_BYTES // 1500
        _run(f"tc qdisc add dev {device} parent 1:1 netem delay {network.delay_s * 1e6:.0f}us limit {packets}")


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True, text=True, env=_environ(), timeout=20)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _environ() -> Mapping[str, str]:
    return {**os.environ, "PATH": _path(), "LC_ALL": "C"}


def _call(function: str, *arguments: int) -> None:
    """Call `unshare` or `setns` of libc, which Python has since 3.12, for the calling thread."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def in_thread(action: Callable[[], _Result]) -> _Result:
    """Return what `action` returns in a thread of its own: namespaces are entered by threads, and this one stays."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(action).result()
