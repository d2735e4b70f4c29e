"""Results of the Python API's functions: frozen dataclasses that notebooks can show. Only `model` imports torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.api.tables import Metrics, ResultTable, data_frame, html_text, notebook_table, plain_text
from parallelrun.base.errors import CheckpointError, ConfigError, Problem
from parallelrun.config.keys import named_code
from parallelrun.report.records.rows import RunRow
from parallelrun.report.records.run_differences import RunComparison

if TYPE_CHECKING:
    import pandas

    from parallelrun.config.compose import Composed
    from parallelrun.config.schema.run_schema import Config
    from parallelrun.models.network import Network
    from parallelrun.planner.contract.memory import Memory
    from parallelrun.planner.contract.plan import Plan
    from parallelrun.planner.facts.plan_facts import Facts
    from parallelrun.planner.search.result import Found, Search


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a configuration and its predictions.

    words: the overrides as they were given; run_root: the directory that they ask for.
    """

    plan: Plan
    config: Config
    words: tuple[str, ...]
    composed: Composed = field(repr=False)
    run_root: Path | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """pp, dp, tp, ep."""
        return self.plan.degrees

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.plan.world

    @cached_property
    def facts(self) -> Facts:
        """Everything that is computed about the plan."""
        from parallelrun.planner.facts.plan_facts import facts

        return facts(self.plan, self.config)

    @property
    def memory(self) -> Memory:
        """Bytes of the rank that needs most, by purpose."""
        return self.facts.memories[self.facts.heaviest_pp_rank]

    @property
    def fits(self) -> str:
        """Whether it fits a device's memory: yes | no | unknown."""
        from parallelrun.planner.predict.cluster_cost import fits

        return fits(self.memory, self.config.cluster)

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step; None where the cluster does not give the rates for it."""
        return self.facts.time.step_s if self.facts.time else None

    @property
    def warnings(self) -> list[str]:
        """The warnings of `parallelrun plan`."""
        from parallelrun.planner.facts.advice import warnings

        return list(warnings(self.plan, self.config, self.facts))

    def document(self) -> dict[str, Any]:
        """The JSON document of `parallelrun plan --json`."""
        from parallelrun.planner.facts.document import document

        return document(self.plan, self.config, self.facts)

    def text(self) -> str:
        """The screen of `parallelrun plan`, as plain text."""
        from parallelrun.report.plans import plan as report

        return plain_text(lambda console: report.show(self.plan, self.config, console, self.facts))

    def run(self, *, show: bool = False) -> Run:
        """Carry the plan out, as `parallelrun.run` does."""
        from parallelrun.api import load
        from parallelrun.api.launching import carry_out

        return load(carry_out(self.composed, self.words, self.run_root, show), trust=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(self.words)!r}, world={self.world}, degrees={self.degrees})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return html_text(self.text())


@dataclass(frozen=True)
class Run:
    """A run directory, read when it was loaded.

    state: running, done, failed, preempted, interrupted or unknown. summary: the values of summary.json (of
    verify.json, of bench.json), nested keys with dots; of a run without one, those that its steps give.
    checkpoint: the one that `model` reads; None if there is none. device: where `model` is placed;
    None: a GPU if there is one. trust: a user's module is built by its own code.
    """

    directory: Path
    state: str
    summary: Mapping[str, Any] = field(repr=False)
    metrics: Metrics = field(repr=False)
    checkpoint: Path | None = field(default=None, repr=False)
    device: str | None = field(default=None, repr=False)
    trust: bool = field(default=False, repr=False)

    @cached_property
    def config(self) -> Config:
        """The configuration with every value that the run used. Raises CheckpointError for a broken file."""
        from parallelrun.checkpoint.resume import saved_config
        from parallelrun.config.kept_model import with_kept
        from parallelrun.report.records.find import CONFIG

        config = saved_config(self.directory)
        if config is None:
            raise CheckpointError(Problem(f"{self.directory} has no {CONFIG}", "run"))
        return with_kept(config, self.directory)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run. Raises ConfigError if its model or data can no longer be planned."""
        from parallelrun.planner.resolve.resolve_config import resolve

        self._refuse_code()
        return resolve(self.config)

    @cached_property
    def model(self) -> Network:
        """The whole network on one device with the weights of `checkpoint`, in evaluation, without gradients.

        Any plan may have trained it. `run.model(tokens)` gives logits. Raises CheckpointError.
        """
        if self.checkpoint is None:
            raise CheckpointError(Problem(f"{self.directory} has no complete checkpoint", "run"))
        self._refuse_code()
        from parallelrun.checkpoint.exchange.source import open_source
        from parallelrun.training.inference.model import loaded

        source = open_source(self.checkpoint, "run", self.trust)
        source.weights.verify()
        return loaded(source, source.config, source.spec, on=self.device)

    def _refuse_code(self) -> None:
        """Raise ConfigError for a run of a user's code that is not trusted: its directory may be a stranger's."""
        if (code := named_code(self.config)) and not self.trust:
            cause = f"that run calls {', '.join(code.values())}, and a run directory may come from a stranger"
            raise ConfigError(Problem(cause, next(iter(code)), "load(..., trust=True)"))

    def text(self) -> str:
        """The run's origin and state as `parallelrun runs show` prints them, as plain text."""
        from parallelrun.report.records.read import read
        from parallelrun.report.records.rows import read_row
        from parallelrun.report.runs import run_list as report

        facts = read(self.directory), read_row(self.directory)
        return plain_text(lambda console: report.facts(*facts, console))

    def _repr_html_(self) -> str:
        return html_text(self.text())


