"""`model=hf` as a user runs it: what a run can do after the directory of its model is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.cli.main import main
from parallelrun.data import open_dataset
from parallelrun.training.inference.generate import Generator, Sampling
from tests.cli.launcher import run_to_end
from tests.hugging_face_families import directory

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extras
PROMPT = [3, 17, 9]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model.path is no more, with checkpoints of its two steps."""
    folder = tmp_path_factory.mktemp("hf")
    shutil.copytree(directory("qwen3"), folder / "theirs")
    (folder / "theirs" / "tokenizer_config.json").write_text("{}")
    words = ["model=hf", "model.path=./theirs", "model.seq=24", "dataset=synthetic", "dataset.vocab=96", "dp=1",
             "global_batch=4", "steps=2", "checkpoint.every=2", "strategy=ddp", "optimizer.lr=0.05"]  # fmt: skip
    done = run_to_end(*words, f"runs={folder / 'runs'}", cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "theirs")
    return next((folder / "runs").glob("*/2*"))


def output(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def theirs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported directory of transformers."""
    out = tmp_path_factory.mktemp("out") / "exported"
    assert main(["export", str(run), str(out), "--format", "hf"]) == 0
    return out


def test_greedy_text_is_that_of_transformers(run: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(theirs).eval()
    wanted = module.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)[0, len(PROMPT) :].tolist()
    assert len(set(wanted)) > 1
    words = ("generate", str(run), f"tokens={PROMPT}", "max_tokens=20", "temperature=0")
    assert output(capsys, *words)["tokens"] == wanted
    assert json.loads(run_to_end(*words, "tp=2", "--json", cwd=run).stdout)["tokens"] == wanted
    assert list(Generator(open_source(run, "run")).tokens(PROMPT[::-1], 20, Sampling(0))) != wanted


def test_the_score_is_the_loss_of_transformers(run: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = output(capsys, "eval", str(run), "samples=6", "dataset=synthetic")
    source, module = open_source(run, "run"), transformers.AutoModelForCausalLM.from_pretrained(theirs).eval()
    val = open_dataset(source.config, source.spec).val
    samples = [[torch.from_numpy(each)[None] for each in val.sample(index)] for index in range(6)]
    with torch.no_grad():
        losses = [functional.cross_entropy(module(x).logits.flatten(0, 1), y.flatten()) for x, y in samples]
    assert scores["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert scores["targets"] == 6 * 24


def test_an_export_of_ours_describes_the_model_itself(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    assert main(["export", str(run), str(out), "--format", "safetensors"]) == 0
    assert (out / "model" / "tokenizer_config.json").is_file()
    first, second = open_source(run, "run"), open_source(out, "run")
    name = "module.model.layers.1.self_attn.q_norm.weight"
    assert torch.equal(first.weights.whole(name, (8,)), second.weights.whole(name, (8,)))


def test_it_resumes(run: Path) -> None:
    done = run_to_end("resume=latest", "steps=3", f"runs={run.parents[1]}", cwd=run)
    assert done.returncode == 0 and "step 3/3" in done.stderr + done.stdout, done.stderr
    copies = sorted(path.relative_to(path.parents[1]) for path in run.parents[1].glob("hf*/2*/model/*"))
    assert [str(copy) for copy in copies] == ["model/config.json"] * 2 + ["model/tokenizer_config.json"] * 2
