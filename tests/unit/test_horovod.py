"""Horovod's settings, slots, exchange tables and stall warning, without a process."""

from __future__ import annotations

import re

import pytest
import torch

from parallelrun.cli import hosts
from parallelrun.errors import ConfigError, EnvironmentProblem
from parallelrun.plan import account
from parallelrun.plan.resolve import resolve
from parallelrun.strategies.data.horovod import adasum, halving
from parallelrun.strategies.data.horovod.stalls import Progress, find_stalls
from tests.plans import tiny_config, tiny_plan

HOROVOD = {"strategy.data.kind": "horovod"}


def plan_of(**overrides):
    return tiny_plan({**HOROVOD, **{key.replace("__", "."): value for key, value in overrides.items()}})


def data(**settings):
    return {f"strategy.data.{key}": value for key, value in settings.items()}


# -- fusion


def test_the_fewer_sums_the_higher_the_threshold_and_0_fuses_nothing():
    def row(bucket_mb):
        plan = tiny_plan({"dp": 2, **HOROVOD, **data(bucket_mb=bucket_mb)})
        (found,) = [row for row in account.collectives(plan, 0) if row.purpose == "gradients"]
        return found

    rows = [row(megabytes) for megabytes in (0.0, 0.005, 0.02, 25.0)]
    calls = [one.calls for one in rows]
    assert calls[0] == len(tiny_plan(dp=2).spec.parameters) and calls[-1] == 1
    assert calls == sorted(calls, reverse=True) and len(set(calls)) == 4
    assert len({one.payload_bytes for one in rows}) == 1


# -- what is legal


@pytest.mark.parametrize(
    ("dp", "settings", "said", "fix"),
    [
        (3, {"reduction": "adasum"}, "3 is no power of two", "dp=2"),
        (4, {"reduction": "adasum", "compression": "powersgd"}, "compresses sums", "fp16"),
        (4, {"reduction": "adasum", "algorithm": "ring"}, "its own exchange", "leave it out"),
        (4, {"reduction": "median"}, "unknown", "average"),
        (4, {"process_sets": ((0, 1), (2,))}, "each of the 4 workers", r"[[0,1],[2,3]]"),
        (4, {"process_sets": ((0, 1), (1, 2))}, "each of the 4 workers", r"[[0,1],[2,3]]"),
        (2, {"worker_batches": (3,)}, "for each of the 2 workers", "[3,3]"),
        (2, {"worker_batches": (2, 1)}, "nobody has a batch for step 3 of 3", "steps=2"),
        (2, {"worker_batches": (3, 1), "reduction": "adasum"}, "join is not defined with adasum", "leave"),
        (2, {"worker_batches": (3, 1), "process_sets": ((0,), (1,))}, "join is not defined with process sets", "leave"),
        (2, {"join_divisor": "active"}, "only where workers run out", "leave strategy.data.join_divisor out"),
        (2, {"stall_warn_s": -1.0}, "at least 0", "stall_warn_s"),
    ],
)  # fmt: skip
def test_what_horovod_refuses_is_refused_with_what_is_legal(dp, settings, said, fix):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config({"dp": dp, "global_batch": 12, **HOROVOD, **data(**settings)}))
    texts = [f"{problem.what} -> {problem.suggestion}" for problem in caught.value.problems]
    assert any(said in text and fix in text for text in texts), texts


def test_verify_asks_for_batches_of_its_own_steps():
    config = tiny_config({"dp": 2, "steps": 60, "verb": "verify", **HOROVOD, **data(worker_batches=(3, 1))})
    assert resolve(config).equivalence.kind == "replay"


def test_a_data_axis_of_one_is_one_device():
    plan = tiny_plan({"dp": 1, **HOROVOD, **data(reduction="adasum", timeline=True)})
    assert plan.equivalence.kind == "exact" and not plan.data.independent


def test_the_last_joiner_is_the_highest_of_those_with_most_batches():
    assert tiny_plan({"dp": 3, "global_batch": 12, **HOROVOD, **data(worker_batches=(5, 2, 5))}).data.last_joiner == 2
    assert tiny_plan({"dp": 2, **HOROVOD}).data.last_joiner is None


# -- Adasum


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    torch.testing.assert_close(adasum.combine(a, b), a + b)
    torch.testing.assert_close(adasum.combine(a, a), a)
    torch.testing.assert_close(adasum.combine(a, 3 * a), 2 * a)
    torch.testing.assert_close(adasum.combine(a, torch.zeros(2)), a)
    torch.testing.assert_close(adasum.combine(torch.zeros(2), torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 64])
def test_the_kept_parts_of_all_members_make_up_the_vector(size, numel):
    last = [halving.levels(numel, size, index)[-1].keep for index in range(size)]
    held = sorted(element for start, stop in last for element in range(start, stop))
    assert held == list(range(numel))
    for index in range(size):
        for level in halving.levels(numel, size, index):
            other = halving.levels(numel, size, index ^ level.distance)
            assert next(one for one in other if one.distance == level.distance).give == level.keep


# -- slots


def places(ranks, listed):
    return [(one.host.name, one.first_rank, one.num_ranks) for one in hosts.read(ranks, listed)]


