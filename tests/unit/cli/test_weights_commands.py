"""Bad arguments of the commands that read weights: every problem at once, and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallelrun.cli.main import main

CASES = {
    "export": (["export", "NOWHERE", "FULL", "--shard-gb=0"], 2, ["no such checkpoint", "exists already", "-gb 0"]),
    "export's path": (["export", "NOWHERE", "new"], 4, ["no such checkpoint", "where: run"]),
    "export's directory": (["export", "MODEL", "FULL"], 3, ["exists already", "where: out"]),
    "import": (["import", "NOWHERE", "--to", "FULL"], 2, ["no such checkpoint", "exists already", "where: --to"]),
    "generate": (
        ["generate", "NOWHERE", "tokens=[x]", "top_k=0", "seed=-1", "top_p=1"], 2,
        ["no such checkpoint", "top_k=0: not a", "seed=-1: not a", "top_p=1 is none of", "tokens=[x]: not a list"],
    ),
    "eval": (
        ["eval", "NOWHERE", "split=test", "samples=0", "tp=2", "pp=2"], 2,
        ["no such checkpoint", "split=test: must be one of", "samples=0: not a whole", "samples, not tp, pp"],
    ),
}  # fmt: skip


def words_of(name: str, folder: Path) -> list[str]:
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "file").write_text("")
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    known = {"NOWHERE": "nowhere", "FULL": "full", "MODEL": "model"}
    return [str(folder / known[word]) if word in known else word for word in CASES[name][0]]


@pytest.mark.parametrize("name", CASES)
def test_every_problem_is_told_at_once(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, code, told = CASES[name]
    assert main(words_of(name, tmp_path)) == code
    said = capsys.readouterr().err
    assert [one for one in told if one not in said] == [], said


def test_they_are_told_without_torch(tmp_path: Path) -> None:
    calls = [words_of(name, tmp_path) for name in CASES]
    code = f"import sys\nfrom parallelrun.cli.main import main\nprint([main(words) for words in {calls!r}])\n"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == [str([code for _, code, _ in CASES.values()]), "False"], done.stderr
