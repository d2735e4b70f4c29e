"""What the shell is answered at TAB: verbs, keys level by level, and the values that a key takes."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallelrun.cli.main import main
from parallelrun.cli.tools.completion import answer, is_asked
from parallelrun.config import presets


def ask(line: str, point: int | None = None) -> list[str]:
    return answer({"COMP_LINE": line, "COMP_POINT": str(len(line) if point is None else point)})


def test_verbs_tools_and_groups_are_offered_in_the_first_place():
    assert {"plan", "verify", "ls", "doctor", "model=", "strategy=", "tp="} <= set(ask("parallelrun "))
    assert ask("parallelrun pla") == ["plan"]
    assert {"strategy=", "strategy."} <= set(ask("parallelrun strat"))
    assert "plan" not in ask("parallelrun plan ")


@pytest.mark.parametrize("before", ["", "run ", "plan ", "verify model=gpt ", "bench -m tp=1,2 "])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("model.la", ["model.layers=", "model.label_smoothing="]),
        ("model.router.k", ["model.router.kind="]),
        (
            "strategy.",
            [
                "strategy.data.",
                "strategy.tensor.",
                "strategy.pipeline.",
                "strategy.expert.",
                "strategy.context.",
                "strategy.fill_order=",
            ],
        ),
        ("strategy.pipeline.p", ["strategy.pipeline.partition="]),
        ("optimizer.w", ["optimizer.warmup=", "optimizer.weight_decay="]),
        ("strategy=pt", ["strategy=ptdp"]),
        ("precision=b", ["precision=bf16"]),
        ("schedule=z", ["schedule=zero_bubble", "schedule=zbv"]),
        ("layout=2", ["layout=2d", "layout=2.5d"]),
        ("recipe=quick", ["recipe=quickstart"]),
        ("dataset=s", ["dataset=synthetic"]),
        ("recompute=", ["recompute=none", "recompute=selective", "recompute=full", "recompute=offload"]),
        ("compile=", ["compile=true", "compile=false"]),
        ("strategy.pipeline.kind=gp", ["strategy.pipeline.kind=gpipe"]),
        ("model.activation=r", ["model.activation=relu"]),
        ("strategy=ddp,gp", ["strategy=ddp,gpipe"]),
        ("++recompute=s", ["++recompute=selective"]),
        ("tp=", []),
        ("nosuch=", []),
        ("--js", ["--json"]),
    ],
)
def test_keys_and_values_are_completed_after_every_verb(before, typed, offered):
    assert set(ask(f"parallelrun {before}{typed}")) == set(offered)


def test_a_level_of_keys_is_offered_at_a_time():
    offered = ask("parallelrun model.")
    assert "model.layers=" in offered and "model.router." in offered
    assert not [key for key in offered if key.count(".") > 1 and not key.endswith(".")]
    assert not {"model.name=", "model.preset=", "model.description="} & set(offered)


def test_every_option_of_a_group_is_offered():
    assert ask("parallelrun strategy=") == [f"strategy={name}" for name in presets.options("strategy")]


def test_tools_complete_their_own_words():
    assert "gpt3_oneflow_3072" in ask("parallelrun show ")
    assert ask("parallelrun show quick") == ["quickstart"]
    assert ask("parallelrun ls str") == ["strategies"]


def test_tools_complete_their_words_one_after_the_other():
    assert ask("parallelrun recipes ") == ["ls", "cp", "validate"]
    assert ask("parallelrun recipes cp quick") == ask("parallelrun recipes validate quick") == ["quickstart"]
    assert ask("parallelrun recipes ls ") == [] and ask("parallelrun runs sh") == ["show"]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A user's folder with a model, a recipe, and groups of their own."""
    for name in ("model/tiny", "recipe/mine", "experiment/wide", "experiment/vision/small"):
        path = tmp_path / "own.d" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("layers: 2\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "folder", ["--config-dir own.d", "--config-dir=own.d", "-cd own.d", "hydra.searchpath=[file://own.d]"]
)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("model=ti", ["model=tiny"]),
        ("model=gpt,ti", ["model=gpt,tiny"]),
        ("recipe=min", ["recipe=mine"]),
        ("exp", ["experiment=", "experiment/vision="]),
        ("experiment=", ["experiment=wide"]),
        ("+experiment=w", ["+experiment=wide"]),
        ("experiment/vision=", ["experiment/vision=small"]),
    ],
)
def test_options_recipes_and_groups_of_the_users_folder_are_completed(own_folder, folder, typed, offered):
    found = [word for word in ask(f"parallelrun plan {folder} {typed}") if not word.startswith("explain")]
    assert found == offered
    assert not set(offered) & set(ask(f"parallelrun plan {typed}")), "without the folder"


def test_a_cursor_inside_the_line_counts():
    assert ask("parallelrun pla model=gpt", len("parallelrun pla")) == ["plan"]


def test_completion_is_asked_for_by_its_flag():
    assert is_asked(["-sc", "query=bash"]) and is_asked(["--shell-completion", "install=bash"])
    assert not is_asked(["plan"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script_that_is_installed(tmp_path):
    """The function that `-sc install=bash` prints, called as bash calls it."""
    program = Path(sys.executable).parent / "parallelrun"
    script = f"""
eval "$({program} -sc install=bash)"
COMP_LINE="{program} plan precision=b"; COMP_POINT=${{#COMP_LINE}}
COMP_WORDS=($COMP_LINE); COMP_CWORD=2
hydra_bash_completion
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["precision=bf16"], done


def test_what_each_shell_asks_is_answered(tmp_path, monkeypatch, capsys):
    """fish gives no COMP_POINT, and zsh asks as bash does; each prints a script that calls back with these words."""
    monkeypatch.setenv("COMP_LINE", "parallelrun plan precision=b")
    monkeypatch.delenv("COMP_POINT", raising=False)
    for shell in ("bash", "zsh", "fish"):
        assert main(["-sc", f"query={shell}"]) == 0
        assert capsys.readouterr().out.split() == ["precision=bf16"]
    assert main(["-sc", "install=fish"]) == 0
    script = capsys.readouterr().out
    assert "-sc query=fish" in script and "set -lx COMP_LINE (commandline -cp)" in script


def test_an_answer_imports_neither_torch_nor_hydra_and_is_quick():
    code = """
import os, sys
os.environ["COMP_LINE"] = "parallelrun strategy.pipeline.kind=g"
from parallelrun.cli.main import main
main(["-sc", "query=bash"])
print(sorted({"torch", "hydra", "omegaconf", "numpy"} & set(sys.modules)))
"""
    best = float("inf")
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.split() == ["strategy.pipeline.kind=gpipe", "[]"], done.stderr
        if best < 1.0:  # of processor time, which a crowded machine does not stretch much
            return
    raise AssertionError(f"{best:.2f} s")
