"""The index and the search for checkpoints, torch-free: nothing damaged passes, nothing incomplete is chosen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from parallelrun.base.errors import CheckpointError
from parallelrun.base.records import sha256_of
from parallelrun.checkpoint.files import write_bytes
from parallelrun.checkpoint.find import complete_steps, keep_last, latest
from parallelrun.checkpoint.index import (
    INDEX_FILE,
    Index,
    StoredPart,
    StoredTensor,
    check_model,
    describe_plan,
    reshard_note,
    verify_file,
)
from parallelrun.checkpoint.resume import choose, resolve_resume
from parallelrun.checkpoint.schema import decode, encode, read_index
from tests.checkpoints import written
from tests.plans import tiny_config, tiny_plan

FILES = ("rank_00000.safetensors", "rank_00001.safetensors")
TENSOR = StoredTensor("float32", (4, 2), (StoredPart((0, 0), (3, 2), FILES[0]), StoredPart((3, 0), (1, 2), FILES[1])))


def make(folder, step, content=b"numbers", hidden=""):
    """A complete checkpoint of one tensor in two files."""
    path = folder / (hidden or f"step_{step}")
    path.mkdir(parents=True)
    files = {}
    for number, name in enumerate(FILES):
        write_bytes(path / name, content * (number + 1 + step))
        files[name] = (len(content) * (number + 1 + step), sha256_of(path / name))
    index = Index(step, "adamw", {"world": 2}, {"seed": 3}, {"model/w": TENSOR}, files)
    write_bytes(path / INDEX_FILE, encode(index))
    return path


@pytest.fixture
def run(tmp_path):
    """A run directory with the complete steps 2, 4 and 10."""
    for step in (2, 4, 10):
        make(tmp_path / "runs" / "gpt-ptdp" / "a" / "checkpoints", step)
    return tmp_path / "runs" / "gpt-ptdp" / "a"


def said(action, *arguments):
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    assert caught.value.exit_code == 4
    problem = caught.value.problems[0]
    return f"{problem.what} | {problem.suggestion} | {problem.command}"


class TestIndex:
    def test_it_reads_back_what_was_written(self, tmp_path):
        path = make(tmp_path, 3)
        index = read_index(path)
        assert index.tensors == {"model/w": TENSOR} and index.extra == {"seed": 3} and index.step == 3
        assert index.num_bytes == 7 * (4 + 5)

    def test_who_changes_what_was_read_changes_no_other_reading(self, tmp_path):
        path = make(tmp_path, 3)
        read_index(path).extra["seed"] = 4
        assert read_index(path).extra == {"seed": 3}

    def test_extra_that_json_cannot_hold_is_refused_when_saving(self):
        with pytest.raises(ValueError):
            encode(Index(1, "sgd", {}, {"loss": float("nan")}, {}, {}))

    def test_every_single_bit_flip_is_detected(self, tmp_path):
        raw = encode(replace(read_index(make(tmp_path, 3)), digest=""))
        for pp_rank in range(len(raw) * 8):
            flipped = bytearray(raw)
            flipped[pp_rank // 8] ^= 1 << pp_rank % 8
            with pytest.raises(CheckpointError):
                decode(bytes(flipped), tmp_path)

    def test_every_truncation_and_addition_is_detected(self, tmp_path):
        raw = (make(tmp_path, 3) / INDEX_FILE).read_bytes()
        for length in range(len(raw)):
            with pytest.raises(CheckpointError):
                decode(raw[:length], tmp_path)
        with pytest.raises(CheckpointError):
            decode(raw + b" ", tmp_path)

    @pytest.mark.parametrize(
        "parts",
        [
            [StoredPart((0,), (3,), FILES[0])],
            [StoredPart((0,), (3,), FILES[0]), StoredPart((2,), (2,), FILES[0])],
            [StoredPart((0,), (2,), FILES[0]), StoredPart((0,), (2,), FILES[0])],
            [StoredPart((0,), (2,), FILES[0]), StoredPart((1,), (2,), FILES[0])],
            [StoredPart((1,), (4,), FILES[0])],
            [StoredPart((0, 0), (2, 2), FILES[0])],
            [],
        ],
    )
    def test_parts_that_do_not_make_up_the_tensor_are_refused(self, tmp_path, parts):
        raw = encode(
            Index(1, "sgd", {}, {}, {"w": StoredTensor("float32", (4,), tuple(parts))}, {FILES[0]: (16, "0" * 64)})
        )
        assert "do not cover" in said(decode, raw, tmp_path)

    def test_another_schema_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("parallelrun.checkpoint.schema.SCHEMA", 2)
        raw = encode(Index(1, "sgd", {}, {}, {}, {}))
        monkeypatch.undo()
        assert "schema 2" in said(decode, raw, tmp_path)


class TestDataFiles:
    def test_truncation_and_links_are_detected(self, tmp_path):
        path = make(tmp_path, 3)
        index = read_index(path)
        first, second = (path / name for name in FILES)
        contents = first.read_bytes(), second.read_bytes()
        second.write_bytes(contents[1][:-1])
        assert "34 bytes, expected 35" in said(verify_file, index, path, FILES[1])
        first.unlink()
        (tmp_path / "elsewhere").write_bytes(contents[0])
        first.symlink_to(tmp_path / "elsewhere")
        assert "is missing" in said(verify_file, index, path, FILES[0])


class TestModel:
    def stored(self, plan, **changes):
        tensors = {
            f"model/{name}": StoredTensor(plan.precision.stored, tuple(p.shape), ())
            for name, p in plan.spec.parameters.items()
        }
        return Index(1, changes.pop("optimizer", "adamw"), describe_plan(plan), {}, {**tensors, **changes}, {})

    def test_the_same_model_under_another_plan_passes(self, tmp_path):
        check_model(self.stored(tiny_plan()), tiny_plan(tp=2, dp=2, pp=2), tmp_path)

    def test_another_model_is_told_by_first_differences_and_counts(self, tmp_path):
        text = said(check_model, self.stored(tiny_plan()), tiny_plan(model__hidden=32), tmp_path)
        assert "of another model" in text and text.count(" in the model") == 5 and "0 missing, 0 unknown" in text
        assert "[32, 16] in the checkpoint, [32, 32] in the model" in text

    def test_missing_and_surplus_parameters(self, tmp_path):
        deeper = tiny_plan(model__layers=5)
        count = len(deeper.spec.parameters) - len(tiny_plan().spec.parameters)
        assert f"{count} missing" in said(check_model, self.stored(tiny_plan()), deeper, tmp_path)
        assert f"{count} unknown" in said(check_model, self.stored(deeper), tiny_plan(), tmp_path)

    def test_another_precision_is_not_cast_in_silence(self, tmp_path):
        text = said(check_model, self.stored(tiny_plan()), tiny_plan(precision__name="fp64"), tmp_path)
        assert "float32 in the checkpoint, float64 under precision=fp64" in text

    def test_another_optimizer(self, tmp_path):
        text = said(check_model, self.stored(tiny_plan(), optimizer="sgd"), tiny_plan(), tmp_path)
        assert "optimizer=sgd" in text and "optimizer=adamw" in text

    @pytest.mark.parametrize("kind", ["optimizer/exp_avg", "powersgd/error of 2x33x16"])
    def test_state_has_its_parameters_shape_or_the_one_that_its_kind_names(self, tmp_path, kind):
        plan, key = tiny_plan(), f"{kind}/embedding.tokens.weight"
        own, right = plan.spec.parameters["embedding.tokens.weight"].shape, (2, 33, 16)
        index = self.stored(plan, **{key: StoredTensor("float32", (33, 15), ())})
        index = replace(index, extra={"kept": ["powersgd/error of 2x33x16"]})
        assert f"{key} is [33, 15], its parameter {list(own)}" in said(check_model, index, plan, tmp_path)
        if kind.startswith("powersgd"):
            check_model(
                replace(index, tensors={**index.tensors, key: StoredTensor("float32", right, ())}), plan, tmp_path
            )

    def test_another_plan_is_said(self):
        index = self.stored(tiny_plan(tp=2, pp=2))
        assert reshard_note(index, tiny_plan(tp=2, pp=2)) is None
        note = reshard_note(index, tiny_plan(dp=4))
        assert "step 1: pp=2 tp=2 (ddp, 1f1b) -> dp=4 (ddp, none)" in note


class TestFinding:
    def test_steps_are_numbers_not_words(self, run):
        assert list(complete_steps(run)) == list(complete_steps(run / "checkpoints")) == [2, 4, 10]
        assert latest(run) == run / "checkpoints" / "step_10"

    def test_nowhere_is_none(self, tmp_path):
        assert latest(tmp_path) is None and latest(tmp_path / "nosuch") is None

    @pytest.mark.parametrize("damage", ["no index", "torn index", "missing file", "short file"])
    def test_a_half_written_one_is_skipped_with_a_word(self, run, caplog, damage):
        newest = run / "checkpoints" / "step_10"
        if damage == "no index":
            (newest / INDEX_FILE).unlink()
        elif damage == "torn index":
            (newest / INDEX_FILE).write_bytes((newest / INDEX_FILE).read_bytes()[:100])
        elif damage == "missing file":
            (newest / FILES[1]).unlink()
        else:
            (newest / FILES[1]).write_bytes(b"x")
        with caplog.at_level(logging.WARNING):
            assert latest(run) == run / "checkpoints" / "step_4"
        assert "skipped" in caplog.text and "step_10" in caplog.text

    def test_a_save_in_progress_is_no_checkpoint(self, run, caplog):
        make(run / "checkpoints", 12, hidden=".step_12.tmp-0a1b2c3d")
        assert latest(run).name == "step_10" and not caplog.text

    def test_a_replaced_step_counts_until_the_new_one_is_there(self, run):
        folder = run / "checkpoints"
        os.rename(folder / "step_10", folder / ".step_10.old-0a1b2c3d")
        assert latest(run) == folder / ".step_10.old-0a1b2c3d"
        make(folder, 10)
        assert latest(run) == folder / "step_10"


class TestResume:
    def test_latest_is_what_was_written_last_of_all_runs(self, run):
        runs = run.parents[1]
        path = make(runs / "mlp-ddp" / "b" / "checkpoints", 3)
        os.utime(path / INDEX_FILE, ns=(2**62, 2**62))
        assert resolve_resume("latest", str(runs)) == path

    def test_a_run_directory_means_its_last_step(self, run):
        assert resolve_resume(str(run), "runs") == run / "checkpoints" / "step_10"

    def test_a_checkpoint_means_itself_also_relative_to_home(self, run, monkeypatch):
        monkeypatch.setenv("HOME", str(run))
        assert resolve_resume("~/checkpoints/step_4", "runs") == run / "checkpoints" / "step_4"

    def test_a_wrong_step_lists_the_available_ones(self, run):
        text = said(resolve_resume, str(run / "checkpoints" / "step_11"), "runs")
        assert "no such checkpoint" in text and "step_2, step_4, step_10" in text

    def test_a_half_written_one_asked_for_is_refused_with_the_others(self, run):
        (run / "checkpoints" / "step_10" / INDEX_FILE).unlink()
        text = said(resolve_resume, str(run / "checkpoints" / "step_10"), "runs")
        assert "is incomplete" in text and "step_2, step_4" in text

    def test_nothing_to_resume(self, tmp_path):
        assert "no complete checkpoint under" in said(resolve_resume, "latest", str(tmp_path))
        assert "no complete checkpoint in" in said(resolve_resume, str(tmp_path), "runs")
        assert "no such checkpoint" in said(resolve_resume, str(tmp_path / "nosuch"), "runs")

    @pytest.mark.parametrize("name", ["model.pt", "model.ckpt", "pytorch_model.bin", "__0_0.distcp", ".metadata"])
    def test_pickle_is_refused_unopened(self, tmp_path, name):
        folder = tmp_path / "step_3"
        folder.mkdir()
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
        assert "can run code" in said(resolve_resume, str(folder), "runs")
        if name != ".metadata":
            assert "can run code" in said(resolve_resume, str(folder / name), "runs")


class TestBeforeTheStart:
    @pytest.fixture
    def saved(self, tmp_path):
        return written(tmp_path / "checkpoints" / "step_3", tiny_plan())

    def check(self, saved, **changes):
        changes = {"resume": str(saved), **changes}
        chosen = choose(tiny_config(**changes), tiny_plan(**changes))
        return chosen and chosen.path

    def test_nothing_to_resume_is_fine(self):
        assert choose(tiny_config(), tiny_plan()) is None

    def test_other_degrees_are_fine(self, saved):
        assert self.check(saved, tp=2, dp=2) == self.check(saved.parents[1]) == saved

    def test_another_global_batch_would_change_the_order_of_samples(self, saved):
        with pytest.raises(CheckpointError, match=r"global_batch=4, but .*step_3 was trained with 8") as caught:
            self.check(saved, global_batch=4)
        assert caught.value.problems[0].suggestion == "global_batch=8"


class TestKeeping:
    def steps(self, run):
        return list(complete_steps(run))

    def test_the_newest_stay(self, run):
        keep_last(run / "checkpoints", 2, 0)
        assert self.steps(run) == [4, 10] and len(os.listdir(run / "checkpoints")) == 2

    def test_only_rank_0_deletes_and_below_one_keeps_all(self, run):
        keep_last(run / "checkpoints", 1, 1)
        keep_last(run / "checkpoints", 0, 0)
        assert self.steps(run) == [2, 4, 10]

    def test_an_incomplete_one_does_not_count(self, run):
        (run / "checkpoints" / "step_10" / INDEX_FILE).unlink()
        keep_last(run / "checkpoints", 2, 0)
        assert self.steps(run) == [2, 4]

    def test_what_a_crash_left_behind_goes(self, run):
        folder = run / "checkpoints"
        make(folder, 12, hidden=".step_12.tmp-0a1b2c3d")
        make(folder, 4, hidden=".step_4.old-0a1b2c3d")
        (folder / "notes.txt").touch()
        keep_last(folder, 3, 0)
        assert sorted(os.listdir(folder)) == ["notes.txt", "step_10", "step_2", "step_4"]

    def test_a_replaced_step_whose_replacement_never_came_gets_its_name_back(self, run):
        folder = run / "checkpoints"
        os.rename(folder / "step_10", folder / ".step_10.old-0a1b2c3d")
        keep_last(folder, 2, 0)
        assert sorted(os.listdir(folder)) == ["step_10", "step_4"]


def test_finding_and_checking_never_import_torch():
    code = "import sys; from parallelrun.checkpoint import find, resume; from pathlib import Path; "
    code += "find.latest(Path('/nonexistent')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
