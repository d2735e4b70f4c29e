"""Horovod's settings, slots and exchange tables, without a process."""

from __future__ import annotations

import re

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.cli import argv
from parallelrun.launch.over_ssh import hosts
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.horovod import adasum
from tests.plans import tiny_config, tiny_plan

HOROVOD = {"strategy.data.kind": "horovod"}


def plan_of(**overrides):
    return tiny_plan({**HOROVOD, **{key.replace("__", "."): value for key, value in overrides.items()}})


def data(**settings):
    return {f"strategy.data.{key}": value for key, value in settings.items()}


def test_a_data_axis_of_one_is_one_device():
    plan = tiny_plan({"dp": 1, **HOROVOD, **data(reduction="adasum")})
    assert plan.equivalence.kind == "exact" and not plan.data.independent


# -- Adasum


def combine(a, b):
    return adasum.weigh(a, b, adasum.dots(a, b))


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    torch.testing.assert_close(combine(a, b), a + b)
    torch.testing.assert_close(combine(a, a), a)
    torch.testing.assert_close(combine(a, 3 * a), 2 * a)
    torch.testing.assert_close(combine(a, torch.zeros(2)), a)
    torch.testing.assert_close(combine(torch.zeros(2), torch.zeros(2)), torch.zeros(2))


# -- slots


@pytest.mark.parametrize(
    ("ranks", "listed", "expected"),
    [
        ("5", "b:4,a:4", [("b", 0, 4), ("a", 4, 1)]),  # in the order of the hosts
        ("4", "b:4,a:4", [("b", 0, 4)]),
        (None, "b:4,a:2", [("b", 0, 4), ("a", 4, 2)]),
        ("3", None, [("localhost", 0, 3)]),
        ("3", "localhost", [("localhost", 0, 3)]),
        ("4", "a:2,a:2", [("a", 0, 4)]),
    ],
)
def test_ranks_fill_slots(ranks, listed, expected):
    assert [(host.name, host.first_rank, host.num_ranks) for host in hosts.place_ranks(ranks, listed)] == expected


def test_a_spare_host_has_no_ranks_yet():
    assert not hosts.has_others(hosts.place_ranks("1", "localhost:1,a:4"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *(([*["-np", "1", "-H"], listed], "not a host with slots") for listed in ("a:", "a:x", "a:4,", ":4", "a;rm:2")),
        (["-np", "4", "-H", "a:0,b:2,c:x"], "a:0.*c:x"),
        (["-np", "9", "-H", "a:4,b:4"], r"Requested more processes \(9\) than there are available slots \(8\)"),
        (["-H", "a:2", "--ssh-config", "/no/file"], "--ssh-config /no/file: no such file"),
        (["-np", "2", "--ssh-config", __file__], "no other host is given"),
    ],
)
def test_flags_of_hosts_are_checked_before_anything_starts(words, told):
    with pytest.raises(ConfigError) as caught:
        argv.read([*words, "model=gpt"])
    assert re.search(told, str(caught.value), re.DOTALL)


def test_three_flags_say_how_ssh_reaches_the_hosts(tmp_path):
    file = tmp_path / "file"
    file.touch()
    words = ["-H", "a:2,b:2", "--ssh-config", str(file)]
    line = argv.read([*words, "model=gpt"])
    assert line.ssh_config == str(file)
    assert [override.text for override in line.overrides] == ["model=gpt", "world=4"]


# -- process sets


def test_a_worker_in_no_process_set_has_one_of_its_own_and_that_is_said():
    plan = plan_of(dp=8, **{"strategy.data.process_sets": [[0, 2, 4, 6]]})
    assert plan.data.process_sets == ((0, 2, 4, 6), (1,), (3,), (5,), (7,))
    assert "workers 1, 3, 5, 7 train alone, each by itself (filled: they are in no process set)" in plan.filled
    one = plan_of(dp=3, global_batch=12, **{"strategy.data.process_sets": [[2, 0]]})
    assert "worker 1 trains alone (filled: it is in no process set)" in one.filled
    assert not any("alone" in text for text in plan_of(dp=2).filled)


def test_the_groups_of_process_sets_contain_every_rank_once():
    sets = {"strategy.data.process_sets": [[0, 2]]}
    plans = [plan_of(dp=4, **sets), plan_of(dp=3, tp=2, global_batch=12, **sets), plan_of(dp=2, tp=2)]
    first, second, third = (plan.data.rank_groups(plan) for plan in plans)
    assert first == [(0, 2), (1,), (3,)]
    assert second == [(0, 4), (2,), (1, 5), (3,)]
    assert third == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "adasum", "compression": "fp16"},
        {"process_sets": ((0, 1), (2, 3)), "compression": "fp16"},
        {"process_sets": ((0, 1, 3),)},
        {"process_sets": ((0,), (1,), (2,), (3,))},
        {"worker_batches": (3, 3, 1, 2)},
    ],
)
def test_plan_can_show_it(settings):
    from parallelrun.planner.facts.plan_facts import facts

    config = tiny_config({"dp": 4, "cluster.inter_gb_s": 3.0, "cluster.intra_gb_s": 3.0, **HOROVOD, **data(**settings)})
    assert facts(resolve(config), config)


def test_hosts_of_a_file_in_the_ways_of_horovod_openmpi_and_deepspeed(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# our machines\nworker-1 slots=2\nworker-2:3  # new\n\nworker-3 slots=1 max_slots=4\n")
    found = [(one.name, one.first_rank, one.num_ranks) for one in hosts.place_ranks(None, None, str(file))]
    assert found == [("worker-1", 0, 2), ("worker-2", 2, 3), ("worker-3", 5, 1)]
    file.write_text("worker-1 slots=two\nworker-2 gpus=8\n")
    with pytest.raises(ConfigError) as caught:
        hosts.place_ranks("2", None, str(file))
    assert [problem.what.partition(": ")[0] for problem in caught.value.problems] == [
        f"{file}, line 1",
        f"{file}, line 2",
    ]
    for given in ((None, "a:2", str(file)), (None, None, str(tmp_path / "none")), (None, None, "/dev/null")):
        with pytest.raises(ConfigError):
            hosts.place_ranks(*given)
