"""TF_CONFIG, by which TensorFlow tells a process of a cluster who it is: JSON with `cluster` and `task`. Torch-free.

    TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["c:2222"]}, "task": {"type": "ps", "index": 0}}'

Somebody has started one process per task, as torchrun would: this one attaches, and worker 0 (the chief, where there is
one) serves the store at its own address. Without a task it only says what the cluster is, like `cluster.ps=[...]`.
Source: TensorFlow's guide on distributed training ("TF_CONFIG"), which knows no other jobs than these.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.plan import cluster_spec
from parallelrun.plan.cluster_spec import ClusterSpec
from parallelrun.wording import did_you_mean

NAME = "TF_CONFIG"
_FIRST = ("chief", "master")  # jobs of one task, which is worker 0
_JOBS = ("worker", "ps", "chief")


@dataclass(frozen=True)
class TfConfig:
    """The cluster, and this process's rank in it; None where TF_CONFIG names no task."""

    spec: ClusterSpec
    rank: int | None

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of rank 0."""
        return cluster_spec.split(self.spec.tasks[0][2])

    @property
    def local_rank(self) -> int:
        """How many tasks of this process's host come before it."""
        assert self.rank is not None
        hosts = [cluster_spec.split(address)[0] for _, _, address in self.spec.tasks]
        return hosts[: self.rank].count(hosts[self.rank])


def read(environ: Mapping[str, str]) -> TfConfig | None:
    """What TF_CONFIG says; None when it is not set, or names no cluster. Raises EnvironmentProblem for nonsense."""
    text = environ.get(NAME, "").strip()
    if not text:
        return None
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise _problem(f"{NAME} is not JSON: {error}") from error
    cluster = fields.get("cluster") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(cluster or {}, dict):
        raise _problem(f'{NAME} is not of the form {{"cluster": {{...}}, "task": {{...}}}}')
    if not cluster:
        return None
    spec, first = _spec(cluster)
    return TfConfig(spec, _rank(fields["task"], spec, first) if fields.get("task") else None)


def apply(config: Config, environ: Mapping[str, str]) -> Config:
    """`config` with the cluster that TF_CONFIG names, if it does. Raises ConfigError if the config names another."""
    found = read(environ)
    if found is None:
        return config
    for job in ("worker", "ps"):
        said, own = list(getattr(found.spec, job)), getattr(config.cluster, job)
        if own is not None and list(own) != said:
            what = f"cluster.{job}=[{','.join(map(str, own))}], but {NAME} names [{','.join(said)}]"
            raise ConfigError(Problem(what, f"cluster.{job}", f"leave cluster.{job} out", f"unset {NAME}"))
    cluster = replace(config.cluster, worker=list(found.spec.worker), ps=list(found.spec.ps) or None)
    return replace(config, cluster=cluster)


def refuse_other_hosts(config: Config, argv: Sequence[str], this_host: str) -> None:
    """Nothing can be started on other hosts from here: prints each task's command, raises EnvironmentProblem."""
    spec = cluster_spec.read(config, [])
    hosts = {cluster_spec.split(address)[0] for _, _, address in spec.tasks} if spec else set()
    if spec is None or hosts <= {*cluster_spec.THIS_HOST, this_host}:
        return
    for rank, (_, _, address) in enumerate(spec.tasks):
        print(f"{cluster_spec.split(address)[0]}: {command(spec, rank, argv)}")
    raise EnvironmentProblem(
        Problem(
            f"the {spec} is on {len(hosts)} host{'s' * (len(hosts) > 1)}, and only this one can be reached from here",
            where="cluster.worker, cluster.ps",
            command="each of the lines above on the host it begins with",
        )
    )


def command(spec: ClusterSpec, rank: int, argv: Sequence[str]) -> str:
    """What starts one task, for a shell of its host."""
    job, index, _ = spec.tasks[rank]
    cluster = {"worker": list(spec.worker)} | ({"ps": list(spec.ps)} if spec.ps else {})
    value = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}, separators=(",", ":"))
    words = [word for word in argv if not word.startswith(("cluster.ps=", "cluster.worker="))]
    return shlex.join(["env", f"{NAME}={value}", "parallelrun", *words])


def _spec(cluster: dict[str, Any]) -> tuple[ClusterSpec, str]:
    """(the cluster, the job whose one task is worker 0 before the workers; empty if there is none)."""
    if "evaluator" in cluster:
        raise _problem(f"{NAME} has an evaluator; the workers evaluate themselves", "leave the evaluator out")
    for job, addresses in cluster.items():
        if job not in (*_JOBS, *_FIRST):
            raise _problem(f"{NAME}: no job is called {job!r}", did_you_mean(job, _JOBS))
        if not isinstance(addresses, list) or not addresses:
            raise _problem(f"{NAME}: {job} is not a list of host:port", f'"{job}": ["localhost:2222"]')
    firsts = [job for job in _FIRST if job in cluster]
    if len(firsts) > 1 or any(len(cluster[job]) > 1 for job in firsts):
        raise _problem(f"{NAME}: there is one chief at most", "put the others among the workers")
    first = firsts[0] if firsts else ""
    workers = [*(cluster[first] if first else []), *cluster.get("worker", [])]
    problems: list[Problem] = []
    named = replace(Config().cluster, worker=workers or None, ps=cluster.get("ps"))
    spec = cluster_spec.read(replace(Config(), cluster=named), problems)
    if spec is None:
        raise EnvironmentProblem(*(replace(problem, where=NAME) for problem in problems))
    return spec, first


def _rank(task: Any, spec: ClusterSpec, first: str) -> int:
    """The rank of a task: the chief, then the workers, then the servers."""
    job, index = (task.get("type"), task.get("index", 0)) if isinstance(task, dict) else (None, None)
    text = f"{NAME}: task {job}:{index}"
    if job not in (*_JOBS, *_FIRST):
        raise _problem(f"{text} is of no job of the cluster", did_you_mean(str(job), _JOBS))
    num_first = 1 if first else 0
    known = {first: 1, "worker": len(spec.worker) - num_first, "ps": len(spec.ps)}.get(job, 0)
    if type(index) is not int or not 0 <= index < known:
        largest = f"the last one is {job}:{known - 1}" if known else f"the cluster has no {job}"
        raise _problem(f"{text} does not exist; {largest}")
    return index + {first: 0, "worker": num_first, "ps": len(spec.worker)}[job]


def _problem(what: str, suggestion: str = "") -> EnvironmentProblem:
    return EnvironmentProblem(Problem(what, NAME, suggestion, f"unset {NAME}, if it is left over from another job"))
