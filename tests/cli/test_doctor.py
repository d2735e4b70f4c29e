"""`doctor` sums over all visible GPUs: their number is faked, the processes and the sum are real."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch

from parallelrun.cli.tools import doctor
from parallelrun.distributed.shared_memory import joining
from parallelrun.launch.ranks import processes


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def forked(monkeypatch):
    """Ranks start at once, and what is replaced here is replaced there. `parallelrun doctor` of tests/cli/test_docs.py
    starts them as users do."""
    monkeypatch.setattr(processes, "method_for", lambda plan: processes.FORK)


def test_every_gpu_takes_part_in_the_sum(monkeypatch, two_gpus):
    asked = []
    monkeypatch.setattr(doctor, "all_reduce", lambda *words: asked.append(words) or 0.0012)
    (check,) = doctor._gpu_sum()
    assert asked == [(2, "nccl")]
    assert (check.name, check.state, check.detail) == ("nccl all-reduce", "pass", "2 GPUs, 64 MiB in 1.2 ms")


def test_the_processes_of_the_sum_really_add(forked, two_gpus):
    (check,) = doctor._gpu_sum("gloo")
    assert check.state == "pass", check.detail


def test_why_shared_memory_is_impossible(monkeypatch, forked):
    monkeypatch.setattr(joining, "is_supported", lambda: False)
    check = doctor._shared_memory_of_ranks()
    assert check.state == "warn" and "no memfd or pidfd" in check.detail, check.detail
    assert doctor._gloo().state == "pass", "gloo needs neither"


def test_a_rank_that_cannot_take_part_is_named_and_its_log_is_kept(forked, two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    (check,) = doctor._gpu_sum()
    assert check.state == "fail" and re.match(r"rank [01] of 2: \w+Error: ", check.detail), check.detail
    assert "Error: " in Path(check.detail.partition("its log: ")[2].rstrip(")")).read_text()


def test_without_gpus_nothing_is_summed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._gpu_sum() == []
