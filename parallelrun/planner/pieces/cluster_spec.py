"""TensorFlow's cluster notation: `cluster.ps=[host:port,...] cluster.worker=[host:port,...]`.

One task is one rank. Workers come first, in the order given (a chief is worker 0), then servers: TensorFlow's
`worker 1` is rank 1, and its `ps 0` is the first rank after the workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallelrun.base.errors import Problem
from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config

ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
THIS_HOST = ("localhost", "127.0.0.1", "[::1]")
_JOBS = ("worker", "ps")


@dataclass(frozen=True)
class ClusterSpec:
    """The address (`host:port`) of every task."""

    worker: tuple[str, ...]
    ps: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return len(self.worker) + len(self.ps)

    @property
    def tasks(self) -> tuple[tuple[str, int, str], ...]:
        """(job, index, address) by rank."""
        return tuple((job, index, address) for job in _JOBS for index, address in enumerate(getattr(self, job)))

    def __str__(self) -> str:
        servers = f" and {len(self.ps)} ps" if self.ps else ""
        return f"cluster of {counted(len(self.worker), 'worker')}{servers}"

    def disagreement(self, servers: int | None, strategy: str, has_servers: bool) -> list[Problem]:
        """Check that the servers agree with `servers` and with the strategy."""
        if self.ps and not has_servers:
            message = f"cluster.ps names {counted(len(self.ps), 'server')}, and {strategy} has none"
            return [Problem(message, "cluster.ps", "strategy=ps, or leave cluster.ps out", kind="contradiction")]
        if has_servers and not self.ps:
            message = f"{strategy} needs a server, and the {self} names none"
            return [Problem(message, "cluster.ps", "cluster.ps=[localhost:2222]", kind="contradiction")]
        if has_servers and servers not in (None, len(self.ps)):
            message = f"servers={servers} contradicts cluster.ps, which names {len(self.ps)}"
            return [Problem(message, "servers", f"servers={len(self.ps)}", kind="contradiction")]
        return []


def split(address: str) -> tuple[str, int]:
    """(host, port) of a valid address."""
    match = ADDRESS.fullmatch(address)
    assert match is not None, f"{address} was not checked"
    return match["host"], int(match["port"])


def read(config: Config, problems: list[Problem]) -> ClusterSpec | None:
    """The cluster spec of a config; None if there is none or it is invalid. Appends its violations."""
    jobs = {job: getattr(config.cluster, job) for job in _JOBS}
    if not any(jobs.values()):
        return None
    violations = [problem for job, addresses in jobs.items() for problem in _check(f"cluster.{job}", addresses or [])]
    if not jobs["worker"]:
        message = "cluster.ps is given without cluster.worker"
        violations.append(Problem(message, "cluster.worker", "cluster.worker=[localhost:2223]", kind="usage"))
    every = [address for addresses in jobs.values() for address in addresses or []]
    for address in sorted({str(address) for address in every if every.count(address) > 1}):
        violations.append(Problem(f"{address} is the address of two tasks", "cluster", "another port for one of them"))
    problems += violations
    return None if violations else ClusterSpec(tuple(jobs["worker"]), tuple(jobs["ps"] or ()))


def target_world(
    requested: int | None, launched: int | None, servers: int, cluster: ClusterSpec | None, problems: list[Problem]
) -> tuple[int | None, str]:
    """(the world that the degrees must multiply to, its source for messages)."""
    if requested is not None and launched is not None and requested != launched:
        message = f"world={requested}, but the launcher has started {launched} ranks"
        problems.append(Problem(message, "world", f"world={launched}", kind="contradiction"))
    said = requested if launched is None else launched
    if cluster is not None and said not in (None, cluster.world):
        message = (
            f"{'world=' if launched is None else 'ranks launched: '}{said}, but {cluster} has {cluster.world} tasks"
        )
        problems.append(Problem(message, "world", f"world={cluster.world}", kind="contradiction"))
    beside = f", {counted(servers, 'server')}" if servers else ""
    if launched is not None:
        return launched, f"{counted(launched, 'rank')} launched{beside}"
    if requested is None and cluster is not None:
        return cluster.world, str(cluster)
    return requested, f"world {requested}{beside}"


def _check(key: str, addresses: list[str]) -> list[Problem]:
    violations = []
    for address in map(str, addresses):
        match = ADDRESS.fullmatch(address)
        if match and 0 < int(match["port"]) < 65536:
            continue
        host = re.sub(r"^[a-z]+://", "", address).partition(":")[0].partition("/")[0]
        host = match["host"] if match else host if re.fullmatch(r"[A-Za-z0-9.-]+", host) else "localhost"
        corrected = [f"{host}:2222" if str(other) == address else str(other) for other in addresses]
        message = f"{address}: the port must be from 1 to 65535" if match else f"{address!r} is not host:port"
        violations.append(Problem(f"{key}: {message}", key, f"{key}=[{','.join(corrected)}]"))
    return violations
