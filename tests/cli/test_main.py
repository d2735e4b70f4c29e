"""The program in this process: what each word prints, and its exit code. Nothing here starts a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest

from parallelrun.cli import main as program
from parallelrun.cli.help import EXAMPLES, TOOL_FUNCTIONS, VERBS
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS
from tests.matrix import FULL
from tests.servants import ROOT


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run("plan tp=2") -> (exit code, stdout, stderr), in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(*words: str):
        code = program.main(words[0].split() if len(words) == 1 else list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    assert list(tmp_path.iterdir()) == [] or any(path.suffix for path in tmp_path.iterdir()), "written to disk"


STOPS = {number: (143, f"terminated by {number.name}") for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}


@pytest.mark.parametrize(("number", "ended"), [*STOPS.items(), (signal.SIGINT, (130, "interrupted"))])
@pytest.mark.parametrize("disguised", [False, True])
def test_a_signal_before_the_first_step_ends_the_program_in_one_line(run, monkeypatch, number, ended, disguised):
    def interrupted(words):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except BaseException as error:
            raise ImportError("cannot import half a module") if disguised else error  # noqa: B904

    monkeypatch.setattr(program, "_route", interrupted)
    before, (code, word) = signal.getsignal(number), ended
    assert run("model=gpt") == (code, "", f"parallelrun: {word}\n")
    assert signal.getsignal(number) == before


def test_nothing_is_imported_before_signals_are_taken():
    code = "import sys; n = set(sys.modules); import parallelrun.cli.main; print(*sorted(set(sys.modules) - n))"
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.split()
    ours = [name for name in found if name.startswith("parallelrun")]
    own = ("base", "base.stop_signals", "base.version", "cli", "cli.main")
    assert ours == ["parallelrun", *(f"parallelrun.{name}" for name in own)]
    assert len(found) - len(ours) < 30
    from parallelrun.base import errors

    assert program.EXIT_INTERRUPTED == errors.EXIT_INTERRUPTED and program.EXIT_TERMINATED == errors.EXIT_TERMINATED


def error_of(run, *words: str) -> str:
    code, out, err = run(*words)
    assert code == 2 and out == "" and "Traceback" not in err, (code, out, err)
    assert err.startswith("error: ")
    return err


def test_no_word_is_answered_with_the_short_help(run):
    code, out, _ = run("")
    assert code == 0 and "parallelrun --help" in out


def test_help_names_every_verb_group_and_example(run):
    code, out, _ = run("--help")
    assert code == 0
    for word in ("run", "plan", "verify", "bench", "ls", "show", "doctor", "tokenize", *GROUPS):
        assert f"\n  {word} " in out
    for group in GROUPS:
        for option in presets.options(group):
            assert option in out
    assert all(command in out for command, _ in EXAMPLES)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_page_of_its_own_that_fits_80_columns(run, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(f"{verb} --help")
    assert code == 0 and out.startswith(f"parallelrun {verb} ") and "Examples:\n  parallelrun" in out
    assert out == run(f"{verb} model=gpt -h")[1]
    assert max(map(len, (out + run("--help")[1]).splitlines())) < 80


def test_the_version_is_ours(run):
    assert run("--version")[1] == "parallelrun 0.1.0\n"


@pytest.mark.parametrize("command", [command for command, _ in EXAMPLES if FULL or " -m " in command])
def test_every_example_of_the_help_is_legal(run, composed_once, command):
    """Those that are no sweep: tests/cli/test_docs.py, too."""
    words = [word for word in command.split()[1:] if word not in VERBS]
    code, out, err = run("plan", "--json", *words)
    assert code == 0, err
    points = json.loads(out).get("points")
    assert points is None or all(point["state"] == "planned" for point in points)


def test_the_same_command_with_v_shows_the_traceback(run):
    code, _, err = run("plan", "tp=3", "-v")
    assert code == 2 and "Traceback" in err and err.rstrip().splitlines()[-1].startswith("  ")


def test_a_sweep_of_plans_is_one_document_with_reasons(run, composed_once):
    code, out, _ = run("plan", "-m", "--json", "strategy=single,ddp,tp", "world=2,3")
    points = json.loads(out)["points"]
    states = {tuple(point["overrides"]): point["state"] for point in points}
    assert code == 0 and len(points) == 6
    assert states[("strategy=ddp", "world=2")] == "planned"
    assert states[("strategy=single", "world=2")] == "skipped"
    skipped = next(point for point in points if point["overrides"] == ["strategy=tp", "world=3"])
    assert "heads" in skipped["reason"] and skipped["problems"][0]["suggestion"]


def test_a_sweep_without_a_legal_point_is_a_mistake(run, composed_once):
    assert run("plan", "-m", "tp=3,5")[0] == 2


def test_unread_keys_are_notes_in_a_sweep(run, composed_once):
    code, out, _ = run("plan", "-m", "--json", "strategy=ddp", "dp=2", "staleness=1,2")
    points = json.loads(out)["points"]
    assert code == 0 and [point["state"] for point in points] == ["planned", "skipped"]
    assert "staleness=1" in json.dumps(points[0]["warnings"])
    assert points[1]["reason"].startswith("the same run as point 0; staleness=2 is read by none")


def test_a_recipe_file_is_composed_and_the_command_line_beats_it(run, tmp_path):
    (tmp_path / "my recipe, v2.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /strategy: tp\ntp: 4\nmodel:\n  hidden: 128\n"
    )
    code, out, err = run("plan", "--json", "recipe=./my recipe, v2.yaml", "tp=2")
    assert code == 0, err
    document = json.loads(out)
    assert (document["preset"], document["world"], document["model"]["hidden"]) == ("tp", 2, 128)


def test_a_recipes_key_counts_as_given(run, tmp_path):
    (tmp_path / "mine.yaml").write_text("strategy:\n  data:\n    shard: 2\n")
    assert "strategy.data.shard" in error_of(run, "plan", "recipe=mine.yaml")


def test_show_prints_what_a_recipe_composes_to(run):
    code, out, _ = run("show", "gpt3_oneflow_3072", "dp=3")
    assert code == 0 and "\ndp: 3\n" in out and "hidden: 12288" in out
    assert json.loads(run("show", "gpt3_oneflow_3072", "--json")[1])["pp"] == 64


@pytest.mark.parametrize("kind", ["", "recipes", "model", "strategies", "datasets", "clusters"])
def test_ls_has_a_source_and_a_description_for_everything(run, kind):
    code, out, _ = run("ls", "--json", *kind.split())
    found = {key: rows for key, rows in json.loads(out).items() if key != "schema"}
    assert code == 0 and len(found) == (1 if kind else 9)
    for rows in found.values():
        assert rows and all(row["name"] and row["source"] and row["description"] for row in rows)
    assert run("ls", *kind.split())[0] == 0


def test_ls_keys_explains_every_key_that_users_type(run):
    rows = {row["name"]: row for row in json.loads(run("ls", "keys", "--json")[1])["keys"]}
    assert all(row["values"] and row["description"] for row in rows.values())
    assert rows["recompute"]["values"] == "none | selective | full | offload"
    assert rows["dropout"]["values"] == "float >= 0, < 1" and "model.preset" not in rows


def test_hydras_own_flags_answer(run):
    code, out, _ = run("--cfg", "job", "-p", "model", "model=llama3_8b")
    assert code == 0 and "kv_heads: 8" in out
    assert "name" in run("--cfg", "job", "--resolve", "tp=2")[1]
    assert "Defaults" in run("--info", "defaults")[1] and "Defaults List" in run("--info")[1]
    assert "Hydra" in run("--hydra-help")[1]
    assert "parallelrun" in run("-sc", "install=bash")[1]


def test_under_a_launcher_other_ranks_compose_nothing(run, monkeypatch):
    followed = []
    monkeypatch.setattr("parallelrun.launch.entry.attach.follow", lambda words: followed.append(words) or 0)
    monkeypatch.setattr("parallelrun.config.compose.prepare", lambda *a: pytest.fail("composed"))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert run("tp=2")[0] == 0 and followed == [["tp=2"]]
    assert run("plan", "tp=2") == (0, "", "")
    assert run("--cfg", "job") == (0, "", "")


def test_under_a_launcher_rank_0_tells_the_others_when_it_fails(run, monkeypatch):
    told = []
    monkeypatch.setattr(
        "parallelrun.launch.entry.attach.abandon", lambda attached, code: told.append((attached.world, code))
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert "no such key" in error_of(run, "tpp=2")
    assert "torchrun" in error_of(run, "-m", "tp=1,2")
    assert told == [(2, 2), (2, 2)]
    code, out, _ = run("plan", "--json", "strategy=ddp")
    assert code == 0 and json.loads(out)["world"] == 2  # the launcher's ranks, not the preset's smallest plan


@pytest.fixture
def own_folder(tmp_path):
    """A user's own configuration folder: a model, a recipe, a group of experiments, a file that is not YAML."""
    files = {
        "model/tiny.yaml": "name: gpt\nlayers: 2\nhidden: 16\nheads: 2\n",
        "model/broken.yaml": "name: gpt\nlayers: [2\nhidden: 3\n",
        "recipe/mine.yaml": "# My own\ndefaults:\n  - override /model: tiny\ndp: 2\n",
        "experiment/wide.yaml": "# @package _global_\ndefaults:\n  - override /strategy: tp\n"
        "  - override /dataset: synthetic\ntp: 4\n",
        "experiment/sized.yaml": "# @package _global_\ndefaults:\n  - /form: deep\n  - /size@_global_: of_${form}\n",
        "form/deep.yaml": "# @package _global_\nmodel:\n  layers: 3\n",
        "size/of_deep.yaml": "model:\n  hidden: 48\n",
    }
    for name, text in files.items():
        path = tmp_path / "own.d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_model_of_the_users_folder_has_its_files_name(run, own_folder):
    document = json.loads(run("plan", "--json", "--config-dir", "own.d", "model=tiny", "dp=2")[1])
    assert document["model"]["name"] == "tiny"


