"""Bad input: every mistake is said at once, with a fix, and nothing hangs or leaves a run directory."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

from parallelrun.cli.main import main
from strategies.tensor.megatron import checks
from tests.matrix import FULL
from tests.unit.bad_input import Case, draw, write_files

STARTS = (
    "parallelrun.launch.entry.start._launch", "parallelrun.launch.entry.attach.lead",
    "parallelrun.launch.entry.attach.follow", "parallelrun.launch.over_ssh.ssh.run",
    "parallelrun.cli.tools.doctor.examine", "parallelrun.cli.tools.calibrate._calibrate",
)  # fmt: skip


class Accepted(BaseException):
    """The command would start ranks."""


def answer(case: Case) -> tuple[int | None, str]:
    """Return (the exit code, None if accepted; what stderr got)."""
    screen, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors):
            code: int | None = main(list(case.words))
    except Accepted:
        code = None
    except BaseException:
        code = -1
        errors.write(traceback.format_exc())
    return code, errors.getvalue() or "\n".join(re.findall(r".*skipped: .*", screen.getvalue()))


def defects(case: Case, code: int | None, stderr: str, has_torch: bool) -> list[str]:
    """Return what is wrong with an answer."""
    defects = [f"exit {code}"] if code not in (None, 0, 2, 3, 4) else []
    if "Traceback" in stderr or "unexpected:" in stderr:
        defects.append("traceback")
    if code not in (2, 3, 4):
        return defects
    errors = re.split(r"^error: ", stderr, flags=re.MULTILINE)[1:]
    if not errors and not re.search(r"usage: |skipped: |\Aparallelrun ", stderr):
        defects.append("no error: line")
    defects += [f"does not name {name}" for name in case.names if name not in stderr]
    if errors and not case.is_file and not any(re.search(r"did you mean: |try: ", error) for error in errors):
        defects.append("no fix")
    if has_torch and not case.may_torch:
        defects.append("imported torch")
    return defects


def run_directories(folder: Path) -> set[Path]:
    return {file.parent for name in ("status.json", "manifest.json") for file in folder.rglob(name)}


@pytest.fixture
def nothing_starts(monkeypatch):
    for name in STARTS:
        monkeypatch.setattr(name, mock.Mock(side_effect=Accepted))


def said(words: str, capsys) -> str:
    assert main(words.split()) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("steps=x seed=-1", ["steps=x", "seed=-1"]),
        ("model=gtp strategy=fdsp dropout=2 tp=0", ["model=gtp", "strategy=fdsp", "dropout=2", "tp=0"]),
        ("recipe=quikstart tracker=zz layout=9d", ["recipe=quikstart", "tracker=zz", "layout=9d"]),
        ("--nosuch micro_batch=-1 optimizer.betas=[2]", ["--nosuch", "micro_batch=-1", "optimizer.betas"]),
        ("pp=0 micro_batch=-1", ["pp=0", "micro_batch=-1"]),
        ("model.layers=99999999 pp=0 seed=-1", ["model.layers", "pp=0", "seed=-1"]),
        ("profile=[0] steps=0", ["profile", "steps=0"]),
        ("gpus=0 timeout_s=nan", ["gpus=0", "timeout_s=nan"]),
        ("model.layers=0 dp=0 steps=0", ["model.layers", "dp=0", "steps=0"]),
        ("model=moe_gpt dp=6 ep=4 model.router.top_k=9", ["ep=4", "model.router.top_k=9"]),
    ],
)
def test_the_mistakes_of_all_stages_are_said_at_once(words, names, capsys):
    text = said(words, capsys)
    assert [name for name in names if f"error: {name}" not in text] == []


def test_what_depends_on_a_wrong_key_is_not_said(capsys):
    text = said("strategy=pps servers=1 staleness=2 nosuch=1", capsys)
    assert text.count("error: ") == 2, text


def test_an_option_of_the_users_own_folder_is_no_mistake(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: gpt\n")
    text = said(f"--config-dir {tmp_path} model=mine tp=x", capsys)
    assert text.count("error: ") == 1, text


def test_a_hopeless_degree_is_refused_without_trying_every_other_one(monkeypatch, capsys):
    tried, fits = [], checks._fits
    monkeypatch.setattr(checks, "_fits", lambda spec, tp, wanted: tried.append(tp) or fits(spec, tp, wanted))
    assert "tp=4" in said("plan strategy=tp tp=1000000", capsys)
    assert len(tried) < 1000  # there were four million, in half a minute


def test_a_host_file_that_never_ends_is_not_read(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    assert "cannot be read" in said(f"--hostfile {tmp_path / 'fifo'}", capsys)
    assert "cannot be read" in said("--hostfile /dev/zero", capsys)


def test_a_home_that_does_not_exist_is_a_wrong_path(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text\n" * 99)
    assert "begins with ~" in said("strategy=single dataset=text path=a.txt tokenizer=~nosuch/x", capsys)


def test_a_sweep_says_what_is_wrong_with_it(capsys):
    assert "has no points" in said("plan -m tp=glob(*)", capsys)
    main(["plan", "-m", "strategy=single,ddp", "strategy.name=${oc.env:NOSUCH_VARIABLE}"])
    assert "skipped: the environment variable NOSUCH_VARIABLE is not set" in capsys.readouterr().out


def test_drawn_commands_are_refused_well(tmp_path, monkeypatch, nothing_starts):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    had_torch = "torch" in sys.modules
    for seed in range(1200 if FULL else 24):
        case, before = draw(seed), run_directories(tmp_path)
        code, stderr = answer(case)
        assert defects(case, code, stderr, "torch" in sys.modules and not had_torch) == [], (case, stderr)
        assert code is None or run_directories(tmp_path) == before, case


def test_a_bad_answer_is_noticed():
    case = Case("", ("tp=x", "dp=y"), ("tp", "dp"))
    assert defects(case, 2, "error: tp=x\n  did you mean: tp=1\n", False) == ["does not name dp"]
    assert defects(case, 2, "error: tp=x, dp=y\n", False) == ["no fix"]
    assert defects(case, 1, "Traceback", False) == ["exit 1", "traceback"]
    assert "imported torch" in defects(case, 2, "error: tp dp\n  try: x", True)


@pytest.mark.parametrize(
    ("key", "value", "takes", "first"),
    [
        ("profile", "${steps}", "a list", "the value is 3"),
        ("tracker.use", "${name}", "a list", "the value is 'x'"),
        ("tracker.use", "${model}", "a list", "the value is ModelConfig(name='gpt', preset='gpt', de..."),
        ("profile", "${optimizer.betas}", "a list of whole numbers", "0.9 is none"),
    ],
)
def test_a_list_that_an_interpolation_has_replaced_is_refused(key, value, takes, first, capsys):
    """From OmegaConf 2.4 on, which Hydra 1.4 takes, OmegaConf refuses it itself, in its own words."""
    told = said(f"plan model=gpt strategy=ddp dp=2 steps=3 name=x {key}={value}", capsys)
    if version("omegaconf") < "2.4":
        assert f"error: {key} takes {takes}, and {first}\n" in told and f"  where: {key}\n" in told
    else:
        assert told.startswith("error: ")


@pytest.mark.parametrize("tool", ["slurm", "k8s", "sky", "generate", "eval", "show"])
def test_a_tool_without_arguments_tells_its_usage_on_stderr_and_its_help_on_stdout(tool, capsys):
    assert main([tool]) == 2
    usage = capsys.readouterr()
    assert main([tool, "--help"]) == 0
    asked = capsys.readouterr()
    assert (usage.out, asked.err) == ("", "") and usage.err == asked.out
    assert f"parallelrun {tool}" in usage.err


def test_help_for_a_word_that_is_no_verb_says_so(capsys):
    assert "error: bensh: neither a verb nor key=value\n" in (found := said("bensh --help", capsys))
    assert "did you mean: bench\n" in found
    assert main(["model=gpt", "--help"]) == 0


@pytest.mark.parametrize(
    ("words", "key", "legal"),
    [
        ("plan ++hydra.nosuch=1", "hydra.nosuch", "run, sweep, "),
        ("plan hydra.run.dirr=x", "hydra.run.dirr", "hydra.run has dir\n"),
        ("plan hydra/lancher=basic", "hydra/lancher", "launcher, "),
        ("plan -m ++hydra.sweeper.nosuch=1 dp=1,2", "hydra.sweeper.nosuch", "max_batch_size, params"),
        ("plan objective=speed cluster=h100_dgx", "objective", "one of time, cost, gpus\n"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_legal(words, key, legal, capsys):
    text = said(words, capsys)
    assert text.startswith(f"error: {key}") and f"  where: {key}\n" in text
    assert legal in text.splitlines(keepends=True)[0], text


def test_open_keys_of_hydra_take_a_plus(capsys):
    assert "did you mean: +hydra.job.env_set.X=..." in said("plan hydra.job.env_set.X=1", capsys)
    assert main(["plan", "+hydra.job_logging.root.level=INFO", "strategy=single"]) == 0


def test_a_sweep_s_directory_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "empty").write_text("")
    assert main(["-m", "strategy=single,ddp", "dp=1", f"sweep.directory={tmp_path}/empty"]) == 3
    assert f"error: File exists: {tmp_path}/empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("plan world=7 strategy=tp", "world"), ("plan strategy=tp tp=7", "tp"), ("plan strategy=tp2d world=6", "world"),
        ("plan schedule=1f1b pp=2 microbatches=1", "microbatches"), ("plan pp=2 layout=2d tp=3", "tp"),
        ("plan strategy=gshard", "strategy"), ("plan strategy=interleaved pp=3 model.layers=2", "pp"),
    ],
)  # fmt: skip
def test_where_names_a_key_that_the_user_has_typed(words, where, capsys):
    printed = said(words, capsys)
    places = re.findall(r"^  where: (.*)$", printed, re.M)
    assert where in places and all(any(word.startswith(f"{place}=") for word in words.split()) for place in places)


def test_a_name_that_is_too_long_for_a_file_is_named(capsys):
    assert main(["strategy=single", f"runs={'x' * 300}", "steps=1"]) == 3
    assert "File name too long" in capsys.readouterr().err
