"""The Python API: `import parallelrun as pr; pr.plan("model=gpt", "tp=2")`. docs/python.md shows all of it.

The functions take the overrides of the command line as texts, print nothing unless asked, and raise the errors of
`parallelrun.base.errors`, with all violations of a plan in `error.problems`. A run's ranks are processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parallelrun.base.errors import EXIT_CONFIG, ConfigError, EnvironmentProblem, Problem, RunFailed

if TYPE_CHECKING:
    from parallelrun.api.results import ComparedRuns, PlannedRun, Run, RunTable, SearchTable, SweepPoint, SweepTable

PathText = str | os.PathLike[str]


def plan(*overrides: str, config_dir: PathText | None = None, trust: bool = False) -> PlannedRun:
    """Return the plan of a configuration, with what is predicted about it. Starts no process, imports no torch.

    overrides: as on the command line, `"model=gpt", "tp=2"`. config_dir: a folder with options of your own, as
    `--config-dir`. trust: a recipe may name code. `strategy=auto` chooses the fastest plan by a search. Raises
    ConfigError with every violation.
    """
    return _planned("plan", overrides, config_dir, trust)


def run(*overrides: str, config_dir: PathText | None = None, trust: bool = False, show: bool = False) -> Run:
    """Train, and return the run when it has ended.

    overrides, config_dir, trust: as for `plan`. show: write what the run prints to sys.stdout and sys.stderr.
    KeyboardInterrupt (in a notebook: the stop button) stops the ranks. Raises ConfigError and EnvironmentProblem before
    anything is started, RunFailed with `exit_code` and `directory` afterwards.
    """
    return _planned("run", overrides, config_dir, trust).run(show=show)


def verify(*overrides: str, config_dir: PathText | None = None, trust: bool = False, show: bool = False) -> Run:
    """Train a few steps under the plan and on one device, and compare everything; `summary` has the errors.

    Arguments and errors: as for `run`. Raises RunFailed with exit code 4 if the two differ.
    """
    return _planned("verify", overrides, config_dir, trust).run(show=show)


def bench(*overrides: str, config_dir: PathText | None = None, trust: bool = False, show: bool = False) -> Run:
    """Time steps; `summary` has `median_s` and its spread. Arguments and errors: as for `run`."""
    return _planned("bench", overrides, config_dir, trust).run(show=show)


def sweep(
    points: Iterable[str | Sequence[str]],
    *overrides: str,
    config_dir: PathText | None = None,
    trust: bool = False,
    show: bool = False,
) -> SweepTable:
    """Run each of `points` (`["strategy=ddp", "strategy=tp lr=0.1"]`), all with `overrides`, one after the other.

    A point that is illegal is `skipped`, one that fails is `failed`; both with their reason, and the sweep goes on.
    """
    from parallelrun.api.results import SweepTable, words_of

    wanted = [(words_of(point), (*overrides, *words_of(point))) for point in points]
    return SweepTable(tuple(_point(own, words, config_dir, trust, show) for own, words in wanted))


def search(*overrides: str, keep: int = 10, config_dir: PathText | None = None, trust: bool = False) -> SearchTable:
    """Search all plans of a model on a cluster for the fastest that fit: `"model=llama3_8b", "cluster=h100_dgx"`.

    keep: plans that are returned. Raises ConfigError if none fits, or the cluster lacks rates.
    """
    from parallelrun.api.composing import composed
    from parallelrun.api.results import SearchTable
    from parallelrun.launch.host.environment import visible_gpus
    from parallelrun.planner.search import device_counts as sizes
    from parallelrun.planner.search import open_keys as chosen
    from parallelrun.planner.search import requested_searches as searches

    request, _ = composed("plan", overrides, config_dir, trust)
    if fixed := [key for key in chosen.CHOSEN if key in request.given and not request.config.strategy.searches]:
        raise ConfigError(Problem(f"{fixed[0]} says what to plan, and a search chooses it", fixed[0]))
    gpus = visible_gpus()
    config, _ = chosen.calibrated(request.config, request.given, gpus)
    if sizes.compares_sizes(config):
        result = sizes.compared(config, request.given, keep)[1].found
    else:
        result = searches.searched(config, request.given, chosen.num_devices(config, None, gpus), gpus, keep)
    return SearchTable(result.best[:keep], result)


def load(
    run: Run | PathText,
    *,
    step: int | None = None,
    device: str | None = None,
    trust: bool = False,
    runs: PathText = "runs",
) -> Run:
    """Return a run: a directory, `latest`, or a name or random end of a directory's name below `runs`.

    step: of the checkpoint that `model` reads, by default the last one. device: where `model` is placed, by default a
    GPU if there is one. trust: a user's module may be built by the code that the run names, as after `run`, whose code
    the caller has named. Raises ConfigError for no such run, CheckpointError for no such step.
    """
    from parallelrun.api.results import Run
    from parallelrun.api.tables import Metrics
    from parallelrun.base.errors import CheckpointError
    from parallelrun.checkpoint.find import FOLDER, complete_steps, step_name
    from parallelrun.report.records.read import read

    trust = trust or (isinstance(run, Run) and run.trust)
    record = read(_directory(run, runs))
    steps = complete_steps(record.directory) if (record.directory / FOLDER).is_dir() else {}
    if step is not None and step not in steps:
        there = f"there are {', '.join(map(step_name, steps)) or 'none'}"
        raise CheckpointError(Problem(f"{record.directory} has no checkpoint {step_name(step)}; {there}", "step"))
    checkpoint = steps.get(max(steps, default=0) if step is None else step)
    return Run(record.directory, record.state, record.results, Metrics(record.rows), checkpoint, device, trust)


def runs(folder: PathText = "runs", *, state: str | None = None, limit: int | None = None) -> RunTable:
    """Return the runs in a folder, the newest first. state: only those in it; limit: so many at most."""
    from itertools import islice

    from parallelrun.api.results import RunTable
    from parallelrun.report.records import find
    from parallelrun.report.records.rows import EMPTY, read_row

    rows = (read_row(path) for path in find.all_runs(Path(folder).expanduser()))
    wanted = (row for row in rows if row.state != EMPTY and state in (None, row.state))
    return RunTable(tuple(islice(wanted, limit)))


def compare(*several: Run | PathText, runs: PathText = "runs") -> ComparedRuns:
    """Return what differs between runs, and what came out. The first one is the baseline.

    several: at least two, each as for `load`. Raises ConfigError for no such run.
    """
    from parallelrun.api.results import ComparedRuns
    from parallelrun.report.records.read import read
    from parallelrun.report.records.run_differences import compare as compared

    directories = list(dict.fromkeys(_directory(run, runs) for run in several))
    if len(directories) < 2:
        raise ConfigError(Problem(f"compare needs two different runs at least, got {len(directories)}", "runs"))
    comparison = compared([read(directory) for directory in directories])
    return ComparedRuns(**vars(comparison))


def _directory(run: Run | PathText, runs: PathText) -> Path:
    from parallelrun.api.results import Run
    from parallelrun.report.records import find

    return run.directory if isinstance(run, Run) else find.single_run(os.fspath(run), Path(runs).expanduser())


def _planned(verb: str, overrides: Sequence[str], config_dir: PathText | None, trust: bool) -> PlannedRun:
    from parallelrun.api.composing import composed
    from parallelrun.api.results import PlannedRun
    from parallelrun.cli.planned import planned

    request, run_root = composed(verb, overrides, config_dir, trust)
    request, plan_of_run = planned(request, verb, None, quiet=True)
    if verb == "plan":  # `plan(...).run()` carries it out
        request = replace(request, config=replace(request.config, verb="run"))
    words = (verb if verb != "plan" else "run", *overrides)
    return PlannedRun(plan_of_run, request.config, words, request, run_root)


def _point(
    own: tuple[str, ...], words: Sequence[str], config_dir: PathText | None, trust: bool, show: bool
) -> SweepPoint:
    from parallelrun.api.results import SweepPoint

    try:
        return SweepPoint(own, "done", run(*words, config_dir=config_dir, trust=trust, show=show))
    except (ConfigError, EnvironmentProblem) as error:
        return SweepPoint(own, "skipped", reason=str(error))
    except RunFailed as error:
        state = "skipped" if error.exit_code == EXIT_CONFIG else "failed"
        return SweepPoint(own, state, load(error.directory) if error.directory else None, str(error))
