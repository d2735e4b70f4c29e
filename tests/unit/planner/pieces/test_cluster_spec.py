"""TensorFlow's words for a cluster: `cluster.ps` and `cluster.worker`."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.launch.host import preflight
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


class TestOtherHosts:
    def test_they_are_refused_with_the_command_that_starts_ranks_there(self):
        config = tiny_config({"cluster.worker": WORKERS, "cluster.ps": SERVERS})
        with pytest.raises(EnvironmentProblem, match="cluster of 3 workers and 1 ps is on 3 hosts") as caught:
            preflight.refuse_other_hosts(config, "a")
        assert "parallelrun -H a:1,b:2,c:1 ..." in caught.value.problems[0].command

    @pytest.mark.parametrize("hosts", [["localhost:1", "127.0.0.1:2"], ["me:1", "[::1]:3"]])
    def test_this_host_needs_no_help(self, hosts):
        preflight.refuse_other_hosts(tiny_config({"cluster.worker": hosts}), "me")
        preflight.refuse_other_hosts(tiny_config(), "me")
