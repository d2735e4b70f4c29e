"""The program as a user runs it: its own process, pipes, real ranks. Few tests, because each costs a second."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.launcher import run_to_end
from tests.matrix import FULL

TINY = [
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "model.seq=8",
    "eval.batches=1",
    "steps=1",
    "global_batch=4",
]


def run(*words: str, cwd: Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "parallelrun", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


MISTAKES_AND_PLANS = [
    (["tpp=8"], 2),
    (["model=gtp"], 2),
    (["plan", "tp=3"], 2),
    (["plan", "--json", "model=gpt3_175b", "tp=8", "pp=64", "dp=6"], 0),
    (["ls"], 0),
    (["show", "quickstart"], 0),
    (["runs", "ls", "--runs", "."], 0),
    (["compare", "no-such-run", "latest"], 2),
    (["--help"], 0),
    (["-m", "plan", "tp=1,2"], 2),
    (["plan", "-m", "--json", "tp=1,2"], 0),
    (["strategy=ddp", "dp=2", "init.from=/nosuch"], 4),
    (["strategy=ddp", "dp=2", "model=module", "model.source=./nosuch.py:f"], 2),
    (["strategy=ddp", "dp=2", "model=module", "model.source=nosuch.net:f"], 2),
    *([(["strategy=ddp", "dp=2", "device=cuda"], 3)] if version("torch").endswith("+cpu") else []),  # no GPU is visible
    (["explain", "strategy=ring", "world=4"], 0),
    (["explain", "--json", "model=moe_gpt", "strategy=gshard", "dp=2", "ep=2", "tp=2", "pp=2"], 0),
    (["explain", "-m", "strategy=ring,ps", "world=4"], 2),
]


# What a plan without a search, without `detail=` and without a predicted time has no use for.
UNUSED = (
    "torch",
    *(f"parallelrun.planner.search.{name}" for name in ("fastest_plans", "space", "first_pass", "crossovers")),
    "parallelrun.report.plans.plan_details",  # `explain` draws the schedule by it
)


def test_neither_a_mistake_nor_a_plan_imports_torch_or_searches_or_writes(tmp_path):
    """One after the other in one process: what one has imported would stay imported."""
    code = f"""
import sys
import time
from contextlib import suppress
from pathlib import Path
from parallelrun.cli.main import main
for words, expected in {MISTAKES_AND_PLANS!r}:
    code = main(words)
    unused = {UNUSED!r}[: -1 if words[0] == "explain" else None]
    print(words, code == expected, [name for name in sys.modules if name.startswith(unused)],
          list(Path().iterdir()), file=sys.stderr)
