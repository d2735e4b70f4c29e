"""Base class of jobs for which the user gives the number of nodes and the ranks per node. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.errors import Problem


@dataclass(frozen=True)
class JobOnNodes:
    """nodes; gpus_per_node: 0 for a job on CPUs; tasks_per_node: ranks on a node (0: one for each GPU)."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 0

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def problems_of_nodes(self) -> list[Problem]:
        """Without nodes, or ranks on them, no job can be written."""
        found = []
        if self.nodes < 1:
            found.append(Problem(f"nodes={self.nodes}: a job needs a node", "nodes", "nodes=1"))
        if self.ranks_per_node < 1:
            what = "the number of ranks on a node is not known"
            found.append(Problem(what, "gpus_per_node", "gpus_per_node=8, or tasks_per_node=4 for a job on CPUs"))
        return found
