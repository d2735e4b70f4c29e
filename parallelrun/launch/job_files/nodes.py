"""Base classes of the jobs: what the user may ask of every scheduler. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallelrun.base.errors import Problem

if TYPE_CHECKING:
    from typing_extensions import Self

MOUNT = "/runs"  # of the runs, in a job whose nodes are rented or containers


@dataclass(frozen=True)
class JobFile(ABC):
    """Settings of a job. gpus_per_node: 0 for a job on CPUs."""

    nodes: int = 1
    gpus_per_node: int = 0
    job_name: str = ""

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @staticmethod
    def fitting(name: str) -> str:
        """A name that the scheduler takes, like this one of a run."""
        return name

    def named(self, name: str) -> Self:
        """This job with the name of a run."""
        return replace(self, job_name=self.fitting(name))

    def words(self) -> list[str]:
        """The words that the run needs in this place: where all nodes see its directory."""
        return [f"runs={MOUNT}"]

    @abstractmethod
    def problems(self) -> list[Problem]:
        """Every setting that the scheduler would refuse, and those without which no job can be written."""

    @abstractmethod
    def text(self, command: Sequence[str], python: str, title: str, written_by: str) -> str:
        """The job's file. command: of `python -m parallelrun`; title: the plan; written_by: for readers."""


@dataclass(frozen=True)
class JobOnNodes(JobFile):
    """tasks_per_node: ranks on a node (0: one for each GPU)."""

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