"""
    done = python(code, tmp_path)
    told = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert told == [f"{words} True [] []" for words, _ in MISTAKES_AND_PLANS], done.stderr


# (words, environment, processor seconds, or else so many times the import of Hydra just after: a crowded machine
# stretches both, though not equally, so the factors are about twice those of an idle one; torch alone would be eight)
QUICK = {
    "misspelt key": (["tpp=8"], {}, 0.2, 2.4),
    "misspelt model": (["model=gtp"], {}, 0.35, 4.0),
    "illegal degree": (["plan", "tp=3"], {}, 0.35, 5.0),
    "unknown recipe": (["recipe=nosuch"], {}, 0.35, 4.0),
    "3072 ranks": (["plan", "model=gpt3_175b", "strategy=ptdp", "tp=8", "pp=64", "dp=6"], {}, 0.5, 6.0),
    "completion": (["-sc", "query=bash"], {"COMP_LINE": "parallelrun strategy.data.", "COMP_POINT": "26"}, 0.2, 2.4),
}


@pytest.mark.parametrize("name", QUICK if FULL else ["misspelt key", "3072 ranks", "completion"])
def test_mistakes_plans_and_completion_are_quick(name, tmp_path):
    words, environment, seconds, times = QUICK[name]
    tried = []
    for _ in range(4):
        ours = _processor_seconds([sys.executable, "-m", "parallelrun", *words], tmp_path, environment)
        hydras = _processor_seconds([sys.executable, "-c", "import hydra"], tmp_path, {})
        if ours < seconds or ours < times * hydras:
            return
        tried.append((ours, hydras))
    raise AssertionError(f"(processor seconds of the command, of `import hydra`) {tried}")


def test_a_run_shares_memory_and_uses_the_directory_that_was_asked_for_and_no_other(tmp_path):
    """Only what a rank changes is its own: without `gc.freeze`, or with an import after the fork, it is far more.

    Nothing is compiled, so nobody spends half a second on importing the compiler.
    """
    words = ["hydra.run.dir=out", "model.layers=2", *TINY[1:-2], "steps=15", TINY[-1]]
    command = [sys.executable, "-m", "parallelrun", "pp=2", *words]
    own, total = [0], [0]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    with (
        open(tmp_path / "stderr", "w") as stderr,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as process,
    ):
        while process.poll() is None:
            time.sleep(0.1)
            for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                with suppress(OSError):  # it has just ended
                    text = Path(f"/proc/{rank}/smaps_rollup").read_text()
                    sizes = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
                    own.append(sizes["Private_Dirty:"] + sizes["Private_Clean:"])
                    total.append(sizes["Rss:"])
    assert process.returncode == 0 and max(total) > 200 * 1024
    assert max(own) < 64 * 1024, f"{max(own)} KiB of {max(total)} KiB"
    imports = [(tmp_path / name).read_text().splitlines() for name in ("stderr", "out/logs/rank_1.log")]
    assert not [line for line in itertools.chain(*imports) if "torch._dynamo" in line]
    assert len(imports[0]) > 1000 and not [line for line in imports[1] if line.startswith("import time:")]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stderr"}
    assert not (tmp_path / "out" / ".hydra").exists()
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "done"
    again = run_to_end("strategy=single", *words, cwd=tmp_path)
    assert again.returncode == 3 and "holds another run" in again.stderr


def _processor_seconds(command: list[str], cwd: Path, environment: dict[str, str]) -> float:
    """With compiled modules kept, as in any installation: the first of several calls may have to compile them."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | environment
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=cwd, capture_output=True, timeout=60, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    command = f"{sys.executable} -m parallelrun plan --json recipe=gpt3_oneflow_3072 | head -c 10"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and len(done.stdout) == 10


def test_a_plan_prints_without_home_terminal_or_unicode(tmp_path):
    done = run(
        "plan", "tp=2", "pp=2", cwd=tmp_path, HOME="/nonexistent", TERM="dumb", LANG="C", PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0 and done.stderr == "" and "tp" in done.stdout


def test_a_sweep_with_real_ranks(tmp_path):
    done = run_to_end("-m", "strategy=single,ddp,tp", "world=2", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (directory,) = (tmp_path / "runs").glob("sweep-*")
    rows = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows] == ["skipped", "done", "done"]
    assert rows[1]["loss"] == pytest.approx(rows[2]["loss"], rel=1e-5)  # the same model, data and weights
    for row in rows[1:]:
        assert json.loads((directory / row["directory"] / "status.json").read_text())["state"] == "done"
    assert {path.name for path in directory.iterdir()} == {
        "results.jsonl", "results.csv", "comparison.svg", "comparison.csv", rows[1]["directory"], rows[2]["directory"],
    }  # fmt: skip
    assert "strategy=tp" in done.stdout and "results.csv" in done.stdout


def test_the_doctor_finds_this_machine_usable(tmp_path):
    done = run_to_end("doctor", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert done.returncode == 0 and document["usable"], document
    assert states["all-reduce"] == states["gloo"] == "pass"
    assert {"python", "torch", "nccl", "gpus", "cores", "memory", "/dev/shm", "ulimit"} <= set(states)
