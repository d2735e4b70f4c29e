"""Every command printed in README, the docs and the help texts is legal with its defaults."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelrun.base import registry
from parallelrun.cli import help as texts
from parallelrun.cli import search
from parallelrun.cli.help import TOOLS, VERBS
from parallelrun.cli.main import main
from parallelrun.cli.tools import calibrate
from parallelrun.config import keys
from parallelrun.config.schema import strategy_keys
from parallelrun.planner.resolve import shorthands
from tests import hugging_face_families, other_runners
from tests.cli.test_plugin import ENTRY_POINTS, PLUGIN, install
from tests.extras import needs
from tests.matrix import FULL, sparing
from tests.unit import other_nets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^|&& |-m |\()parallelrun ")
PLACEHOLDER = re.compile(r"\.\.\.|<|\b[A-Z]{3,}\b")  # `path=...`, `<recipe>`, `FILE`: no command to type as it is
# What bash runs in the place of every program: parallelrun tells its words, torchrun those of the module it starts.
PROGRAMS = r"""
tell() { printf '%s\0' "$@" >&3; printf '\n\0' >&3; }
parallelrun() { tell "$@"; }
torchrun() { while [ "$1" != parallelrun ]; do shift; done; shift; tell "$@"; }
pip() { :; }
pytest() { :; }
"""


def printed_lines() -> list[str]:
    """Every line that starts parallelrun: of code blocks and code spans, of the help's texts, as it is printed."""
    found = [line.split("  ")[0] for text in (texts.SHORT, texts.full()) for line in map(str.strip, text.splitlines())]
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL):
            found += re.sub(r"\\\n\s*", "", block).splitlines()
        found += re.findall(r"(?<!`)`(parallelrun [^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = {" ".join(line.split("\n")) for line in found if COMMAND.search(line)}
    return sorted(line for line in lines if not PLACEHOLDER.search(line.partition("#")[0]))


def as_the_shell_splits(lines: list[str]) -> list[list[str]]:
    """The words of each different call of parallelrun, read by bash itself: quotes, braces, patterns, comments."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        script = f"{PROGRAMS}exec 3>{shlex.quote(str(told))}\n" + "\n".join(lines)
        subprocess.run(["bash", "-e", "-c", script], cwd=folder, check=True, timeout=60, capture_output=True)
        records = told.read_bytes().decode().split("\n\0")
    return [list(words) for words in dict.fromkeys(tuple(record.split("\0")[:-1]) for record in records if record)]


def fewer_points(words: list[str]) -> list[str]:
    """A sweep over its longest list alone, with the last value of the others; with `--matrix=full` over all."""
    lists = [word for word in words if "-m" in words and re.fullmatch(r"[\w.]+=[\w.]+(,[\w.]+)+", word)]
    longest = max(lists, key=lambda word: word.count(","), default=None)
    others = [] if FULL else [word for word in lists if word != longest]
    return [re.sub("=.*,", "=", word) if word in others else word for word in words]


# tests/cli/test_resume.py, tests/unit/docs/test_pages.py, tests/unit/planner/search/test_cells.py
ELSEWHERE = {"resume=latest", "explain=true", "cells"}
CALLS = [words for words in as_the_shell_splits(printed_lines()) if not ELSEWHERE & {*words}]
PLANS = [words for words in CALLS if words and words[0] not in TOOLS and not words[0].startswith(("--", "-sc"))]
WITH_PLUG_INS = [
    words for words in PLANS if any(word.startswith(("hydra/launcher", "hydra/sweeper")) for word in words)
]
# Sweeps take as long as all their points, and searches as long as all plans.
SLOW = [words for words in PLANS if "-m" in words or any(word.startswith("cluster=") for word in words)]
WITH_TRANSFORMERS = [words for words in PLANS if {"model=hf", "recipe=finetune_chat"} & {*words}]
PLANNED = [words for words in PLANS if words not in WITH_PLUG_INS and words not in WITH_TRANSFORMERS]
MEASURED = [words[1:] for words in CALLS if words[:1] == ["calibrate"]]  # takes minutes: tests/cli/test_calibrate.py
NAMES = ("slurm",)  # without arguments a name in a sentence, not a command
OTHERS = [
    words
    for words in CALLS
    if words and words not in PLANS and words[0] not in ("tokenize", "calibrate") and " ".join(words) not in NAMES
]


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files that a page prints (a code block whose first line is `# net.py`), the plug-in of how_to_add.md, a
    calibration of this machine, and jobs of other runners."""
    tmp_path, monkeypatch = tmp_path_factory.mktemp("own"), pytest.MonkeyPatch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARALLELRUN_CONFIG", str(tmp_path / "own"))
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    text = (ROOT / "conf" / "cluster" / "a100_dgx.yaml").read_text()
    (tmp_path / "own" / "cluster" / "mine.yaml").write_text(text.replace("name: a100_dgx", "name: mine"))
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    shutil.copytree(PLUGIN / "conf", tmp_path / "conf")
    registry._plug_ins.cache_clear()
    other_runners.write(tmp_path)
    for name in ("torchvision", "torchvision.models"):  # whose networks these are like
        monkeypatch.setitem(sys.modules, name, other_nets)
    for page in PAGES:
        for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.DOTALL):
            (tmp_path / name).write_text(text)
    yield
    monkeypatch.undo()
    registry._plug_ins.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def no_plug_in_remains() -> Iterator[None]:
    """Forget the registered strategies and their keys: this process serves other files of tests, too."""
    _forget_plug_ins()
    yield
    _forget_plug_ins()


