"""The place of this node in a job whose nodes a cluster has started, one process on each: Kubernetes, SkyPilot.

Unlike torchrun, srun and mpirun, they start no ranks: this process does (`cli/node.py`). Sources: torchrun's PET_*
variables, which Kubeflow Trainer sets in every pod (its plug-in torch); SkyPilot's documentation, "environment
variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelrun.base.errors import EnvironmentProblem, Problem

PORT = 29500  # torchrun's
_MAX = 10**6


@dataclass(frozen=True)
class Node:
    """A node of a job. source: Kubernetes | SkyPilot; address, port: where rank 0 listens."""

    index: int
    num_nodes: int
    ranks_per_node: int
    address: str
    port: int
    source: str

    @property
    def first_rank(self) -> int:
        return self.index * self.ranks_per_node

    @property
    def world(self) -> int:
        return self.num_nodes * self.ranks_per_node


def detect(environ: Mapping[str, str], visible_gpus: int) -> Node | None:
    """Return this node's place in a job of several nodes; None if there is no such job.

    Raises EnvironmentProblem naming the variables that are missing or unreadable.
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):  # torchrun reads the same variables, and has started this rank
        return None
    if environ.get("PET_NNODES"):
        return _of_torchrun(environ, visible_gpus)
    if environ.get("SKYPILOT_NUM_NODES"):
        return _of_skypilot(environ)
    return None


def _of_torchrun(environ: Mapping[str, str], visible_gpus: int) -> Node | None:
    nodes = environ["PET_NNODES"]
    if ":" in nodes:
        message = f"PET_NNODES={nodes}: a number of nodes that may change needs torchrun"
        raise EnvironmentProblem(Problem(message, "PET_NNODES", command="torchrun -m parallelrun ..."))
    num_nodes = _number(environ, "PET_NNODES", 1)
    if num_nodes == 1:
        return None
    requested = environ.get("PET_NPROC_PER_NODE", "auto")
    if requested in ("auto", "gpu", "cpu"):
        per_node = 1 if requested == "cpu" else max(1, visible_gpus)
    else:
        per_node = _number(environ, "PET_NPROC_PER_NODE", 1)
    port = _number(environ, "PET_MASTER_PORT", 1) if environ.get("PET_MASTER_PORT") else PORT
    if not environ.get("PET_MASTER_ADDR"):
        raise _missing("PET_MASTER_ADDR")
    index = _number(environ, "PET_NODE_RANK", 0)
    return _checked(Node(index, num_nodes, per_node, environ["PET_MASTER_ADDR"], port, "Kubernetes"))


def _of_skypilot(environ: Mapping[str, str]) -> Node | None:
    num_nodes = _number(environ, "SKYPILOT_NUM_NODES", 1)
    if num_nodes == 1:
        return None
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    if not addresses:
        raise _missing("SKYPILOT_NODE_IPS")
    gpus = _number(environ, "SKYPILOT_NUM_GPUS_PER_NODE", 0) if environ.get("SKYPILOT_NUM_GPUS_PER_NODE") else 0
    index = _number(environ, "SKYPILOT_NODE_RANK", 0)
    return _checked(Node(index, num_nodes, max(1, gpus), addresses[0], PORT, "SkyPilot"))


def _checked(node: Node) -> Node:
    if node.index >= node.num_nodes:
        message = f"{node.source} says that this is node {node.index} of {node.num_nodes}, counted from 0"
        raise EnvironmentProblem(Problem(message, "node", command="env | grep -E 'PET_|SKYPILOT_'"))
    return node


def _number(environ: Mapping[str, str], name: str, minimum: int) -> int:
    text = environ.get(name, "")
    if not text:
        raise _missing(name)
    if not text.isdecimal() or not minimum <= int(text) <= _MAX:
        raise EnvironmentProblem(Problem(f"{name}={text} is not a whole number from {minimum}", name))
    return int(text)


def _missing(name: str) -> EnvironmentProblem:
    message = f"the variables of a job of several nodes are set, but {name} is not"
    return EnvironmentProblem(Problem(message, name, command="unset PET_NNODES SKYPILOT_NUM_NODES"))