def test_a_recipe_of_the_users_folder_is_found_by_name_and_checked(run, own_folder, tmp_path):
    document = json.loads(run("plan", "--json", "--config-dir", "own.d", "recipe=mine")[1])
    assert document["model"]["layers"] == 2 and document["world"] == 2
    (tmp_path / "own.d" / "recipe" / "evil.yaml").write_text("model:\n  source: /tmp/x.py:build\n")
    assert "may not name code" in error_of(run, "plan", "--config-dir", "own.d", "recipe=evil")


@pytest.mark.parametrize("chosen", ["+experiment=wide", "experiment=wide"])
def test_a_group_of_the_users_folder_composes_and_what_it_sets_counts_as_given(run, own_folder, composed_once, chosen):
    code, out, err = run("plan", "--json", "--config-dir=own.d", chosen, "model=mlp")
    assert code == 0, err
    document = json.loads(out)
    assert (document["preset"], document["world"]) == ("tp", 4)
    code, out, _ = run("--cfg", "job", "--config-dir=own.d", chosen)
    assert "name: synthetic" in out
    points = json.loads(run("plan", "-m", "--json", "--config-dir=own.d", chosen, "model=tiny,gpt", "tp=2")[1])[
        "points"
    ]
    assert [point["state"] for point in points] == ["planned", "planned"]


