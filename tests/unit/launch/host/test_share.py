"""The cores and GPUs of several runs side by side."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from parallelrun.cli.sweeps import points
from parallelrun.config import hydra_task
from parallelrun.launch.host import share


@pytest.mark.parametrize(
    ("items", "parts", "shares"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (5, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [1], [0], [1]]),
        (4, 1, [[0, 1, 2, 3]]),
        (0, 3, [[], [], []]),
    ],
)
def test_parts_are_equal_and_overlap_only_where_there_is_too_little(items, parts, shares):
    assert [list(share.part(range(items), index, parts)) for index in range(parts)] == shares


@pytest.fixture
def host(monkeypatch):
    """Eight cores and four GPUs; what the process limits itself to is kept, not done."""
    found = SimpleNamespace(cores=set(range(8)), gpus=4)
    monkeypatch.setattr(share, "_held", {})
    monkeypatch.setattr(share, "num_cores", lambda: 8)
    monkeypatch.setattr(share, "visible_gpus", lambda: found.gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: found.cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: setattr(found, "cores", set(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    return found


def test_each_process_has_a_share_that_no_other_has(host, tmp_path, monkeypatch):
    first = share.limit(tmp_path, 2)
    assert (first, host.cores, os.environ["CUDA_VISIBLE_DEVICES"]) == (0, {0, 1, 2, 3}, "4,5")
    share.limit(tmp_path, 2)
    assert host.cores == {0, 1, 2, 3}, "the next point of the same process"
    held = dict(share._held)
    share._held.clear()  # another process: the lock of the first is held
    host.cores = set(range(8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert share.limit(tmp_path, 2) == 1
    assert (host.cores, os.environ["CUDA_VISIBLE_DEVICES"]) == ({4, 5, 6, 7}, "6,7")
    for descriptor in (*held.values(), *share._held.values()):
        os.close(descriptor)  # both end
    share._held.clear()
    assert share.limit(tmp_path, 2) == 0


def test_a_process_more_than_expected_shares_with_another(host, tmp_path):
    for _ in range(2):
        share.limit(tmp_path, 2)
        share._held.clear()
        host.cores = set(range(8))
    assert share.limit(tmp_path, 2) in (0, 1) and len(host.cores) == 4


def test_thread_counts_of_the_launcher_are_forgotten_and_the_users_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    given = points.threads_given()
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    points.share_host(tmp_path, 1, given)
    assert os.environ["OMP_NUM_THREADS"] == "3" and "MKL_NUM_THREADS" not in os.environ
    assert not list(tmp_path.iterdir()), "one point at a time has the whole host"


@pytest.mark.parametrize(
    ("launcher", "sweeper", "points", "parallel"),
    [
        ({"n_jobs": 4}, {}, 10, 4),
        ({"n_jobs": 4}, {}, 3, 3),
        ({"n_jobs": -1}, {}, 100, os.cpu_count()),
        ({"n_jobs": -1}, {"n_jobs": 1}, None, 1),
        ({}, {}, 6, 6),
        ({}, {"max_batch_size": 2}, 6, 2),
        ({"n_jobs": 4}, {"params": {"a": "1,2"}}, 1, 4),
        ({}, {"n_jobs": 5}, None, 5),
    ],
)
def test_how_many_points_run_at_once(monkeypatch, launcher, sweeper, points, parallel):
    config = SimpleNamespace(launcher=launcher, sweeper=sweeper)
    monkeypatch.setattr(hydra_task.HydraConfig, "get", lambda: config)
    assert hydra_task.num_parallel_points(points) == parallel
