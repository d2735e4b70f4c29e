"""TensorFlow's words for a cluster: `cluster.ps` and `cluster.worker`, and TF_CONFIG."""

from __future__ import annotations

import json
import shlex

import pytest

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.launch.host import tf_config
from parallelrun.launch.host.environment import Attached, detect, for_rank
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan

PS = {"strategy.name": "ps", "strategy.data.kind": "ps", "global_batch": 12, "dp": None, "tp": None, "pp": None}
WORKERS, SERVERS = ["a:2222", "b:2222", "b:2223"], ["c:2222"]


def refused(overrides, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config({**PS, **overrides}), **more)
    return " ".join(f"{problem.what} ({problem.suggestion})" for problem in caught.value.problems)


class TestInTheConfiguration:
    def test_one_task_is_one_rank(self):
        plan = tiny_plan({**PS, "cluster.worker": WORKERS, "cluster.ps": SERVERS})
        assert (plan.num_workers, plan.servers, plan.data.servers) == (3, 1, 1)
        assert "dp=3 (filled: cluster of 3 workers and 1 ps)" in plan.filled

    def test_a_cluster_without_ps_is_any_strategy_s_world(self):
        plan = tiny_plan({"dp": None, "tp": 2, "cluster.worker": ["localhost:1", "localhost:2"]})
        assert plan.degrees == {"pp": 1, "dp": 1, "cp": 1, "tp": 2, "ep": 1}

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (
                {"cluster.worker": ["a"], "cluster.ps": SERVERS},
                "cluster.worker: 'a' is not host:port (cluster.worker=[a:2222])",
            ),
            (
                {"cluster.worker": ["grpc://a:1"], "cluster.ps": SERVERS},
                "'grpc://a:1' is not host:port (cluster.worker=[a:2222])",
            ),
            (
                {"cluster.worker": ["a:70000"], "cluster.ps": SERVERS},
                "a:70000: the port must be from 1 to 65535 (cluster.worker=[a:2222])",
            ),
            ({"cluster.worker": ["a:1", "a:1"], "cluster.ps": SERVERS}, "a:1 is the address of two tasks"),
            ({"cluster.ps": SERVERS}, "cluster.ps is given without cluster.worker"),
            ({"cluster.worker": WORKERS}, "strategy=ps needs a server, and the cluster of 3 workers names none"),
            ({"cluster.worker": WORKERS, "cluster.ps": SERVERS, "servers": 2}, "servers=2 contradicts cluster.ps"),
            ({"cluster.worker": WORKERS, "cluster.ps": SERVERS, "world": 5}, "world=5, but cluster of 3 workers and 1"),
            ({"cluster.worker": WORKERS, "cluster.ps": SERVERS, "dp": 2}, "but cluster of 3 workers and 1 ps"),
            (
                {"cluster.worker": WORKERS, "cluster.ps": SERVERS, "strategy.data.kind": "ddp", "strategy.name": "ddp"},
                "cluster.ps names 1 server, and strategy=ddp has none (strategy=ps",
            ),
        ],
    )
    def test_what_cannot_be(self, overrides, said):
        assert said in refused(overrides)

    def test_a_launcher_must_have_started_one_rank_per_task(self):
        said = refused({"cluster.worker": WORKERS, "cluster.ps": SERVERS}, world=3)
        assert "ranks launched: 3, but cluster of 3 workers and 1 ps has 4 tasks" in said

    def test_ipv6_and_dots(self):
        plan = tiny_plan({**PS, "cluster.worker": ["[::1]:2222", "10.0.0.1:80"], "cluster.ps": ["a.b-c.example:1"]})
        assert plan.world == 3


def environ(task=None, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster} | ({"task": task} if task is not None else {}))}


def place(job, index, **cluster):
    return detect(environ({"type": job, "index": index}, **cluster))


