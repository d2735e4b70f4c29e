"""Runs that the Python API starts: from a script, from a notebook, interrupted, failing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

import parallelrun as pr
from parallelrun.api import launcher, launching
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.launch.ranks import rank
from tests.cli.api_launcher import WarmProcess
from tests.extras import needs
from tests.unit import user_net

TINY = (
    "model=gpt", "model.layers=2", "model.hidden=32", "model.heads=2", "dataset=synthetic", "dataset.samples=64",
    "global_batch=4", "eval.every=0",
)  # fmt: skip

MODULE = (
    "model=module", f"model.source={user_net.__file__}:build", "model.seq=8", "model.hidden=16", "dataset=synthetic",
    "dataset.samples=64", "global_batch=4", "eval.every=0",
    'model.roles={embed.tokens: embedding, "layers.*.norm?": norm, "layers.*.[qkv]": column_parallel, '
    '"layers.*.out": row_parallel, "layers.*.fc1": column_parallel, "layers.*.fc2": row_parallel, head: head}',
)  # fmt: skip


@pytest.fixture
def warm(monkeypatch) -> None:
    """The launcher of the API is forked. A run that diverges, and a notebook, start it as a user's program does."""
    monkeypatch.setattr(launching, "_started", WarmProcess)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pr.Run:
    runs = tmp_path_factory.mktemp("api")
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setattr(launching, "_started", WarmProcess)
        run = pr.run(*MODULE, "tp=2", "steps=3", "checkpoint.every=2", f"runs={runs}")
    assert (out.getvalue(), errors.getvalue()) == ("", "")
    return run


def test_the_results_of_a_run_can_be_read(trained):
    assert trained.state == "done" and trained.metrics.column("step") == [1, 2, 3]
    assert trained.summary["loss"] == trained.metrics[-1]["loss"]
    assert trained.config.tp == 2 and trained.plan.degrees["tp"] == 2
    manifest = json.loads((trained.directory / "manifest.json").read_text())
    assert manifest["argv"][:4] == ["run", *MODULE[:3]]


def test_the_model_has_the_weights_of_the_named_checkpoint(trained):
    """A user's module, trained on two tensor-parallel ranks, on one device: it computes what the plain module does."""
    tokens = torch.arange(8).reshape(1, 8)
    plain = user_net.build(trained.plan.spec.vocab, 8, 16)
    logits = {}
    for step in (2, 3):
        model = pr.load(trained, step=step, device="cpu").model
        source = open_source(trained.directory / "checkpoints" / f"step_{step}", "run", trust=True)
        for name, parameter in plain.named_parameters():
            parameter.data.copy_(source.weights.whole(f"module.{name}", parameter.shape))
        logits[step] = model(tokens)
        torch.testing.assert_close(logits[step], plain(tokens))
    assert not torch.equal(logits[2], logits[3])
    stranger = pr.load(trained.directory)
    for attribute in ("model", "plan"):
        with pytest.raises(pr.ConfigError, match="a run directory may come from a stranger"):
            getattr(stranger, attribute)
    assert torch.equal(trained.model(tokens), logits[3]) and not trained.model.training
    with pytest.raises(pr.CheckpointError, match="there are step_2, step_3"):
        pr.load(trained, step=1)


def test_a_run_that_diverges_raises_its_exit_code_and_shows_its_output_if_asked(tmp_path, capsys):
    diverging = ("strategy=single", "steps=5", "optimizer=sgd", "optimizer.lr=1e30", "optimizer.clip=0")
    with pytest.raises(pr.RunFailed) as raised:
        pr.plan(*TINY, *diverging, f"runs={tmp_path}").run(show=True)
    error = raised.value
    assert error.exit_code == 5 and error.directory.parents[1] == tmp_path
    assert json.loads((error.directory / "status.json").read_text())["error"] in str(error)
    shown = capsys.readouterr()
    assert "step 1/5" in shown.out and "starting 1 rank" in shown.err
    with pytest.raises(pr.CheckpointError):
        _ = pr.load(error.directory).model


def test_what_keeps_a_run_from_starting_is_raised_as_its_own_error(tmp_path, monkeypatch):
    """The two ends of the pipe, in one process."""

    def in_this_process(order, answer):
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**order, "answer": os.dup(answer)})))
        launcher.main()
        return subprocess.Popen(["true"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    monkeypatch.setattr(launching, "_started", in_this_process)
    monkeypatch.setattr(rank, "leave_with_parent", lambda parent: None)
    with pytest.raises(pr.CheckpointError, match="no such checkpoint") as raised:
        pr.run(*TINY, f"runs={tmp_path}", f"resume={tmp_path / 'nosuch'}")
    assert raised.value.exit_code == 4 and raised.value.problems[0].where == "resume"


def test_under_another_launcher_nothing_is_started(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pr.ConfigError, match="torchrun has already started this process"):
        pr.run(*TINY, f"runs={tmp_path}")
    assert not list(tmp_path.iterdir())


def interrupt_when_running(runs: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(runs.glob("*/*/metrics.jsonl")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_stops_the_ranks(tmp_path, warm):
    threading.Thread(target=interrupt_when_running, args=(tmp_path,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        pr.run(*TINY, "tp=2", "steps=1000000", f"runs={tmp_path}")
    (run,) = pr.runs(tmp_path)
    status = json.loads((run.directory / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("interrupted", 130) and "interrupted at step" in status["error"]
    with pytest.raises(ProcessLookupError):
        os.kill(status["pid"], 0)


CELLS = (
    "import parallelrun as pr",
    "planned = pr.plan({words}, 'tp=2', 'steps=2'); planned",
    "run = planned.run(show=True)",
    "run.metrics",
    "import sys; print(run.state, len(run.metrics), run.model.training, 'hydra' in sys.argv[0])",
    "pr.runs({runs!r})",
)


@needs("nbclient")
def test_in_a_notebook(tmp_path):
    """Cells run in a kernel with threads and an own `__main__`; results are shown as HTML, output below the cell."""
    import nbclient
    import nbformat

    words = ", ".join(repr(word) for word in (*TINY, f"runs={tmp_path}"))
    cells = [cell.format(words=words, runs=str(tmp_path)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == [] and "plan: gpt" in outputs[1][0]["data"]["text/html"]
    assert "step 2/2" in "".join(one.get("text", "") for one in outputs[2])
    assert "<th>loss</th>" in outputs[3][0]["data"]["text/html"]
    assert outputs[4][0]["text"] == "done 2 False False\n"
    assert "gpt-ptdp-tp2" in outputs[5][0]["data"]["text/html"]
