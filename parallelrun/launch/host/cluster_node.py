"""The place of this node in a job whose nodes a cluster has started, one process on each: Kubernetes, SkyPilot.

Unlike torchrun, srun and mpirun, they start no ranks: this process does (`cli/node.py`). Sources: torchrun's PET_*
variables, which Kubeflow Trainer sets in every pod (its plug-in torch); SkyPilot's documentation, "environment
variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.launch.host.environment import whole_number

PORT = 29500  # torchrun's


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
    nodes = environ.get("PET_NNODES") or environ.get("SKYPILOT_NUM_NODES") or "1"
    if nodes == "1":
        return None
    node = _of_torchrun(environ, visible_gpus) if environ.get("PET_NNODES") else _of_skypilot(environ)
    if node.index >= node.num_nodes:
        message = f"{node.source} says that this is node {node.index} of {node.num_nodes}, counted from 0"
        raise EnvironmentProblem(Problem(message, "node", command="env | grep -E 'PET_|SKYPILOT_'"))
    return node


def _of_torchrun(environ: Mapping[str, str], visible_gpus: int) -> Node:
    nodes = environ["PET_NNODES"]
    if ":" in nodes:
        message = f"PET_NNODES={nodes}: a number of nodes that may change needs torchrun"
        raise EnvironmentProblem(Problem(message, "PET_NNODES", command="torchrun -m parallelrun ..."))
    requested = environ.get("PET_NPROC_PER_NODE", "auto")
    if requested in ("auto", "gpu", "cpu"):
        per_node = 1 if requested == "cpu" else max(1, visible_gpus)
    else:
        per_node = whole_number(environ, "PET_NPROC_PER_NODE", minimum=1)
    port = whole_number(environ, "PET_MASTER_PORT", str(PORT), minimum=1)
    index, num_nodes = whole_number(environ, "PET_NODE_RANK"), whole_number(environ, "PET_NNODES", minimum=1)
    return Node(index, num_nodes, per_node, _text(environ, "PET_MASTER_ADDR"), port, "Kubernetes")


def _of_skypilot(environ: Mapping[str, str]) -> Node:
    address = _text(environ, "SKYPILOT_NODE_IPS").split()[0]
    gpus = whole_number(environ, "SKYPILOT_NUM_GPUS_PER_NODE", "0")
    index, num_nodes = whole_number(environ, "SKYPILOT_NODE_RANK"), whole_number(environ, "SKYPILOT_NUM_NODES")
    return Node(index, num_nodes, max(1, gpus), address, PORT, "SkyPilot")


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise EnvironmentProblem(Problem(f"{name} is not set", name, command=f"unset {name}"))
    return text
