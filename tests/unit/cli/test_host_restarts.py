"""Restarts over several hosts: which hosts the next attempt uses, and what ends the run. No ssh."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from parallelrun.cli import host_agent, host_connection, host_launcher, host_restarts, hosts
from parallelrun.launch import reattach
from parallelrun.launch.directory import Status
from parallelrun.launch.host_failures import LostHost
from parallelrun.launch.rank import Job
from parallelrun.plan.freeze import filled, freeze
from parallelrun.plan.resolve import resolve
from parallelrun.run_records import attempts, find
from parallelrun.run_records.read import read_object
from tests.plans import tiny_config

SSH = hosts.SshOptions()


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """What each start of the ranks is told (`starts`), how it ends (`ends`: code, failing rank), and which hosts do not
    answer (`gone`)."""
    found = SimpleNamespace(starts=[], ends=[], gone=set(), folder=tmp_path, more={})

    class Launcher:
        exits, lost, noticed = (), (), None

        def __init__(self, placed, words, connections, variables, judges):
            assert judges
            self.placed, self.variables, self.signals = placed, variables, connections.signals

        def run(self):
            found.starts.append({one.name: one.num_ranks for one in self.placed if one.num_ranks})
            code, rank = found.ends[len(found.starts) - 1]
            with monkeypatch.context() as ours:
                for name, value in self.variables.items():
                    ours.setenv(name, value)
                record(found, len(found.starts), rank, code)
            if code == 143:
                self.signals.append(15)
            return code

    class Connections(host_connection.Connections):
        """Those to hosts that answer at once; `gone` have ended, and do not answer again."""

        def open(self, hosts, again=False):
            for one in hosts:
                answers = not (again and one.name in found.gone)
                self.by_name[one.name] = Connection(one.name, object() if answers else None)

    class Connection(SimpleNamespace):
        def __init__(self, name, hello):
            process = SimpleNamespace(poll=lambda: 255 if found.starts and name in found.gone else None)
            super().__init__(name=name, hello=hello, process=process, is_cut=False)

        def hang_up(self):
            pass

        def end(self, deadline):
            pass

    monkeypatch.setattr(host_restarts, "HostLauncher", Launcher)
    monkeypatch.setattr(host_restarts, "Connections", Connections)
    return found


def record(found, number, rank, code):
    """Leave what the ranks of an attempt would."""
    world = sum(found.starts[-1].values())
    config = tiny_config({"dp": world, "runs": str(found.folder), "steps": 9, "global_batch": 8, **found.more})
    plan = resolve(config)
    directory = found.folder / "gpt" / "20261123T000000Z-aaaaaa"
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    job = Job(filled(config, plan), plan, directory, attempt=number)
    job.config_file.parent.mkdir(parents=True, exist_ok=True)
    job.config_file.write_text(freeze(config, plan))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {number}}}\n')
    if number == 1:
        reattach.remember(job)
    else:
        history = attempts.read(directory)
        attempts.write(directory, [*history, attempts.Attempt(number, plan.world, plan.degrees)])
    Status(directory, number).ended(code, "died: SIGKILL" if code else None, rank)


def run(found, listed="a:2,b:2", ranks=None, **more):
    found.more = {"restarts": 2, **more}
    placed = hosts.read(ranks, listed)
    asked = tiny_config({"dp": 4, "runs": str(found.folder), "steps": 9, "global_batch": 8, **found.more})
    return host_restarts.run(placed, ["steps=9"], SSH, asked, resolve(asked))


def status(found):
    return read_object(found.folder / "gpt" / "20261123T000000Z-aaaaaa" / find.STATUS)


def test_all_hosts_that_answer_start_again_until_the_run_is_done(runs):
    runs.ends = [(6, 3), (6, 0), (0, None)]
    assert run(runs) == 0
    assert runs.starts == [{"a": 2, "b": 2}] * 3
    history = attempts.read(runs.folder / "gpt" / "20261123T000000Z-aaaaaa")
    assert [(one.rank, one.host) for one in history[:2]] == [(3, "b"), (0, "a")]


def test_free_slots_take_the_ranks_of_a_host_that_is_gone(runs):
    runs.ends, runs.gone = [(6, 0), (0, None)], {"a"}
    assert run(runs, "a:2,b:2,c:2", "4") == 0
    assert runs.starts == [{"a": 2, "b": 2}, {"b": 2, "c": 2}]


def test_an_elastic_run_goes_on_with_the_slots_that_are_left(runs):
    runs.ends, runs.gone = [(6, 2), (0, None)], {"b"}
    assert run(runs, elastic=True) == 0
    assert runs.starts == [{"a": 2, "b": 2}, {"a": 2}]


@pytest.mark.parametrize(
    ("more", "why"),
    [({}, "elastic=true goes on with fewer"), ({"elastic": True, "min_world": 3}, "no plan fits (min_world=3)")],
)
def test_too_few_slots_end_it(runs, capsys, more, why):
    runs.ends, runs.gone = [(6, 2)], {"b"}
    assert run(runs, **more) == 6
    assert len(runs.starts) == 1
    assert "  not restarted: 2 slots left for 4 ranks without b" in capsys.readouterr().err
    assert status(runs)["state"] == "failed" and why in status(runs)["error"]


def test_the_rules_of_one_host_hold(runs, capsys):
    """Restarts are used up; a wrong number is not tried again; a signal ends it at once."""
    runs.ends = [(6, 0), (6, 1), (6, 2)]
    assert run(runs) == 6 and len(runs.starts) == 3
    assert "not restarted: restarts=2 are used up" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "told"), [(5, "same numbers"), (143, "")])
def test_what_must_not_be_restarted_is_not(runs, capsys, code, told):
    runs.ends = [(code, 0)]
    assert run(runs) == code and len(runs.starts) == 1
    assert told in capsys.readouterr().err


def test_a_rank_that_fails_twice_at_the_same_step_loses_its_slot(runs, monkeypatch):
    runs.ends = [(6, 3), (6, 3), (0, None)]
    decide = reattach.restart_policy.decide
    monkeypatch.setattr(
        reattach.restart_policy, "decide",
        lambda history, most: replace(decide(history, most), without=3 if len(history) == 2 else None),
    )  # fmt: skip
    assert run(runs, elastic=True) == 0
    assert runs.starts == [{"a": 2, "b": 2}, {"a": 2, "b": 2}, {"a": 2}]


@pytest.mark.parametrize(
    ("hellos", "address"),
    [
        ([("10.9.9.9", ""), ("127.0.0.1", "127.0.0.1")], "127.0.0.1"),
        ([("127.0.0.1", "192.0.2.1")], "127.0.0.1"),  # through a jump host, whose address the agent has seen
        ([("10.9.9.9", "")], os.uname().nodename),
    ],
)
def test_rank_0_listens_on_an_address_of_its_own_host(hellos, address):
    found = [host_agent.Hello(1, "host", own, launcher) for own, launcher in hellos]
    assert host_launcher._own_address(found) == address


@pytest.mark.parametrize(
    ("signals", "error"), [([], "the connection to host b (rank 1) was lost"), ([15], "ended by SIGTERM")]
)
def test_the_launcher_writes_the_end_that_no_rank_could_write(runs, signals, error):
    runs.starts.append({"a": 1, "b": 1})
    record(runs, 1, None, 0)
    (directory,) = find.all_runs(runs.folder)
    Status(directory).running()
    launcher = host_launcher.HostLauncher.__new__(host_launcher.HostLauncher)
    launcher.directory, launcher._words, launcher.exits, launcher._judges = directory, ["dp=2"], [], False
    launcher.lost = [LostHost("b", 1, "rank 1")]
    launcher._connections = SimpleNamespace(signals=signals)
    launcher.start = lambda: False
    launcher.run()
    found = read_object(directory / find.STATUS)
    assert (found["state"], found["error"]) == ("failed", error)