def test_a_choice_in_the_users_folder_may_depend_on_another(run, own_folder):
    code, out, err = run("plan", "--json", "--config-dir=own.d", "experiment=sized", "dp=2")
    assert code == 0, err
    assert (json.loads(out)["model"]["layers"], json.loads(out)["model"]["hidden"]) == (3, 48)


def test_what_an_option_of_the_users_folder_chooses_beats_a_models_own_choice(run, own_folder):
    from parallelrun.cli import argv
    from parallelrun.config import compose

    line = argv.read(["--config-dir=own.d", "experiment=wide", "model=resnet"])  # whose own dataset is digits
    found: list = []
    prepared = compose.prepare(line.overrides, line.flags, "plan", False)
    compose.run_hydra(prepared, lambda config: found.append(compose.composed(config, prepared)))
    assert {"dataset", "strategy", "tp"} <= found[0].given and found[0].config.dataset.name == "synthetic"


def test_mistakes_in_the_users_folder_are_told_with_their_place(run, own_folder):
    assert "model/broken.yaml:3:7" in error_of(run, "plan", "--config-dir", "own.d", "model=broken")
    assert "did you mean: experiment=wide" in error_of(run, "plan", "--config-dir", "own.d", "experiment=wied")
    assert "no such key: experiment" in error_of(run, "plan", "experiment=wide")


def test_the_frozen_configuration_of_a_run_is_a_recipe_that_repeats_it(run, tmp_path):
    from parallelrun.cli import argv
    from parallelrun.config import compose
    from parallelrun.planner.resolve import freeze
    from parallelrun.planner.resolve.resolve_config import resolve

    words = ["model=resnet", "strategy=hsdp", "dp=4", "optimizer.lr=0.5", "dataset=synthetic", "steps=3"]
    line = argv.read(words)
    composed, _ = compose.compose_once(compose.prepare(line.overrides, (), "run", False))
    plan = resolve(composed.config, given=composed.given)
    (tmp_path / "config.yaml").write_text(freeze.freeze(composed.config, plan))
    line = argv.read([f"recipe={tmp_path / 'config.yaml'}"])
    again, _ = compose.compose_once(compose.prepare(line.overrides, (), "run", False))
    repeated = resolve(again.config, given=again.given)
    assert freeze.identity(again.config, repeated) == freeze.identity(composed.config, plan)
    code, out, err = run("plan", "--json", f"recipe={tmp_path / 'config.yaml'}", "steps=7", "optimizer.lr=0.25")
    assert code == 0 and json.loads(out)["degrees"]["dp"] == 4, err


def test_a_run_with_json_prints_one_document_and_its_screen_on_stderr(run, monkeypatch, tmp_path):
    def start(config, plan, words, overrides, run_root, created):
        created(tmp_path / "the_run.d")
        (tmp_path / "the_run.d").mkdir(exist_ok=True)
        for name in ("status", "summary", "verify", "bench"):
            (tmp_path / "the_run.d" / f"{name}.json").write_text(json.dumps({"of": name}))
        print("step 1/60")
        return 4

    monkeypatch.setattr("parallelrun.launch.entry.start.start", start)
    for verb, result in (("run", "summary"), ("verify", "verify"), ("bench", "bench")):
        code, out, err = run(verb, "--json", "strategy=single")
        document = json.loads(out)
        assert code == document["exit_code"] == 4 and document["verb"] == verb and "step 1/60" in err
        assert document["status"] == {"of": "status"} and document[result] == {"of": result}
        assert document["directory"] == str(tmp_path / "the_run.d")


def test_every_tool_that_the_help_lists_has_its_function():
    for module, function in (text.split(":") for text in TOOL_FUNCTIONS.values()):
        assert callable(getattr(import_module(f"parallelrun.{module}"), function))
