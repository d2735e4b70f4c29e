"""Compares the data of a checkpoint with those of the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_MISMATCH, CheckpointError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Dataset

CONTENT = "dataset"  # stands for the sha256 of the data
ALLOWED = "checkpoint.change_data"


def check_data(
    extra: Mapping[str, Any], dataset: Dataset, config: Config, path: Path, exit_code: int = EXIT_MISMATCH
) -> None:
    """Raise CheckpointError with everything that would give this run other samples, or the same ones at other steps,
    than the training of the checkpoint `path`, unless `checkpoint.change_data` allows it."""
    if config.checkpoint.change_data:
        return
    problems = [
        Problem(f"{_said(key, before, now)}: {path} was trained on other samples", key, _former(key, before))
        for key, (before, now) in data_changes(extra, dataset).items()
    ]
    if problems:
        fix = f"{ALLOWED}=true goes on with the new data; init.from={path} starts a new training from these weights"
        raise CheckpointError(*problems[:-1], replace(problems[-1], command=fix), exit_code=exit_code)


def data_changes(extra: Mapping[str, Any], dataset: Dataset) -> dict[str, tuple[Any, Any]]:
    """Return (value in the checkpoint, value now) of the settings that differ; if none does, of the data's sha256,
    which covers some settings too. What an older checkpoint does not record is not compared."""
    saved = extra.get("dataset") or {}
    if saved.get("name") not in (None, dataset.name):
        return {"dataset.name": (saved["name"], dataset.name)}
    now = dataset.settings
    before = saved.get("settings") or {key: extra[key] for key in ("seed",) if key in extra}
    changes = {key: (value, now.get(key)) for key, value in before.items() if value != now.get(key)}
    if not changes and saved.get("fingerprint") not in (None, dataset.fingerprint):
        changes[CONTENT] = saved["fingerprint"], dataset.fingerprint
    return changes


def _said(key: str, before: Any, now: Any) -> str:
    if key == CONTENT:
        return f"the data have sha256 {now}, and had {before}"
    return f"{key} is {_word(now)}, and was {_word(before)}"


def _former(key: str, before: Any) -> str:
    return "the data as they were" if key == CONTENT else f"{key}={_word(before)}"


def _word(value: Any) -> str:
    return json.dumps(value).strip('"')


def resumed_from(
    path: Path, extra: Mapping[str, Any], step: int, dataset: Dataset
) -> tuple[dict[str, Any], str | None]:
    """Return facts on the checkpoint for the manifest, and a warning if it was trained on other data, or if it does not
    record what `check_data` compares."""
    saved = extra.get("dataset") or {"name": None, "fingerprint": None}
    changes = data_changes(extra, dataset)
    facts = {
        "checkpoint": str(path),
        "step": step,
        "dataset": saved["name"],
        "dataset_sha256": saved["fingerprint"],
        "dataset_changed": bool(changes),
    }
    if changes:
        said = "; ".join(_said(key, *values) for key, values in changes.items())
        return facts, (
            f"THE DATA SET HAS CHANGED since {path} was saved: {said}. Training goes on with other samples than the "
            "uninterrupted run would have seen"
        )
    if "settings" not in saved:
        names = ", ".join(sorted(dataset.settings.keys() - {"seed", "dataset.name"}))
        return facts, f"{path} is of an earlier version, which did not record {names}: they are not compared"
    return facts, None


def check_tokenizer(extra: Mapping[str, Any], config: Config, path: Path) -> None:
    """Raise CheckpointError if the token ids of the checkpoint stand for other texts than those of this run's data."""
    before = (extra.get("dataset") or {}).get("tokenizer")
    now = definitions.dataset(config).tokenizer(config)
    if before is not None and now is not None and before != now.sha256:
        text = f"{path} was trained with the tokenizer of sha256 {before}; this run's {now.path or ''} has {now.sha256}"
        raise CheckpointError(Problem(text, where="dataset.tokenizer", suggestion="the tokenizer of that run"))