def test_slots_are_filled_in_the_order_given_and_the_tail_stays_idle():
    assert places("5", "b:4,a:4") == [("b", 0, 4), ("a", 4, 1)]
    assert places("4", "b:4,a:4") == [("b", 0, 4)]
    assert places("8", "b:4,a:4") == [("b", 0, 4), ("a", 4, 4)]


def test_all_slots_without_a_number_and_this_host_without_hosts():
    assert places(None, "b:4,a:2") == [("b", 0, 4), ("a", 4, 2)]
    assert places("3", None) == [("localhost", 0, 3)]
    assert places("3", "localhost") == [("localhost", 0, 3)]
    assert places("4", "a:2,a:2") == [("a", 0, 4)]


def test_more_ranks_than_slots_is_refused_in_horovodruns_words():
    with pytest.raises(ConfigError, match=re.escape("Requested more processes (9) than there are available slots (8)")):
        hosts.read("9", "a:4,b:4")


@pytest.mark.parametrize("listed", ["a:", "a:x", "a:0", "a:4,", ":4", "a b:2", "a;rm:2"])
def test_a_host_is_a_name_with_a_number(listed):
    with pytest.raises(ConfigError, match="no host with slots"):
        hosts.read("1", listed)


def test_every_host_gets_the_command_that_starts_its_ranks():
    placed = hosts.read("6", "first:4,second:4")
    first, second = hosts.commands(placed, ["model=gpt", "name=a b"], 29500, "/work/my dir")
    assert second == (
        "cd '/work/my dir' && torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=first "
        "--master-port=29500 -m parallelrun model=gpt 'name=a b'"
    )
    assert "--node-rank=0 --nproc-per-node=4" in first


def test_where_no_host_is_this_one_nothing_is_started(capsys):
    with pytest.raises(EnvironmentProblem, match="nothing was started"):
        hosts.start(hosts.read("4", "first:2,second:2"), ["-np", "4", "-H", "first:2,second:2", "steps=1"])
    said = capsys.readouterr().out
    assert "on first (ranks 0 to 1)" in said and "on second (ranks 2 to 3)" in said
    assert "-m parallelrun steps=1" in said and " -np " not in said and " -H " not in said


# -- stalls


NAMES = {0: (("head.weight",), ("embedding.weight",)), 2: (("head.weight",), ("embedding.weight",))}


def progress(step, submitted, done, waits=None, missing=()):
    return Progress(step, submitted, done, waits, tuple(missing))


def test_a_stall_names_the_missing_rank_and_its_tensors():
    said = {0: progress(3, 2, 1, 61.0), 1: progress(3, 1, 0, None, ["embedding.weight"])}
    (stall,) = find_stalls([(0, 1)], said, NAMES, 60.0)
    assert stall.missing == ((1, ("embedding.weight",)),) and stall.waiting == (0,)
    assert "rank 1: embedding.weight" in stall.text() and "61 s" in stall.text() and "step 3" in stall.text()


def test_a_rank_that_never_began_is_missing_with_what_it_is_waited_for():
    (stall,) = find_stalls([(0, 1)], {0: progress(1, 2, 0, 70.0)}, NAMES, 60.0)
    assert stall.missing == ((1, ("head.weight",)),)


def test_nobody_is_missing_while_all_wait_or_nobody_waits_long():
    slow = {0: progress(3, 2, 1, 61.0), 1: progress(3, 2, 1, 61.0)}
    assert find_stalls([(0, 1)], slow, NAMES, 60.0) == []
    fine = {0: progress(3, 2, 1, 59.0), 1: progress(2, 1, 0)}
    assert find_stalls([(0, 1)], fine, NAMES, 60.0) == []


def test_only_the_group_that_waits_is_told_of():
    said = {0: progress(3, 2, 1, 61.0), 1: progress(3, 1, 1), 2: progress(3, 2, 1, 1.0), 3: progress(2, 0, 0)}
    (stall,) = find_stalls([(0, 1), (2, 3)], said, NAMES, 60.0)
    assert [rank for rank, _ in stall.missing] == [1]


# -- process sets


@pytest.mark.parametrize("settings", [{}, {"algorithm": "ring"}, {"reduction": "adasum"}])
def test_a_process_set_sends_as_many_bytes_as_a_data_axis_of_its_size(settings):
    """Wire bytes are those of a group of two, not of the four workers."""

    def wire(dp, **more):
        plan = tiny_plan({"dp": dp, **HOROVOD, **data(**settings, **more)})
        _, rows = account.traffic(plan)
        return {row.group_size: row.wire_bytes for row in rows if row.purpose in ("gradients", "parameters")}[2]

    assert wire(4, process_sets=((0, 3), (1, 2))) == wire(2)


@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "adasum", "compression": "fp16"},
        {"process_sets": ((0, 1), (2, 3)), "compression": "fp16"},
        {"process_sets": ((0,), (1,), (2,), (3,))},
        {"worker_batches": (3, 3, 1, 2)},
    ],
)
def test_plan_can_show_it(settings):
    from parallelrun.plan.document import facts

    config = tiny_config({"dp": 4, "cluster.inter_gb_s": 3.0, "cluster.intra_gb_s": 3.0, **HOROVOD, **data(**settings)})
    assert facts(resolve(config), config)
