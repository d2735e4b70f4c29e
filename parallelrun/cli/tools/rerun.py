"""`parallelrun runs rerun`: the same run again, from the configuration that it was started with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_MISMATCH, EXIT_OK, ConfigError, Problem
from parallelrun.base.wording import print_note
from parallelrun.config.keys import named_code
from parallelrun.launch.host.directory import code_fingerprint
from parallelrun.launch.host.environment import detect, num_cores
from parallelrun.report.records.find import CONFIG
from parallelrun.report.records.read import RunRecord, broken, read
from parallelrun.report.records.run_differences import compare
from parallelrun.report.runs.run_comparison import loss_text


def rerun(directory: Path, runs: Path, trust: bool, check: bool) -> int:
    """Repeat a run in a new directory below `runs`, and print whether its losses are the same bits.

    trust: its configuration may name code; check: exit 4 if the losses differ. Raises ConfigError, ParallelrunError.
    """
    before = read(directory)
    config = _config(directory, runs, trust)
    if detect(os.environ) is not None:
        cause = "rerun starts the ranks itself, and another launcher has started this process"
        raise ConfigError(Problem(cause, "command line", command=f"parallelrun recipe={directory / CONFIG}"))
    for note in _changes(before):
        print_note(f"note: {note}")
    from parallelrun.launch.entry.start import start
    from parallelrun.planner.resolve.resolve_config import resolve

    created: list[Path] = []
    words = ["runs", "rerun", str(directory), *(["--trust"] if trust else [])]
    overrides = [str(text) for text in before.manifest.get("overrides") or []]
    code = start(config, resolve(config), words, overrides, created=created.append, repeats=True)
    if code != EXIT_OK or not created:
        return code
    (losses,) = compare([before, read(created[0])]).losses
    print(loss_text(directory.name, replace(losses, label=created[0].name)))
    same = losses.num_common == len(before.rows) and losses.first_step is None
    return EXIT_MISMATCH if check and not same else EXIT_OK


def _config(directory: Path, runs: Path, trust: bool) -> Any:
    """The run's configuration, with its new directory below `runs`."""
    from parallelrun.planner.resolve.freeze import load_frozen

    try:
        config = load_frozen((directory / CONFIG).read_text(encoding="utf-8"))
    except ConfigError as error:
        problem = error.problems[0]
        raise broken(directory / CONFIG, problem.what, problem.where) from error
    except (OSError, ValueError) as error:
        raise broken(directory / CONFIG, str(error)) from error
    if (code := named_code(config)) and not trust:
        cause = f"that run calls {', '.join(code.values())}, and a run directory may come from a stranger"
        raise ConfigError(Problem(cause, next(iter(code)), command=f"parallelrun runs rerun {directory} --trust"))
    if config.resume and not Path(config.resume).exists():
        cause = f"the run resumed from {config.resume}, which is gone"
        raise broken(directory / CONFIG, cause, "resume")
    return replace(config, runs=str(runs))


def _changes(before: RunRecord) -> list[str]:
    """Return the changes of code, versions and machine since the run, any of which may change the losses."""
    import importlib.metadata
    import platform

    now: dict[str, Any] = {"code_sha256": code_fingerprint(), "platform": platform.platform(), "cores": num_cores()}
    for key in before.manifest:
        name = key.removeprefix("versions.")
        if name != key and name not in ("python", "parallelrun"):
            try:
                now[key] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                now[key] = "not installed"
    now["versions.python"] = platform.python_version()
    return [
        f"{key} is {str(value)[:40]}, and was {str(before.manifest[key])[:40]}: the losses may differ"
        for key, value in now.items()
        if key in before.manifest and before.manifest[key] != value
    ]
