"""Datasets: windows, splits, fingerprints, and what a user is told when the data will not do."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import files, open_dataset, pystdlib, synthetic, text
from parallelrun.data.tokens import Documents, TokenWindows, held_out
from parallelrun.planner.model.model_spec import ModelSpec
from tests.plans import collate

SEQ = 8


def spec(vocab=256, seq=SEQ, kind="tokens", shape=None):
    return ModelSpec("test", kind, (), shape or (seq,), (seq, 4), seq, vocab, seq=seq)


def config(name="text", path=None, batch=2, **dataset):
    made = Config(global_batch=batch)
    made.dataset.name, made.dataset.path = name, path and str(path)
    made.model.seq = SEQ
    for key, value in dataset.items():
        setattr(made.dataset, key, value)
    return made


def write(path, size, seed=0):
    path.write_bytes(np.random.default_rng(seed).integers(32, 127, size).astype(np.uint8).tobytes())
    return path


def whole_stream(split):
    return [int(token) for index in range(len(split)) for token in split.sample(index)[0]]


def documents(sources, source_of, starts, lengths):
    return Documents(sources, ("a", "b"), source_of, starts, lengths, np.zeros(len(starts), np.uint64))


class TestWindows:
    stream = documents(
        [np.arange(10), np.arange(100, 107)],
        np.array([0, 1, 0, 0]),
        np.array([0, 2, 4, 5]),
        np.array([4, 5, 0, 5]),
    )
    tokens = [0, 1, 2, 3, 102, 103, 104, 105, 106, 5, 6, 7, 8, 9]

    def test_documents_read_back_to_back_from_any_place_to_any_place(self):
        for start in range(14):
            for stop in range(start + 1, 15):
                assert self.stream.read(start, stop).tolist() == self.tokens[start:stop]

    def test_a_sample_is_a_window_and_its_next_tokens(self):
        windows = TokenWindows(self.stream, 5, 200)
        assert len(windows) == 2
        inputs, targets = windows.sample(1)
        assert inputs.tolist() == self.tokens[5:10] and targets.tolist() == self.tokens[6:11]
        assert inputs.dtype == targets.dtype == np.int64

    def test_the_last_token_is_a_target_and_a_rest_shorter_than_a_window_is_left_out(self):
        stream = documents([np.arange(11)], np.zeros(1, int), np.zeros(1, int), np.array([11]))
        assert [len(TokenWindows(stream, seq, 99)) for seq in (10, 5, 4, 11)] == [1, 2, 2, 0]

    def test_a_token_outside_the_vocab_names_sample_file_and_byte(self):
        source = np.array([0, 1, 2, 3, 4, 9, 1, 1, 1], dtype=np.int32)
        stream = documents([source], np.zeros(1, int), np.array([1]), np.array([8]))
        with pytest.raises(EnvironmentProblem, match=r"token id 9 of sample 1 \(byte 20 of a\).*vocab 5"):
            TokenWindows(stream, 3, 5).sample(1)

    def test_a_negative_token_is_refused(self):
        stream = documents([np.array([0, -1, 2], dtype=np.int32)], np.zeros(1, int), np.zeros(1, int), np.array([3]))
        with pytest.raises(EnvironmentProblem, match="token id -1"):
            TokenWindows(stream, 2, 5).sample(0)

    def test_samples_beyond_the_end_are_an_error(self):
        with pytest.raises(IndexError):
            TokenWindows(self.stream, 5, 200).sample(2)


class TestSplits:
    def test_a_document_keeps_its_split_whatever_is_added(self):
        few, many = (held_out(np.arange(n, dtype=np.uint64), 0.1) for n in (200, 2000))
        assert np.array_equal(few, many[:200]) and 120 < many.sum() < 280

    @pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
    def test_neither_split_is_empty(self, fraction):
        assert 0 < held_out(np.arange(3, dtype=np.uint64), fraction).sum() < 3


class TestText:
    def test_one_file_gives_both_splits_from_disjoint_pieces(self, tmp_path):
        path = write(tmp_path / "book.txt", 40_000)
        dataset = open_dataset(config(path=path), spec())
        train, val = whole_stream(dataset.train), whole_stream(dataset.val)
        assert 500 < len(val) < 10_000 and 39_000 < len(train) + len(val) + 2 * SEQ <= 40_000 + 2 * SEQ
        content = path.read_bytes()
        assert bytes(val[:64]) in content and bytes(val[:64]) not in bytes(train)

    def test_renaming_a_file_keeps_its_splits(self, tmp_path):
        first = open_dataset(config(path=write(tmp_path / "a.txt", 9000)), spec())
        second = open_dataset(config(path=write(tmp_path / "b.txt", 9000)), spec())
        assert whole_stream(first.val) == whole_stream(second.val)

    def test_a_small_file_still_gives_both(self, tmp_path):
        dataset = open_dataset(config(path=write(tmp_path / "a.txt", 200)), spec())
        assert len(dataset.train) >= 2 and len(dataset.val) >= 1

    def test_a_folder_splits_by_file_and_leaves_out_what_is_hidden(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / ".git").mkdir()
        for number in range(40):
            (tmp_path / "sub" / f"{number:02}.txt").write_bytes(bytes([100 + number]) * 100)
        (tmp_path / ".git" / "x").write_bytes(b"\x01" * 999)
        (tmp_path / ".hidden").write_bytes(b"\x01" * 999)
        dataset = open_dataset(config(path=tmp_path, val_fraction=0.3), spec())
        train, val = set(whole_stream(dataset.train)), set(whole_stream(dataset.val))
        assert not train & val and 1 not in train | val and len(train | val) == 40

    def test_max_bytes_limits_the_total(self, tmp_path):
        for number in range(3):
            write(tmp_path / f"{number}.txt", 2000)
        dataset = open_dataset(config(path=tmp_path, max_bytes=3000), spec())
        assert 2900 < (len(dataset.train) + len(dataset.val)) * SEQ <= 3000

    def test_a_large_file_is_mapped_not_read(self, tmp_path):
        path = tmp_path / "sparse.txt"
        with path.open("wb") as stream:
            stream.truncate(3 * 2**30)
        begin = time.perf_counter()
        dataset = open_dataset(config(path=path), spec(seq=4096))
        assert dataset.train.sample(len(dataset.train) - 1)[0].shape == (4096,)
        assert time.perf_counter() - begin < 3

    def test_home_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path / "a.txt", 1000)
        assert len(open_dataset(config(path="~/a.txt"), spec()).train)


class TestTextProblems:
    def problem(self, settings, model=None):
        with pytest.raises(EnvironmentProblem) as caught:
            open_dataset(settings, model or spec())
        assert caught.value.exit_code == 3
        return str(caught.value)

    def test_no_path(self):
        assert "needs a file or a folder" in self.problem(config(path=None))

    def test_missing_names_the_resolved_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert str(tmp_path / "nosuch.txt") in self.problem(config(path="nosuch.txt"))

    def test_empty_file_and_empty_folder(self, tmp_path):
        (tmp_path / "empty.txt").touch()
        assert "0 bytes" in self.problem(config(path=tmp_path / "empty.txt"))
        (tmp_path / "folder").mkdir()
        assert "(0 files, 0 bytes)" in self.problem(config(path=tmp_path / "folder"))

    def test_too_small_says_both_counts(self, tmp_path):
        text_said = self.problem(config(path=write(tmp_path / "a.txt", 300), batch=48))
        assert "300 bytes" in text_said and "fewer than global_batch=48" in text_said

    def test_local_batch_counts_for_every_replica(self, tmp_path):
        settings = config(path=write(tmp_path / "a.txt", 300), batch=None)
        settings.local_batch, settings.dp = 20, 4
        assert "global_batch=80" in self.problem(settings)

    def test_not_readable(self, tmp_path, monkeypatch):
        def refuse(path, name, max_bytes=None):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(text.files, "read_file", refuse)
        path = write(tmp_path / "a.txt", 3000)
        assert f"cannot read {path}: Permission denied" in self.problem(config(path=path))

    def test_a_pipe_or_device_is_no_text(self):
        assert "neither a file nor a folder" in self.problem(config(path="/dev/null"))


class TestPystdlib:
    def test_it_is_source_text_with_both_splits(self):
        dataset = open_dataset(config("pystdlib"), spec(seq=64))
        assert dataset.vocab == pystdlib.DATASET.vocab_size(Config()) == 256
        assert len(dataset.train) > 50_000 and 0.01 < len(dataset.val) / len(dataset.train) < 0.15
        sample = bytes(dataset.train.sample(5000)[0].astype(np.uint8))
        assert sample.isascii() or sample.decode("utf-8", errors="ignore")

    def test_it_holds_no_tests_and_no_third_party_code(self):
        files, _ = pystdlib._read(pystdlib.Path(pystdlib.sysconfig.get_path("stdlib")), 2**30)
        assert len(files) > 300
        assert not [file.name for file in files if {"test", "site-packages"} & set(file.name.split("/"))]

    def test_it_opens_fast_and_without_torch(self):
        code = (
            "import sys, time\n"
            "from parallelrun.config.schema.run_schema import Config\n"
            "from parallelrun.data import open_dataset\n"
            "from parallelrun.planner.model.model_spec import ModelSpec\n"
            "begin = time.process_time()\n"
            "open_dataset(Config(), ModelSpec('x', 'tokens', (), (64,), (64, 4), 64, 256, seq=64))\n"
            "print(time.process_time() - begin, 'torch' in sys.modules)"
        )
        seconds, torch = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
        assert float(seconds) < 1 and torch == "False"

    def test_a_python_without_sources_is_told_what_to_do(self, tmp_path, monkeypatch):
        monkeypatch.setattr(pystdlib.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(EnvironmentProblem, match="no Python source file"):
            open_dataset(config("pystdlib"), spec())


class TestSynthetic:
    def test_a_sample_depends_on_seed_and_index_only(self):
        first, second = (open_dataset(config("synthetic"), spec(40)) for _ in range(2))
        second.train.sample(7)
        assert np.array_equal(first.train.sample(3)[0], second.train.sample(3)[0])
        other = config("synthetic")
        other.seed += 1
        assert not np.array_equal(first.train.sample(3)[0], open_dataset(other, spec(40)).train.sample(3)[0])
        assert first.fingerprint != open_dataset(other, spec(40)).fingerprint

    def test_splits_differ_in_samples_but_share_the_rule(self):
        dataset = open_dataset(config("synthetic", vocab=16), spec(16))
        counts = []
        for split in (dataset.train, dataset.val):
            table = np.zeros((16, 16))
            for index in range(len(split)):
                np.add.at(table, split.sample(index), 1)
            counts.append(table.argmax(1))
        assert (counts[0] == counts[1]).mean() > 0.8
        assert not np.array_equal(dataset.train.sample(0)[0], dataset.val.sample(0)[0])

    def test_there_is_something_to_learn(self):
        """A bigram model fitted on train predicts val far better than the vocab's uniform ln 64 = 4.16 nats."""
        dataset = open_dataset(config("synthetic", vocab=64), spec(64, seq=64))
        table = np.full((64, 64), 0.05)
        for index in range(1000):
            np.add.at(table, dataset.train.sample(index), 1)
        log_probability = np.log(table / table.sum(1, keepdims=True))
        losses = [-log_probability[dataset.val.sample(index)].mean() for index in range(100)]
        assert 1.0 < np.mean(losses) < 1.6

    def test_features_have_a_learnable_class(self):
        dataset = open_dataset(config("synthetic", vocab=4), spec(4, kind="features", shape=(6,)))
        features, labels = collate(dataset.train, range(2000))
        assert features.shape == (2000, 6) and features.dtype == np.float32 and labels.dtype == np.int64
        fit = np.linalg.lstsq(features, np.eye(4)[labels], rcond=None)[0]
        held, wanted = collate(dataset.val, range(200))
        assert ((held @ fit).argmax(1) == wanted).mean() > 0.6

    def test_tokens_stay_inside_the_vocab_of_the_smaller_side(self):
        dataset = open_dataset(config("synthetic", vocab=100), spec(10))
        assert max(int(dataset.train.sample(index)[0].max()) for index in range(50)) < 10

    def test_too_few_samples(self):
        with pytest.raises(EnvironmentProblem, match=r"gives 3 training.*fewer than global_batch=4"):
            open_dataset(config("synthetic", samples=3, batch=4), spec())

    def test_vocab_size(self):
        settings = Config()
        assert synthetic.DATASET.vocab_size(settings) == 256
        settings.model.vocab = 50
        assert synthetic.DATASET.vocab_size(settings) == 50
        settings.dataset.vocab = 20
        assert synthetic.DATASET.vocab_size(settings) == 20


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_a_val_fraction_that_leaves_a_split_empty_is_refused(tmp_path, fraction):
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        open_dataset(config(path=write(tmp_path / "a.txt", 4000), val_fraction=fraction), spec())


@pytest.mark.parametrize("at, size", [(0, 3_000_000), (-1, 3_000_000), (0, 1000), (-1, 1000), (500, 1000)])
def test_a_change_at_either_end_of_a_large_file_or_anywhere_in_a_small_one_is_another_hash(at, size, monkeypatch):
    monkeypatch.setattr(files, "FULL_HASH_BYTES", 2**20)
    content = np.zeros(size, np.uint8)
    before = files.digest_array(content)
    assert files.digest_array(content.copy()) == before != files.digest_array(content[:-1])
    content[at] = 1
    assert files.digest_array(content) != before