def _forget_plug_ins() -> None:
    for module in (registry, strategy_keys, keys, shorthands):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@pytest.mark.parametrize("words", sparing(PLANNED, SLOW), ids=" ".join)
def test_a_printed_command_is_legal(words: list[str], own_files, composed_once, capsys, monkeypatch) -> None:
    """Its rank among all plans, which takes most of the time, is not computed (tests/cli/test_search.py)."""
    monkeypatch.setattr(search, "ranked", lambda *of_plan: None)
    keeps_verb = words[0] in ("plan", "explain")
    rest = fewer_points(words[1:] if words[0] in VERBS else words)
    assert main([words[0] if keeps_verb else "plan", *rest]) == 0, capsys.readouterr().err


@needs("transformers")
@pytest.mark.parametrize("words", WITH_TRANSFORMERS, ids=" ".join)
def test_a_printed_command_for_a_model_of_transformers_is_legal(words: list[str], own_files, composed_once, capsys):
    shutil.copytree(hugging_face_families.directory("llama"), "my_llama", dirs_exist_ok=True)
    assert main(["plan", *words[words[0] in VERBS :], "model.hf.vocab_size=256"]) == 0, capsys.readouterr().err


@needs("hydra_plugins.hydra_joblib_launcher")
@needs("hydra_plugins.hydra_optuna_sweeper")
@pytest.mark.parametrize("words", WITH_PLUG_INS, ids=" ".join)
def test_a_printed_command_with_a_plug_in_of_hydra_works(words: list[str], tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert words[0] == "plan" and main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_a_printed_tool_command_works(words: list[str], own_files, capsys) -> None:
    assert main(words) == 0, capsys.readouterr().err
    if words[0] == "doctor":  # its exit code is 0 where CPU ranks have to use gloo, too
        assert "two ranks map each other's memory" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", MEASURED, ids=" ".join)
def test_a_printed_calibration_is_understood(words: list[str]) -> None:
    assert calibrate.parse(words)[1]["seconds"] > 0


def test_commands_are_found_in_every_page_that_has_them() -> None:
    assert len(PLANNED) >= 45 and len(OTHERS) >= 4
    assert ["plan", "model=gpt3_175b", "strategy=ptdp", "tp=8", "pp=64", "dp=6"] in PLANNED
    roles = [word for words in PLANNED for word in words if word.startswith("model.roles=")]
    assert roles and all('"*.[qkv]": column_parallel' in word for word in roles), "docs/own_module.md"
    assert any(words[0] == "explain" for words in PLANNED)


def test_the_readme_prints_the_commands_that_newcomers_need() -> None:
    text = (ROOT / "README.md").read_text()
    for command in ("model=gpt strategy=ptdp tp=2 pp=2", "verify", "bench", "plan", "torchrun", "doctor"):
        assert command in text
    assert re.search(r"^pip install .*&& pytest$", text, re.M), ".ci/run reads the test command from its line"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) < 80, "a cell of a table is longer than a line"


def test_the_plug_in_of_how_to_add_declares_the_entry_points_that_are_tested() -> None:
    text = (ROOT / "docs" / "how_to_add.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    declared = re.sub(r'project.entry-points."(\S+)"', r"\1", block).replace('"', "")
    assert [line for line in declared.splitlines() if line] == ENTRY_POINTS.splitlines()


OURS = ("parallelrun", "strategies", "tests", "benchmarks", "docs")  # folders; a page's `conf/` is the reader's


def test_every_file_that_a_page_or_a_strategy_names_exists() -> None:
    files = [path.relative_to(ROOT).as_posix() for name in OURS for path in (ROOT / name).rglob("*.py")]
    ends = {"/".join(file.split("/")[n:]) for file in files for n in range(file.count("/") + 1)}
    for page in [*PAGES, *(ROOT / "strategies").rglob("__init__.py")]:
        text = page.read_text()
        named = re.findall(r"`([\w/.]+\.py)`", text) + re.findall(rf"`((?:{'|'.join(OURS)})/[\w/.]+)`", text)
        printed = re.findall(r"```python\n# (\w+\.py)\n", text)
        missing = [name for name in named if name not in (*ends, *printed) and not (ROOT / name).exists()]
        links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        missing += [link for link in links if "://" not in link and not (page.parent / link).exists()]
        assert not missing, f"{page.relative_to(ROOT)} names {missing}"


def test_no_file_refers_to_documents_outside_the_repository() -> None:
    names = (r"design, section", r"[Tt]he design's", r"design\.md", r"\bshared/", r"words\.md", r"\breference/")
    outside = re.compile("|".join((*names, r"\((reference|reliability)\b[ \w]*, section")))
    folders = ("parallelrun", "strategies", "conf", "recipes", "docs", "benchmarks", "tests")
    files = [path for name in folders for ext in ("py", "md", "yaml") for path in (ROOT / name).rglob(f"*.{ext}")]
    for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]:
        if path != Path(__file__).resolve():
            assert not outside.search(path.read_text(encoding="utf-8", errors="replace")), path
