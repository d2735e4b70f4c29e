"""TF_CONFIG: the variable in which TensorFlow describes a cluster and the task of this process.

    TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["c:2222"]}, "task": {"type": "ps", "index": 0}}'

With a task, this process is one rank of the cluster, as under torchrun, and worker 0 (or the chief) serves the store at
its own address. Without a task, the variable only describes the cluster, like `cluster.worker=[...] cluster.ps=[...]`.
Source: TensorFlow's guide on distributed training ("TF_CONFIG").
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted, did_you_mean
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.pieces import cluster_spec
from parallelrun.planner.pieces.cluster_spec import ClusterSpec

NAME = "TF_CONFIG"
_CHIEFS = ("chief", "master")  # the names of the job whose one task is worker 0
_JOBS = ("worker", "ps", "chief")


def read_cluster(environ: Mapping[str, str]) -> tuple[ClusterSpec | None, int | None]:
    """Return the cluster of TF_CONFIG and the rank of its task, None if it has none. Raises EnvironmentProblem."""
    text = environ.get(NAME, "").strip()
    if not text:
        return None, None
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise _problem(f"{NAME} is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("cluster") or {}, dict):
        raise _problem(f'{NAME} is not of the form {{"cluster": {{...}}, "task": {{...}}}}')
    if not fields.get("cluster"):
        return None, None
    spec, chief = _spec(fields["cluster"])
    return spec, _rank(fields["task"], spec, chief) if fields.get("task") else None


def apply(config: Config, environ: Mapping[str, str]) -> Config:
    """Return `config` with TF_CONFIG's cluster, if it has one. Raises ConfigError if `config` names another cluster."""
    spec, _ = read_cluster(environ)
    if spec is None:
        return config
    for job in ("worker", "ps"):
        addresses, own = list(getattr(spec, job)), getattr(config.cluster, job)
        if own is not None and list(own) != addresses:
            message = f"cluster.{job}=[{','.join(map(str, own))}], but {NAME} names [{','.join(addresses)}]"
            raise ConfigError(Problem(message, f"cluster.{job}", f"leave cluster.{job} out", f"unset {NAME}"))
    cluster = replace(config.cluster, worker=list(spec.worker), ps=list(spec.ps) or None)
    return replace(config, cluster=cluster)


def refuse_other_hosts(config: Config, argv: Sequence[str], this_host: str) -> None:
    """Print each task's command and raise EnvironmentProblem if the cluster is not only on this host."""
    spec = cluster_spec.read(config, [])
    hosts = {cluster_spec.split(address)[0] for _, _, address in spec.tasks} if spec else set()
    if spec is None or hosts <= {*cluster_spec.THIS_HOST, this_host}:
        return
    words = [word for word in argv if not word.startswith(("cluster.ps=", "cluster.worker="))]
    cluster = {"worker": list(spec.worker)} | ({"ps": list(spec.ps)} if spec.ps else {})
    for job, index, address in spec.tasks:
        value = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}, separators=(",", ":"))
        print(f"{cluster_spec.split(address)[0]}: {shlex.join(['env', f'{NAME}={value}', 'parallelrun', *words])}")
    message = (
        f"the {spec} is on {counted(len(hosts), 'host')}, and parallelrun cannot start ranks on the others from here"
    )
    fix = "run each of the lines above on the host that it begins with"
    raise EnvironmentProblem(Problem(message, "cluster.worker, cluster.ps", command=fix))


def _spec(cluster: dict[str, Any]) -> tuple[ClusterSpec, str]:
    """Return the cluster, and the name of the chief's job; "" if there is no chief."""
    if "evaluator" in cluster:
        raise _problem(f"{NAME} has an evaluator; the workers evaluate themselves", "leave the evaluator out")
    for job, addresses in cluster.items():
        if job not in (*_JOBS, *_CHIEFS):
            raise _problem(f"{NAME}: no job is called {job!r}", did_you_mean(job, _JOBS))
        if not isinstance(addresses, list) or not addresses:
            raise _problem(f"{NAME}: {job} is not a list of host:port", f'"{job}": ["localhost:2222"]')
    chiefs = [job for job in _CHIEFS if job in cluster]
    if sum(len(cluster[job]) for job in chiefs) > 1:
        raise _problem(f"{NAME}: a cluster has at most one chief", "put the others among the workers")
    workers = [address for job in (*chiefs, "worker") for address in cluster.get(job, [])]
    problems: list[Problem] = []
    named = replace(Config().cluster, worker=workers or None, ps=cluster.get("ps"))
    spec = cluster_spec.read(replace(Config(), cluster=named), problems)
    if spec is None:
        raise EnvironmentProblem(*(replace(problem, where=NAME) for problem in problems))
    return spec, "".join(chiefs)


def _rank(task: Any, spec: ClusterSpec, chief: str) -> int:
    """Return the rank of a task: first the chief, then the workers, then the servers."""
    job, index = (task.get("type"), task.get("index", 0)) if isinstance(task, dict) else (None, None)
    text = f"{NAME}: task {job}:{index}"
    if job not in (*_JOBS, *_CHIEFS):
        raise _problem(f"{text} belongs to no job of the cluster", did_you_mean(str(job), _JOBS))
    num_chiefs = 1 if chief else 0
    ranks = {
        chief: range(num_chiefs),
        "worker": range(num_chiefs, len(spec.worker)),
        "ps": range(len(spec.worker), spec.world),
    }.get(job, range(0))
    if type(index) is not int or not 0 <= index < len(ranks):
        largest = f"the last one is {job}:{len(ranks) - 1}" if ranks else f"the cluster has no {job}"
        raise _problem(f"{text} does not exist; {largest}")
    return ranks[index]


def _problem(message: str, suggestion: str = "") -> EnvironmentProblem:
    return EnvironmentProblem(Problem(message, NAME, suggestion, f"unset {NAME}, if it is left over from another job"))