@dataclass(frozen=True, repr=False)
class RunTable(ResultTable[RunRow]):
    """Run directories, the newest first, with state and results."""

    def row(self, item: RunRow) -> dict[str, Any]:
        from parallelrun.report.runs.run_list import document

        fields = document(item)
        return {**{key: value for key, value in fields.items() if key != "results"}, **item.results}


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep. state: done | skipped (refused before the start) | failed; reason: why it is not done."""

    overrides: tuple[str, ...]
    state: str
    run: Run | None = None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class SweepTable(ResultTable[SweepPoint]):
    """The points of a sweep in the order given."""

    def row(self, item: SweepPoint) -> dict[str, Any]:
        overrides = dict(text.lstrip("+~").partition("=")[::2] for text in item.overrides)
        results = item.run.summary if item.run else {}
        return {**overrides, "state": item.state, "reason": item.reason or None, **results}


@dataclass(frozen=True, repr=False)
class SearchTable(ResultTable["Found"]):
    """The fastest plans that fit, the fastest first. search: how many were compared, and what removed the others."""

    search: Search = field(repr=False)

    def row(self, item: Found) -> dict[str, Any]:
        return {
            "overrides": " ".join(item.overrides),
            "step_s": item.time.step_s if item.time else None,
            "tokens_per_s": item.tokens_per_s,
            "memory_bytes": item.heaviest_bytes,
            "fits": item.fits,
        }


@dataclass(frozen=True)
class ComparedRuns(RunComparison):
    """Differences between runs. The first column is the baseline; runs that differ only in the seed share a column."""

    def failures(self, *conditions: str) -> list[str]:
        """A text for each of `val_loss>+1%`, `tokens_per_s<-5%`, ... that holds. Raises ConfigError."""
        from parallelrun.report.records.fail_conditions import failures, parse

        return failures(self, [parse(text) for text in conditions])

    def markdown(self) -> str:
        """The Markdown text of `parallelrun compare --md`."""
        from parallelrun.report.runs.run_comparison import markdown

        return markdown(self, [])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each result, with its mean in every column."""
        labels = [column.label for column in self.columns]
        means = ([value.mean if value else None for value in row.values] for row in self.measures)
        return [{"result": row.key, **dict(zip(labels, values))} for row, values in zip(self.measures, means)]

    def to_pandas(self) -> pandas.DataFrame:
        """`rows` as a DataFrame. Raises EnvironmentProblem without pandas."""
        return data_frame(self.rows())

    def __repr__(self) -> str:
        runs = ", ".join(f"{column.label}: {column.runs[0].directory}" for column in self.columns)
        return f"{type(self).__name__}({runs})"

    def __str__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str | None:
        return notebook_table(self.rows())


def words_of(point: str | Sequence[str]) -> tuple[str, ...]:
    """The overrides of a sweep's point, which may be one text with spaces."""
    return tuple(shlex.split(point) if isinstance(point, str) else point)
