"""The plan of a parameter server: servers outside the mesh, consistency, shards. `test_refusals.py` has the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.launch.failures import failure
from parallelrun.launch.host import directory
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.facts.document import document, server_rows
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.ps.plan import sharding
from parallelrun.strategies.data.ps.shards import Shard, assign, num_rows, pieces
from tests.plans import tiny_config, tiny_plan
from tests.vision import RESNET

PS = {"strategy.name": "ps", "strategy.data.kind": "ps", "strategy.demo": {"dp": 3}, "global_batch": 12}
FREE = {"dp": None, "tp": None, "pp": None}


def plan(**more):
    return tiny_plan({**PS, "dp": 3, **more})


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
            ({"consistency": "ssp", "staleness": 0}, "ssp, staleness 0, 1 server", "exact", 3),
            ({"backup_workers": 1, "servers": 2}, "sync, 1 backup worker, 2 servers", "replay", 2),
        ],
    )
    def test_detail_equivalence_and_quorum(self, more, detail, equivalence, quorum):
        found = plan(**more)
        assert (found.data.detail, found.equivalence.kind) == (detail, equivalence)
        assert found.data.in_step == (equivalence == "exact"), "layers that exchange something need workers in step"
        assert found.data.quorum(found.num_workers) == quorum

    def test_the_default_staleness_is_reported(self):
        said = "staleness=2 (filled: clocks the fastest worker may be ahead under ssp)"
        assert said in plan(consistency="ssp").filled
        assert not any("staleness" in text for text in plan(staleness=2).filled + plan().filled)


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
        assert rows == Counter(expected) and len(sharding(found).of_server) == servers
        for own in sharding(found).of_server:  # a checkpoint file has one entry per tensor
            assert len({shard.name for shard in own}) == len(own)

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

    def test_only_tensors_above_the_threshold_are_cut(self):
        assert max(Counter(shard.name for _, shard in assigned(sized(3, 2**20))).values()) == 1
        name, parameter = max(sized(3, 0).spec.parameters.items(), key=lambda item: item[1].numel)
        assert parameter.shape == (64, 16)  # 4096 bytes
        largest = [(server, shard) for server, shard in assigned(sized(3, 256)) if shard.name == name]
        assert sorted((shard.start, shard.stop) for _, shard in largest) == [(0, 22), (22, 44), (44, 64)]
        assert [server for server, _ in largest] == [0, 1, 2]

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


SEVERAL = {
    "tp, pp": {"tp": 2, "pp": 2, "strategy.tensor.sequence_parallel": True},
    "uneven": {"tp": 3, "model.hidden": 12, "model.heads": 3, "model.vocab": 37, "dataset.vocab": 37},
    "cp": {"cp": 2},
    "grid": {"tp": 8, "layout": "3d", "model.hidden": 32},
    "ep": {"dp": 6, "ep": 2, "tp": 2, "model.experts": 4},
    "ep over cp": {"dp": 6, "cp": 2, "ep": 4, "model.experts": 4},
    "ep over tp": {"tp": 2, "ep": 2, "strategy.expert.tp": 1, "model.experts": 4},
}


class TestWorkersOfSeveralRanks:
    @pytest.mark.parametrize("name", SEVERAL)
    def test_a_worker_pushes_each_element_once_and_a_rank_pulls_what_it_holds(self, name):
        """The ranks of every worker, with shards that cut across the parts of ranks."""
        found = plan(servers=2, **{"strategy.data.shard_min_kb": 0.1, **SEVERAL[name]})
        mesh, shards = found.mesh, [shard for _, shard in assigned(found)]
        axis = found.worker_axis
        pushed: Counter[tuple[int, str]] = Counter()
        for rank in range(found.num_workers):
            coordinate = mesh.coordinate(rank)
            pushes, pulls = pieces(found, rank, shards)
            for piece in pushes:
                pushed[coordinate[axis], piece.shard.name] += piece.numel
            held = {p.spec.name: p.layout.local_numel(p.spec.shape, mesh.sizes, coordinate)
                    for p in held_parameters(found, coordinate["pp"])}  # fmt: skip
            pulled: Counter[str] = Counter()
            for piece in pulls:
                pulled[piece.parameter.spec.name] += piece.numel
                part = piece.parameter.layout.ranges(piece.parameter.spec.shape, mesh.sizes, coordinate)
                assert [where.start + first for where, (first, _) in zip(piece.in_part, part)] == [
                    where.start + first for where, first in zip(piece.in_shard, (piece.shard.start, 0, 0, 0))
                ], "both ends mean the same elements"
            assert pulled == Counter(held)
        workers, parameters = range(mesh.size(axis)), found.spec.parameters.values()
        assert pushed == Counter({(w, p.name): p.numel for w in workers for p in parameters})
        assert found.num_replicas * prod(map(mesh.size, found.worker_ranks.split("+"))) == found.num_workers


class TestPrediction:
    def test_the_document_has_every_rank_and_every_server(self):
        found = plan(servers=2)
        written = document(found, tiny_config({**PS, "dp": 3}))
        assert [row["role"] for row in written["ranks"]] == ["worker"] * 3 + ["server"] * 2
        assert written["ranks"][4]["dp"] is None and written["ranks"][4]["gpu"] is None
        assert [row["rank"] for row in written["servers"]] == [3, 4]
        assert max(row["of_mean"] for row in server_rows(found)) == pytest.approx(sharding(found).imbalance)
        assert written["axes"][1] == {"axis": "dp", "degree": 3, "groups": 1, "first_group": [0, 1, 2]}

    def test_the_first_server_has_the_frozen_weights_too_but_does_not_update_them(self):
        found = tiny_plan({**PS, **RESNET, "dp": 3, "servers": 2, "global_batch": 12})
        parameters = found.spec.parameters.values()
        frozen, trained = (4 * sum(p.numel for p in parameters if p.frozen == kind) for kind in (True, False))
        first, second = (prediction.memory(found, rank) for rank in (3, 4))
        assert frozen and first.weights + second.weights == trained + frozen
        assert (first.weights - frozen, second.weights) == sharding(found).num_bytes
        assert first.gradients + second.gradients == (1 + 3) * trained


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
