"""No command runs code that only a run directory names: it may come from a stranger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import parallelrun as pr
from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint.exchange import source
from parallelrun.cli import resume
from parallelrun.config.keys import CODE_KEYS
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.resolve.freeze import freeze
from parallelrun.report.page.document import page
from parallelrun.report.records.read import read
from tests.plans import tiny_config
from tests.run_files import write_run

RUN = "20260101T000000Z-aaaaaa"
MODELS = {"model": "module", "dataset": "gpt"}  # that read a key of the section


@pytest.fixture(params=CODE_KEYS)
def key(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that the code writes if it runs."""
    yield tmp_path / "owned"
    assert not (tmp_path / "owned").exists()


@pytest.fixture
def config(key: str, marker: Path, tmp_path: Path) -> Config:
    code = tmp_path / "theirs.py"
    code.write_text(f"open({str(marker)!r}, 'w')\ndef function(): pass\n")
    model = MODELS[key.partition(".")[0]]
    words = {"model.name": model, "model.preset": model, "pp": 2, key: f"{code}:function"}
    dataset = {"dataset.name": "custom"} if key.startswith("dataset") else {}
    return tiny_config({**words, **dataset})


@pytest.fixture
def directory(config: Config, tmp_path: Path) -> Path:
    run = write_run(tmp_path / "gpt-1f1b" / RUN)
    (run / "config.yaml").write_text(freeze(config))
    return run


def test_resuming_needs_it_named_again(config: Config, key: str) -> None:
    with pytest.raises(ConfigError, match="must be named on the command line"):
        resume._refuse_code(config, frozenset())
    resume._refuse_code(config, frozenset({key}))


def test_neither_weights_nor_a_plan_of_a_notebook_call_it(directory: Path) -> None:
    with pytest.raises(ConfigError, match="is not loaded from here"):
        source._saved(directory, directory, "run", trust=False)
    with pytest.raises(ConfigError, match="may come from a stranger"):
        _ = pr.load(directory).plan


def test_a_report_draws_no_schedule_of_it(directory: Path) -> None:
    assert "planning would call the run's code" in page([read(directory)], "theirs")
