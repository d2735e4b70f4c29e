"""What pages copy from the code is what the code says today."""

from __future__ import annotations

import html
import re

import pytest

from parallelrun.base import registry
from parallelrun.cli.main import main
from tests.unit.docs import DOCS, docs_module


def test_the_table_of_strategies_is_up_to_date() -> None:
    text = (DOCS.parent / "README.md").read_text()
    assert text == docs_module("strategies").page(text), "run `python docs/strategies.py`"


def test_the_table_has_every_strategy_with_its_file() -> None:
    rows = docs_module("strategies").rows()
    assert {f"{row.axis}.{row.kind}" for row in rows} == set(registry.STRATEGIES) - {"pipeline.none"}
    assert all(row.file.exists() and row.proof for row in rows)
    assert [row.kind for row in rows if not row.papers] == ["naive"]
    assert {name for row in rows for name in row.presets} >= {"ddp", "hsdp", "tp25d", "1f1b", "switch", "aux_free"}


def test_included_files_are_up_to_date() -> None:
    files = docs_module("included").files()
    assert files
    for path, content in files.items():
        assert path.read_text() == content, f"run `python docs/included.py`: {path.name} shows an older file"


def test_the_page_of_measurements_has_the_newest_campaign_of_failures() -> None:
    text = (DOCS / "measured.md").read_text()
    assert text == docs_module("failures").page(text), "run `PYTHONPATH=. python docs/failures.py`"


def test_the_first_run_explains_every_line_of_its_screen() -> None:
    """The first cells of the page's tables are on the picture of the screen, and no labelled line of it is left out."""
    page = (DOCS / "first_run.md").read_text()
    texts = re.findall(r">([^<]+)</text>", (DOCS / "run.svg").read_text())
    screen = [text for text in (" ".join(html.unescape(text).split()) for text in texts) if text]
    on_screen = {word.strip(",:") for text in screen for word in text.split()}
    cells = " ".join(re.findall(r"^\| (`.+?`) \|", page, re.M))
    explained = {word.strip(":") for name in re.findall(r"`(.+?)`", cells) for word in name.split()}
    assert explained - {"saving"} <= on_screen, explained - on_screen
    named = {word for name in re.findall(r"`(.+?)`", page) for word in name.split()}
    labels = {text for text in screen if re.fullmatch(r"[a-z_]+", text)}
    assert labels <= named, labels - named


def test_the_figure_of_layers_is_the_contract() -> None:
    contract = re.search(r"^layers = \[\n(.*?)^\]", (DOCS.parent / "pyproject.toml").read_text(), re.M | re.S)
    figure = re.search(r"<!-- layers -->\n```\n(.*?)```", (DOCS / "architecture.md").read_text(), re.S)
    assert contract is not None and figure is not None
    layers, lines = re.findall(r'"(.+)"', contract.group(1)), figure.group(1).splitlines()
    assert [line.partition("   ")[0] for line in lines] == layers


def test_the_architecture_is_short() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) < 1500


def test_the_figure_of_a_schedule_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "pipeline.md").read_text()
    figure = re.search(r"<!-- detail=schedule -->\n```\n(.*?)```", text, re.S)
    command = re.search(r"^parallelrun (plan .*detail=schedule)$", text, re.M)
    assert figure is not None and command is not None
    assert main(command.group(1).split()) == 0
    assert figure.group(1) in capsys.readouterr().out


def test_the_prediction_for_llama_3_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "goodput.md").read_text()
    shown = re.search(r"<!-- goodput -->\n```\n(.*?)```", text, re.S)
    command = re.search(r"^parallelrun (plan model=llama3_70b .*?)$", text.replace("\\\n", ""), re.M)
    assert shown is not None and command is not None
    assert main(command.group(1).split()) == 0
    assert shown.group(1) in capsys.readouterr().out
    slow = [word.replace("gb_s=2000", "gb_s=20") for word in command.group(1).split()]
    assert main(slow) == 0
    useful = float(capsys.readouterr().out.partition("goodput   ")[2].partition("%")[0])
    assert f"With storage of 20 GB/s it would be {useful:.0f} %" in text


@pytest.mark.slow
def test_the_waterfall_of_the_page_has_the_lines_that_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures follow the constants of the cluster; what is printed, and that the parts add up, stays."""
    text = (DOCS / "search.md").read_text()
    figure = re.search(r"<!-- waterfall -->\n```\n(.*?)```", text, re.S)
    command = re.search(r"^parallelrun (plan .*explain=true)$", text, re.M)
    assert figure is not None and command is not None
    assert main(command.group(1).split()) == 0
    printed = capsys.readouterr().out
    bars = [re.findall(r"^([a-z][a-z -]*?)  +(\d+\.\d+) .*[█▏▎▍▌▋▊▉]", one, re.M) for one in (figure.group(1), printed)]
    shown, now = (dict(one) for one in bars)
    assert shown.keys() == now.keys() and {"products", "bubble", "step"} <= shown.keys()
    for parts in (shown, now):
        assert sum(float(value) for name, value in parts.items() if name != "step") == pytest.approx(
            float(parts["step"])
        )
    for label in ("why: ", "limits", "memory"):
        assert all(re.search(rf"^{label}", one, re.M) for one in (figure.group(1), printed)), label
