"""The plan of a parameter server: servers outside the mesh, shards, refusals, predicted traffic and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError
from parallelrun.launch.failures import failure
from parallelrun.launch.host import directory
from parallelrun.planner.facts.document import document, server_rows
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.rank_classes import rank_classes
from parallelrun.planner.predict.traffic import traffic_of
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.ps.plan import sharding
from parallelrun.strategies.data.ps.shards import Shard, assign, num_rows
from tests.plans import tiny_config, tiny_plan

PS = {"strategy.name": "ps", "strategy.data.kind": "ps", "strategy.demo": {"dp": 3}, "global_batch": 12}
FREE = {"dp": None, "tp": None, "pp": None}


def plan(**more):
    return tiny_plan({**PS, "dp": 3, **more})


def refused(**more) -> str:
    with pytest.raises(ConfigError) as caught:
        tiny_plan({**PS, "dp": 3, **more})
    return " ".join(f"{problem.what} ({problem.kind}; {problem.suggestion})" for problem in caught.value.problems)


class TestServersAreTheLastRanks:
    def test_the_smallest_plan(self):
        found = tiny_plan({**PS, **FREE})
        assert (found.world, found.num_workers, found.servers) == (4, 3, 1)
        assert [found.role(rank) for rank in range(4)] == ["worker"] * 3 + ["server"]
        assert "dp=3 (filled: the smallest plan that shows strategy=ps)" in found.filled

    def test_dp_takes_the_ranks_of_the_world_that_are_not_servers(self):
        found = tiny_plan({**PS, **FREE, "world": 4})
        assert found.mesh.size("dp") == 3 and "dp=3 (filled: world 4, 1 server)" in found.filled
        found = tiny_plan({**PS, **FREE, "world": 6, "servers": 2})
        assert found.mesh.size("dp") == 4 and "dp=4 (filled: world 6, 2 servers)" in found.filled

    def test_dp_takes_the_launched_ranks_that_are_not_servers(self):
        found = resolve(tiny_config({**PS, **FREE, "servers": 2}), world=5)
        assert found.mesh.size("dp") == 3 and "dp=3 (filled: 5 ranks launched, 2 servers)" in found.filled

    def test_on_gpus_every_gpu_has_a_worker(self):
        found = resolve(tiny_config({**PS, **FREE, "servers": 2}), gpus=4)
        assert (found.mesh.size("dp"), found.world) == (4, 6)

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"world": 1, "dp": None}, "world 1, 1 server: no rank is left to be a worker (arithmetic; world=2)"),
            ({"world": 3, "servers": 3, "dp": None}, "is left to be a worker (arithmetic; world=4 or servers=2)"),
            ({"world": 6}, "dp 3 x tp 1 = 3 ranks, but world 6, 1 server"),
            ({"world": 6}, "world=4 or servers=3"),
            ({"servers": 0}, "servers=0 is not a whole number of at least 1"),
        ],
    )  # fmt: skip
    def test_a_world_that_is_too_small_is_refused_with_the_nearest_ones(self, more, said):
        assert said in refused(**more)

    def test_no_other_strategy_has_servers(self):
        with pytest.raises(ConfigError, match="servers=2 is read by none of the chosen strategies"):
            resolve(tiny_config({"dp": 2, "servers": 2}), given=frozenset({"servers"}))
        assert tiny_plan(dp=2).servers == 0 and tiny_plan(dp=2).role(1) == "worker"

    def test_the_frozen_configuration_gives_the_same_plan(self):
        config = tiny_config({**PS, **FREE, "world": 5, "servers": 2, "staleness": 0})
        found = resolve(config)
        assert replace(resolve(load_frozen(freeze(config, found))), filled=()) == replace(found, filled=())

    def test_directory_names_and_failure_messages_name_servers(self):
        found = plan(servers=2)
        assert directory.name_of(tiny_config({**PS}), found) == "gpt-ps-dp3servers2"
        assert failure.coordinate(found, 4) == "server 1"


class TestConsistency:
    @pytest.mark.parametrize(
        ("more", "detail", "equivalence", "quorum"),
        [
            ({}, "sync, 1 server", "exact", 3),
            ({"consistency": "async"}, "async, 1 server", "replay", 1),
            ({"consistency": "ssp", "staleness": 4}, "ssp, staleness 4, 1 server", "replay", 1),
            ({"consistency": "ssp"}, "ssp, staleness 2, 1 server", "replay", 1),
            ({"staleness": 1}, "ssp, staleness 1, 1 server", "replay", 1),
            ({"backup_workers": 1, "servers": 2}, "sync, 1 backup worker, 2 servers", "replay", 2),
        ],
    )
    def test_detail_equivalence_and_quorum(self, more, detail, equivalence, quorum):
        found = plan(**more)
        assert (found.data.detail, found.equivalence.kind) == (detail, equivalence)
        assert found.data.quorum(found.num_workers) == quorum

    def test_the_default_staleness_is_reported(self):
        said = "staleness=2 (filled: clocks the fastest worker may be ahead under ssp)"
        assert said in plan(consistency="ssp").filled
        assert not any("staleness" in text for text in plan(staleness=2).filled + plan().filled)

    def test_with_staleness_0_ssp_is_sync(self):
        found = plan(consistency="ssp", staleness=0)
        assert found.data.quorum(3) == 3 and found.data.in_step and found.equivalence.kind == "exact"

    @pytest.mark.parametrize("more", [{"consistency": "async"}, {"staleness": 1}, {"backup_workers": 1}])
    def test_layers_that_exchange_something_need_workers_in_step(self, more):
        assert plan().data.in_step and not plan(**more).data.in_step

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"consistency": "asinc"}, "consistency=asinc is unknown; it is one of sync, async, ssp"),
            ({"consistency": "async", "staleness": 2}, "async has no bound (contradiction; consistency=ssp"),
            (
                {"consistency": "sync", "staleness": 2},
                "all workers, so no gradient is stale (contradiction",
            ),
            ({"consistency": "ssp", "staleness": -1}, "staleness=-1 is not a whole number"),
            ({"backup_workers": 3}, "backup_workers=3 of dp=3: an update needs at least one gradient (arithmetic"),
            ({"backup_workers": 3}, "backup_workers=2"),
            (
                {"backup_workers": 1, "consistency": "async"},
                "so none is spare (contradiction; consistency=sync",
            ),
            ({"strategy.data.delays": [0, 0, 0, 1.0]}, "has 4 entries, but there are 3 workers"),
            (
                {"strategy.data.delays": [0, -1.0]},
                "each delay is a number of seconds, at least 0",
            ),
            (
                {"tp": 2},
                "kind=ps with tp=2: a worker is one rank that holds the complete model (not_built",
            ),
            ({"model.experts": 4, "model.router.bias_rate": 0.1}, "which workers of ps do not exchange (not_built"),
            ({"pp": 2}, "strategy.data.kind=ps with pp=2"),
            ({"servers": 500}, "servers=500: the model has only"),
        ],
    )
    def test_refusals(self, more, said):
        assert said in refused(**more)

    def test_a_delay_belongs_to_a_worker(self):
        strategy = plan(**{"strategy.data.delays": [0, 0.5]}).data
        assert [strategy.delay(worker) for worker in range(3)] == [0.0, 0.5, 0.0]


def sized(servers: int, min_bytes: int):
    found = plan()
    return replace(found, servers=servers, data=replace(found.data, servers=servers, shard_min_bytes=min_bytes))


def assigned(found) -> list[tuple[int, Shard]]:
    return [(server, shard) for server, own in enumerate(sharding(found).of_server) for shard in own]


class TestShards:
    @given(servers=st.integers(1, 9), min_bytes=st.integers(0, 20_000))
    @settings(max_examples=40, deadline=None)
    def test_every_row_of_every_trained_parameter_is_on_one_server(self, servers, min_bytes):
        found = sized(servers, min_bytes)
        rows = Counter((shard.name, row) for _, shard in assigned(found) for row in range(shard.start, shard.stop))
        expected = [(p.name, row) for p in found.spec.parameters.values() for row in range(num_rows(p))]
        assert rows == Counter(expected)
        assert len(sharding(found).of_server) == servers

    @given(servers=st.integers(1, 9), min_bytes=st.integers(0, 20_000))
    @settings(max_examples=40, deadline=None)
    def test_the_greedy_assignment_is_within_its_bound(self, servers, min_bytes):
        """Graham 1969: the fullest holds at most the mean and one piece."""
        found = sized(servers, min_bytes)
        loads = sharding(found).num_bytes
        largest = max(4 * shard.numel for _, shard in assigned(found))
        assert sum(loads) == 4 * sum(prod(p.shape) for p in found.spec.parameters.values())
        assert max(loads) <= sum(loads) / servers + largest

    def test_the_largest_pieces_are_placed_first_and_each_on_the_emptiest_server(self):
        """Longest processing time first: 7 to A, 6 to B, 5 to B, 4 to A, 3 to A, 3 to B; any order else is worse."""
        found = plan()
        block, (first, *_) = found.spec.blocks[0], found.spec.blocks[0].layers[0].parameters
        parameters = tuple(replace(first, name=f"rows{rows}.{i}", shape=(rows, 8))
                           for i, rows in enumerate((3, 4, 5, 3, 6, 7)))  # fmt: skip
        layer = replace(block.layers[0], parameters=parameters)
        spec = replace(found.spec, blocks=(replace(block, layers=(layer,)),))
        shards = assign(spec, 2, 2**20, 4)
        assert [sum(shard.stop for shard in own) for own in shards.of_server] == [14, 14]
        assert shards.num_bytes == (14 * 8 * 4, 14 * 8 * 4) and shards.imbalance == 1.0

    def test_the_balance_of_the_servers_is_that_of_their_bytes(self):
        found = sized(3, 2**20)
        bytes_of = sharding(found).num_bytes
        assert len(set(bytes_of)) > 1
        assert [row["of_mean"] for row in server_rows(found)] == pytest.approx(
            [3 * one / sum(bytes_of) for one in bytes_of]
        )

    def test_only_tensors_above_the_threshold_are_cut(self):
        assert max(Counter(shard.name for _, shard in assigned(sized(3, 2**20))).values()) == 1
        name, parameter = max(sized(3, 0).spec.parameters.items(), key=lambda item: item[1].numel)
        assert parameter.shape == (64, 16)  # 4096 bytes
        largest = [(server, shard) for server, shard in assigned(sized(3, 256)) if shard.name == name]
        assert sorted((shard.start, shard.stop) for _, shard in largest) == [(0, 22), (22, 44), (44, 64)]
        assert [server for server, _ in largest] == [0, 1, 2]

    def test_cutting_improves_the_balance(self):
        assert sharding(sized(3, 64)).imbalance < 1.01 <= sharding(sized(7, 2**20)).imbalance

    def test_a_scalar_has_one_row_and_a_frozen_parameter_is_on_no_server(self):
        found = plan()
        block = found.spec.blocks[0]
        first, *rest = block.layers[0].parameters
        parameters = (replace(first, shape=()), replace(first, name="kept", frozen=True), *rest)
        layers = (replace(block.layers[0], parameters=parameters), *block.layers[1:])
        spec = replace(found.spec, blocks=(replace(block, layers=layers), *found.spec.blocks[1:]))
        placed = {shard.name: shard for _, shard in assigned(replace(found, spec=spec))}
        assert (placed[first.name].start, placed[first.name].stop) == (0, 1)
        assert placed[first.name].shape == () and placed[first.name].numel == 1
        assert "kept" not in placed

    def test_a_server_owns_at_most_one_shard_of_a_tensor(self):
        for servers in (1, 2, 5):
            for own in sharding(sized(servers, 64)).of_server:
                assert len({shard.name for shard in own}) == len(own)


def rows_of(found, rank):
    return {(row.operation, row.purpose): (row.calls, row.payload_bytes) for row in prediction.collectives(found, rank)}


class TestPrediction:
    def test_traffic_of_a_worker_and_of_a_server(self):
        found = plan(servers=2)
        size = 4 * found.spec.num_parameters
        loads = sharding(found).num_bytes
        assert rows_of(found, 0)["send", "push"] == (2, size) and rows_of(found, 0)["recv", "pull"] == (2, 0)
        assert [rows_of(found, 3 + k)["send", "pull"] for k in range(2)] == [(3, 3 * load) for load in loads]
        assert rows_of(found, 3)["recv", "push"] == (3, 0)

    @pytest.mark.parametrize("servers", [1, 2])
    def test_total_traffic_is_twice_the_model_per_worker(self, servers):
        """2 x number of workers x bytes of the model, for any number of servers."""
        found = plan(servers=servers)
        _, rows = traffic_of(found)
        sent = sum(row.total_wire_bytes for row in rows if row.purpose in ("push", "pull"))
        assert sent == 2 * 3 * 4 * found.spec.num_parameters

    def test_one_server_is_the_busiest_rank(self):
        found = plan()
        busiest, rows = traffic_of(found)
        assert busiest == 3
        (pull,) = [row for row in rows if row.purpose == "pull" and row.operation == "send"]
        assert pull.wire_bytes == 3 * 4 * found.spec.num_parameters

    def test_no_collective_spans_the_world(self):
        for rank in range(4):
            assert all(row.operation in ("send", "recv") for row in prediction.collectives(plan(), rank))

    def test_optimizer_state_is_on_the_servers_only(self):
        found = plan(servers=2)
        loads = sharding(found).num_bytes
        worker = prediction.memory(found, 0)
        assert worker.optimizer == 0 and worker.weights == 2 * sum(loads)  # its own, and those that it pulls
        held = [prediction.memory(found, 3 + k) for k in range(2)]
        assert [(m.weights, m.optimizer) for m in held] == [(load, 2 * load) for load in loads]

    def test_every_rank_is_in_one_class(self):
        assert sum(count for _, count in rank_classes(plan(servers=2))) == 5

    def test_the_document_has_every_rank_and_every_server(self):
        found = plan(servers=2)
        written = document(found, tiny_config({**PS, "dp": 3}))
        assert [row["role"] for row in written["ranks"]] == ["worker"] * 3 + ["server"] * 2
        assert written["ranks"][4]["dp"] is None and written["ranks"][4]["gpu"] is None
        assert [row["rank"] for row in written["servers"]] == [3, 4]
        assert max(row["of_mean"] for row in server_rows(found)) == pytest.approx(sharding(found).imbalance)
        assert written["axes"][1] == {"axis": "dp", "degree": 3, "groups": 1, "first_group": [0, 1, 2]}


def test_a_large_model_on_many_servers_is_planned_at_once():
    """175 billion parameters on 512 servers: trying every server for every piece would take too long."""
    size = {"model.layers": 96, "model.hidden": 12288, "model.heads": 96, "model.vocab": 50304, "model.seq": 64}
    found = tiny_plan({**PS, **size, "dp": 64, "servers": 512, "global_batch": 64})
    assert sharding(found).imbalance < 1.02


@pytest.mark.parametrize(
    ("overrides", "servers", "dp"),
    [
        ({"world": 4}, 1, 3),
        ({"world": 8}, 2, 6),
        ({"world": 8, "global_batch": 7}, 1, 7),
        ({"world": 8, "local_batch": 2}, 1, 7),
        ({"world": 9, "servers": 3}, 3, 6),
    ],
)
def test_the_default_number_of_servers_leaves_a_dp_that_divides_the_batch(overrides, servers, dp):
    batch = {"global_batch": None if "local_batch" in overrides else 48}
    found = tiny_plan({**PS, **FREE, **batch, **overrides})
    assert (found.servers, found.mesh.size("dp")) == (servers, dp)
    assert any(text.startswith("servers=2 (filled: 1 server of 8 ranks would leave dp=7") for text in found.filled) == (
        servers == 2
    )
