"""The benchmark of data reads every dataset, from files that it makes."""

from __future__ import annotations

from benchmarks.data import CASES, _reading
from parallelrun.base import registry


def test_every_dataset_is_measured(tmp_path):
    named = set()
    for number, (case, (_, make)) in enumerate(CASES.items()):
        if "parquet" in case:  # needs pyarrow
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        named |= {word.partition("=")[2] for word in make(folder) if word.startswith("dataset=")}
    assert named == {*registry.DATASETS, *registry.IMAGE_DATASETS}


def test_the_cpu_time_of_a_batch_is_measured(tmp_path):
    model, make = CASES["mixture"]
    assert 0 < _reading([*model, *make(tmp_path), "dp=1"], 3) < 1
