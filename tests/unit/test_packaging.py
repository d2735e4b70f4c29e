"""The wheel holds every file of the four folders under `parallelrun`, and nothing else of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# folder of the repository -> its name when installed
FOLDERS = {
    "parallelrun": "parallelrun",
    "conf": "parallelrun/conf",
    "recipes": "parallelrun/recipes",
    "strategies": "parallelrun/strategies",
}


def files_of_the_repository() -> set[str]:
    found = set()
    for folder, installed in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".jsonl", ".typed") and "__pycache__" not in path.parts:
                found.add(f"{installed}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the checkout is left as it is, by the backend alone, so that no network is needed."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    code = f"import setuptools.build_meta as backend; backend.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_exactly_the_files_of_the_four_folders(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == files_of_the_repository()


def test_the_wheel_runs_from_anywhere(wheel, tmp_path):
    """Unpacked and put first on the path, it finds its own configuration, recipes and strategies."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        "import parallelrun; assert parallelrun.__file__.startswith(sys.argv[1]), parallelrun.__file__;"
        "from parallelrun.cli.main import main; sys.exit(main(['plan', '--json', 'recipe=quickstart']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and '"world": 4' in done.stdout, done.stderr


def test_the_console_script_is_the_program():
    (script,) = metadata.entry_points(group="console_scripts", name="parallelrun")
    assert script.value == "parallelrun.cli.main:main"


def test_the_version_is_said_once():
    import parallelrun

    assert metadata.version("parallelrun") == parallelrun.__version__
