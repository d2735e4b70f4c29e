"""Imports go one way, and private names of torch stand in one file: the contracts in pyproject.toml, checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*|\bfrom torch[\w.]* import [^#\n]*\b_[a-z]\w*")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The package as it is installed: `strategies` inside `parallelrun`."""
    tree = tmp_path_factory.mktemp("imports")
    shutil.copytree(ROOT / "parallelrun", tree / "parallelrun", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "strategies", tree / "parallelrun" / "strategies")
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's command on that tree, and on no other installation."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        "from importlinter.cli import lint_imports_command as command; command(['--no-cache'])"
    )
    env = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, timeout=120)


def test_every_contract_is_kept(tree):
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_import_that_goes_up_is_found(tree):
    module = tree / "parallelrun" / "planner" / "pieces" / "batch.py"
    text = module.read_text()
    try:
        module.write_text(text + "\n\ndef broken():\n    from parallelrun.training.loop import step\n    return step\n")
        done = lint(tree)
    finally:
        module.write_text(text)
    assert done.returncode != 0 and "parallelrun.planner.pieces.batch -> parallelrun.training.loop.step" in done.stdout


def test_private_names_of_torch_stand_in_one_package():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("parallelrun", "strategies")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.name != "torch_private"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found, "\n".join(found)
