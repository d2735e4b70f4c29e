"""Base classes of the jobs: settings of every scheduler, and how they fill its template."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, ClassVar

from parallelrun.base.errors import EXIT_PREEMPTED, Problem

if TYPE_CHECKING:
    from typing_extensions import Self

MOUNT = "/runs"  # of the runs, in a job whose nodes are rented or containers


@dataclass(frozen=True)
class JobFile(ABC):
    """Settings of a job, which fill TEMPLATE, the text of its file. gpus_per_node: 0 for a job on CPUs."""

    TEMPLATE: ClassVar[str]

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

    def illegal_names(
        self, names: Iterable[str], legal: re.Pattern[str], rule: str, fitting: Callable[[str], str]
    ) -> list[Problem]:
        """A problem for each of the settings `names` that is not `legal`. rule: what the message says."""
        values = {name: getattr(self, name) for name in names}
        wrong = {name: value for name, value in values.items() if value and not legal.fullmatch(value)}
        return [Problem(f"{name}={value!r}{rule}", name, f"{name}={fitting(value)}") for name, value in wrong.items()]

    @abstractmethod
    def fields(self, program: list[str]) -> dict[str, object]:
        """Fields of the template that are no settings, or have another text. program: the words that start a rank."""

    def text(self, command: Sequence[str], python: str, title: str, written_by: str) -> str:
        """The job's file. command: of `python -m parallelrun`; title: the plan; written_by: for readers."""
        program = [python, "-m", "parallelrun", *command]
        common = {
            "title": title,
            "written_by": written_by,
            "program": shlex.join(program),
            "gpus_per_node": self.gpus_per_node or "",
            "mount": MOUNT,
            "preempted": EXIT_PREEMPTED,
        }
        return filled(self.TEMPLATE, asdict(self) | common | self.fields(program))


def filled(template: str, fields: Mapping[str, object]) -> str:
    """Return the text of a template without the lines that have an empty field."""
    lines = [
        line
        for line in template.splitlines(keepends=True)
        if all(fields[name] != "" for _, name, _, _ in Formatter().parse(line) if name)
    ]
    return "".join(lines).format_map(fields)


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
        problems = []
        if self.nodes < 1:
            problems.append(Problem(f"nodes={self.nodes}: a job needs a node", "nodes", "nodes=1"))
        if self.ranks_per_node < 1:
            message = "the number of ranks on a node is not known"
            problems.append(Problem(message, "gpus_per_node", "gpus_per_node=8, or tasks_per_node=4 for a job on CPUs"))
        return problems