class TestTfConfig:
    @pytest.mark.parametrize(
        ("job", "index", "rank", "local_rank"),
        [("worker", 0, 0, 0), ("worker", 1, 1, 0), ("worker", 2, 2, 1), ("ps", 0, 3, 0)],
    )
    def test_a_task_is_a_rank_and_worker_0_serves_the_store(self, job, index, rank, local_rank):
        addresses = " ".join([*WORKERS, *SERVERS])
        expected = Attached(rank, 4, local_rank, "a", 2222, "TF_CONFIG", addresses)
        assert place(job, index, worker=WORKERS, ps=SERVERS) == expected

    @pytest.mark.parametrize("first", ["chief", "master"])
    def test_a_chief_is_worker_0(self, first):
        cluster = {first: ["x:1"], "worker": ["y:1", "z:1"], "ps": ["p:1"]}
        ranks = [place(*task, **cluster).rank for task in ((first, 0), ("worker", 0), ("worker", 1), ("ps", 0))]
        assert ranks == [0, 1, 2, 3] and place("ps", 0, **cluster).master_addr == "x"

    def test_without_a_task_we_launch(self):
        assert detect(environ(worker=WORKERS)) is None and detect({"TF_CONFIG": "{}"}) is None
        assert detect({"TF_CONFIG": ""}) is None

    def test_one_task_alone_is_no_launcher(self):
        assert place("worker", 0, worker=["a:1"]) is None

    def test_torchrun_s_variables_win(self):
        ours = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "5"}
        found = detect({**environ({"type": "worker", "index": 0}, worker=WORKERS), **ours})
        assert found is not None and found.source == "torchrun"

    def test_our_own_ranks_do_not_inherit_it(self):
        assert "TF_CONFIG" not in for_rank(environ(worker=WORKERS), 0, 2, 1)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "TF_CONFIG is not JSON"),
            ("[]", "is not of the form"),
            ('{"cluster": []}', None),
            ('{"cluster": [1]}', "is not of the form"),
            ('{"cluster": {"paramserver": ["a:1"]}}', "no job is called 'paramserver' (worker or ps or chief)"),
            ('{"cluster": {"wroker": ["a:1"]}}', "no job is called 'wroker' (worker)"),
            ('{"cluster": {"worker": "a:1"}}', "worker is not a list of host:port"),
            ('{"cluster": {"worker": ["a"]}}', "'a' is not host:port (cluster.worker=[a:2222])"),
            ('{"cluster": {"worker": ["a:1"], "evaluator": ["b:1"]}}', "has an evaluator; the workers evaluate"),
            ('{"cluster": {"chief": ["a:1", "b:1"]}}', "at most one chief"),
            ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}', "last one is worker:1"),
            ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 0}}', "the cluster has no ps"),
            ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "serv"}}', "serv:0 belongs to no job"),
            ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "0"}}', "does not exist"),
            ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": 7}', "belongs to no job of the cluster"),
        ],
    )
    def test_nonsense_is_named(self, text, said):
        if said is None:
            assert detect({"TF_CONFIG": text}) is None
            return
        with pytest.raises(EnvironmentProblem) as caught:
            detect({"TF_CONFIG": text})
        assert said in " ".join(f"{problem.what} ({problem.suggestion})" for problem in caught.value.problems)

    def test_it_says_how_many_servers(self):
        config = tf_config.apply(tiny_config(PS), environ(chief=["a:1"], worker=["b:1"], ps=["c:1", "d:1"]))
        plan = resolve(config)
        assert (plan.num_workers, plan.servers) == (2, 2)

    def test_another_cluster_in_the_configuration_is_a_contradiction(self):
        config = tiny_config({**PS, "cluster.worker": ["a:1"]})
        with pytest.raises(ConfigError, match=r"cluster.worker=\[a:1\], but TF_CONFIG names \[b:1\]"):
            tf_config.apply(config, environ(worker=["b:1"]))
        assert tf_config.apply(config, environ(worker=["a:1"])).cluster.worker == ["a:1"]


class TestOtherHosts:
    def test_each_task_gets_its_exact_command(self, capsys):
        config = tiny_config({"cluster.worker": WORKERS, "cluster.ps": SERVERS})
        argv = ["model=gpt", "cluster.ps=[c:2222]", "name=a b"]
        with pytest.raises(EnvironmentProblem, match="is on 3 hosts, and parallelrun cannot start"):
            tf_config.refuse_other_hosts(config, argv, "a")
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["a", "b", "b", "c"]
        for rank, line in enumerate(lines):  # what a shell makes of it places the task
            words = shlex.split(line.partition(": ")[2])
            assert words[0] == "env" and words[2:] == ["parallelrun", "model=gpt", "name=a b"]
            name, _, value = words[1].partition("=")
            found = detect({name: value})
            assert found is not None and (found.rank, found.world) == (rank, 4)

    @pytest.mark.parametrize("hosts", [["localhost:1", "127.0.0.1:2"], ["me:1", "[::1]:3"]])
    def test_this_host_needs_no_help(self, hosts):
        tf_config.refuse_other_hosts(tiny_config({"cluster.worker": hosts}), [], "me")
        tf_config.refuse_other_hosts(tiny_config(), [], "me")
