"""Horovod's settings, slots, exchange tables and stall warning, without a process."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.cli import argv
from parallelrun.launch.over_ssh import hosts
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.traffic import traffic_of
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.common.allreduce.rounds import halvings
from parallelrun.strategies.data.horovod import adasum, halving
from parallelrun.strategies.data.horovod.stalls import StallWatch, SubmissionProgress, stall_warning
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
        (found,) = [row for row in prediction.collectives(plan, 0) if row.purpose == "gradients"]
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
        (4, {"process_sets": ((0, 1), (1, 2))}, "worker 1 is in several sets", r"[[0,1],[2]]"),
        (4, {"process_sets": ((0, 0, 1),)}, "worker 0 is in several sets", r"[[0,1]]"),
        (4, {"process_sets": ((0, 4), (2, -1))}, "no worker -1: the 4 workers are 0 to 3", r"[[0],[2]]"),
        (4, {"process_sets": ((0, 1), ())}, "a set has no workers", r"[[0,1]]"),
        (4, {"process_sets": ((0, 1, 3),), "reduction": "adasum"}, "3 is no power of two", "reduction=average"),
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


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 64])
def test_the_kept_parts_of_all_members_make_up_the_vector(size, numel):
    last = [halvings(numel, size, index)[-1].keep for index in range(size)]
    held = sorted(element for start, stop in last for element in range(start, stop))
    assert held == list(range(numel))
    for index in range(size):
        for level in halvings(numel, size, index):
            other = halvings(numel, size, index ^ level.distance)
            assert next(one for one in other if one.distance == level.distance).give == level.keep


# -- slots


def places(ranks, listed):
    return [(one.name, one.first_rank, one.num_ranks) for one in hosts.place_ranks(ranks, listed)]


def test_slots_are_filled_in_the_order_given_and_the_tail_stays_idle():
    assert places("5", "b:4,a:4") == [("b", 0, 4), ("a", 4, 1)]
    assert places("4", "b:4,a:4") == [("b", 0, 4), ("a", 4, 0)]
    assert not hosts.has_others(hosts.place_ranks("1", "localhost:1,a:4"))  # a spare host has no ranks yet
    assert places("8", "b:4,a:4") == [("b", 0, 4), ("a", 4, 4)]


def test_all_slots_without_a_number_and_this_host_without_hosts():
    assert places(None, "b:4,a:2") == [("b", 0, 4), ("a", 4, 2)]
    assert places("3", None) == [("localhost", 0, 3)]
    assert places("3", "localhost") == [("localhost", 0, 3)]
    assert places("4", "a:2,a:2") == [("a", 0, 4)]


def test_more_ranks_than_slots_is_refused_in_horovodruns_words():
    with pytest.raises(ConfigError, match=re.escape("Requested more processes (9) than there are available slots (8)")):
        hosts.place_ranks("9", "a:4,b:4")


@pytest.mark.parametrize("listed", ["a:", "a:x", "a:0", "a:4,", ":4", "a b:2", "a;rm:2"])
def test_a_host_is_a_name_with_a_number(listed):
    with pytest.raises(ConfigError, match="not a host with slots"):
        hosts.place_ranks("1", listed)


def test_all_hosts_that_are_wrong_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        hosts.place_ranks("4", "a:0,b:2,c:x")
    assert [problem.what.split("'")[1] for problem in caught.value.problems] == ["a:0", "c:x"]


def test_how_ssh_reaches_the_hosts_is_told_by_three_flags(tmp_path):
    file = tmp_path / "file"
    file.touch()
    words = ["-H", "a:2,b:2", "--ssh-port", "2222", f"--ssh-identity-file={file}", "--ssh-config", str(file)]
    line = argv.read([*words, "model=gpt"])
    assert line.ssh.words() == ["-F", str(file), "-p", "2222", "-i", str(file), "-o", "IdentitiesOnly=yes"]
    assert [override.text for override in line.overrides] == ["model=gpt", "world=4"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-H", "a:2", "--ssh-port", "x"], "--ssh-port x: not a port"),
        (["-H", "a:2", "--ssh-port", "70000"], "--ssh-port 70000: not a port"),
        (["-H", "a:2", "--ssh-identity-file", "/no/key"], "--ssh-identity-file /no/key: no such file"),
        (["-np", "2", "--ssh-port", "22"], "no other host is given"),
    ],
)
def test_ssh_flags_are_checked_before_anything_starts(words, told):
    with pytest.raises(ConfigError, match=told):
        argv.read([*words, "model=gpt"])


# -- stalls


HEAD, EMBEDDING = ("head.weight",), ("embedding.weight",)


def progress(step, submitted, waits_s=0.0, tensors=()):
    return SubmissionProgress(step, 4 * (step - 1) + submitted, waits_s, tensors)


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ({0: progress(3, 2, 61.0, HEAD), 1: progress(3, 1, 0.0, EMBEDDING)}, EMBEDDING),
        ({0: progress(3, 4, 61.0, HEAD), 1: progress(3, 2, 0.0, EMBEDDING)}, EMBEDDING),  # the last sums need it too
        ({0: progress(1, 2, 61.0, HEAD)}, HEAD),  # it has not begun
        ({0: progress(3, 2, 61.0, HEAD), 1: progress(2, 1, 0.0, EMBEDDING)}, HEAD),  # it is a step behind
        ({0: progress(3, 2, 61.0, HEAD), 1: progress(3, 2, 61.0, HEAD)}, None),
        ({0: progress(3, 2, 59.0, HEAD), 1: progress(2, 1)}, None),
    ],
)
def test_a_stall_names_the_missing_rank_and_its_tensors(reports, told):
    warning = stall_warning((0, 1), reports, 60.0)
    assert (f"  rank 1: {told[0]}" in warning and "61 s" in warning) if told else warning == ""
    assert stall_warning((2, 3), reports, 60.0) == ""


def test_a_rank_reports_the_exchanges_of_all_its_steps():
    """So that one that is a step behind has submitted fewer, wherever it is in its step."""
    done, waiting = (SimpleNamespace(is_submitted=True, waits_s=waits_s, names=("w",)) for waits_s in (0.0, 2.0))
    watch = SimpleNamespace(step=3, _exchanges=[done, waiting], _buckets=[])
    assert StallWatch._progress(watch) == SubmissionProgress(3, 6, 2.0, ("w",))


# -- process sets


@pytest.mark.parametrize("settings", [{}, {"algorithm": "ring"}, {"reduction": "adasum"}])
def test_a_process_set_sends_as_many_bytes_as_a_data_axis_of_its_size(settings):
    """Wire bytes are those of a group of two, not of the four workers."""

    def wire(dp, **more):
        plan = tiny_plan({"dp": dp, **HOROVOD, **data(**settings, **more)})
        _, rows = traffic_of(plan)
        return {row.group_size: row.wire_bytes for row in rows if row.purpose in ("gradients", "parameters")}[2]

    assert wire(4, process_sets=((0, 3), (1, 2))) == wire(2)


def test_a_worker_in_no_process_set_has_one_of_its_own_and_that_is_said():
    plan = plan_of(dp=8, **{"strategy.data.process_sets": [[0, 2, 4, 6]]})
    assert plan.data.process_sets == ((0, 2, 4, 6), (1,), (3,), (5,), (7,))
    assert "workers 1, 3, 5, 7 train alone, each by itself (filled: they are in no process set)" in plan.filled
    one = plan_of(dp=3, global_batch=12, **{"strategy.data.process_sets": [[2, 0]]})
    assert "worker 1 trains alone (filled: it is in no process set)" in one.filled
    assert not any("alone" in text for text in plan_of(dp=2).filled)


def gradient_traffic(**settings):
    """{axis: (group size, calls and payload of all ranks)} of gradients."""
    rows = traffic_of(plan_of(**{f"strategy.data.{k}" if k != "dp" else k: v for k, v in settings.items()}))[1]
    return {r.axis: (r.group_size, r.total_calls, r.total_payload_bytes) for r in rows if r.purpose == "gradients"}


def test_a_worker_in_no_process_set_sends_no_gradients():
    two, four = gradient_traffic(dp=2)["dp"], gradient_traffic(dp=8, process_sets=[[0, 2, 4, 6]])
    assert four == {"process_set": (4, 2 * two[1], 2 * two[2])}  # of four members; the other four send nothing
    assert gradient_traffic(dp=2, process_sets=[[0]]) == {}


def test_process_sets_of_different_sizes_are_counted_apart():
    sums = gradient_traffic(dp=8, process_sets=[[0, 1, 2], [3, 4], [5, 6]])
    one = gradient_traffic(dp=2)["dp"]
    assert sums == {
        "process_set_3": (3, 3 * one[1] // 2, 3 * one[2] // 2),
        "process_set_2": (2, 4 * one[1] // 2, 4 * one[2] // 2),
    }


def test_a_stall_is_looked_for_within_process_sets():
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


@pytest.mark.parametrize(
    ("lengths", "size", "sent", "stored", "expected"),
    [
        ([16] * 32, 2, 4, 4, 2048 + 1024 + 2 * 8 * 16),  # two products of the largest tensor in fp64
        ([16] * 32, 4, 4, 4, 2048 + 1024 + 512),  # more: the quarter of the next partner
        ([64] * 4, 2, 8, 8, 2048 + 1024 + 3 * 8 * 64),  # of fp64 itself a third term
        ([16] * 32, 2, 2, 4, 1024 + 2048),  # the update in the stored dtype
    ],
)
def test_what_combining_an_update_of_adasum_takes(lengths, size, sent, stored, expected):
    assert halving.update_bytes(lengths, size, 0, sent, stored) == expected


def test_the_largest_update_of_adasum_is_what_a_step_s_end_needs():
    """Of 1,024 weights: themselves, the half that the partner gives, and both parts of it in fp64 for dot products."""
    plan = tiny_plan({"dp": 2, **HOROVOD, **data(reduction="adasum", bucket_mb=0)})
    assert max(one.numel for one in plan.spec.parameters.values()) == 1024
    assert plan.data.ending_bytes(0, plan.mesh.coordinate(0), plan) == 4 * 1024 + 4 * 512 + 2 * 8 * 512
