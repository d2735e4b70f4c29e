"""A plan as plain data: what `plan --json` prints, `plan.json` holds and `report.plan` draws. Torch-free."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

from parallelrun.config.schema import ClusterConfig, Config
from parallelrun.plan import bubble, cluster_cost, expert_facts, memory_advice, prediction, simulate
from parallelrun.plan.compare import compare
from parallelrun.plan.comparison import Comparison
from parallelrun.plan.data_axis import DataAxis, agreed, costs
from parallelrun.plan.hosts import ranks_per_node, stays_in_node
from parallelrun.plan.structure import Plan
from parallelrun.wording import counted, gib

LINKED_RANKS = 64  # more are not listed link by link


@dataclass(frozen=True)
class Facts:
    """Everything that is computed about a plan, once. memories: per pp rank, of its rank that holds most.
    layouts: the tensor layouts side by side, where there is something to compare; data_axis: so the ways of the data
    axis; training: of `tokens`, where they are given."""

    simulation: simulate.Simulation
    busiest_rank: int
    traffic: tuple[prediction.Traffic, ...]
    memories: dict[int, prediction.Memory]
    cost: cluster_cost.Cost
    training: cluster_cost.Training | None
    layouts: Comparison | None
    data_axis: DataAxis | None

    @property
    def heaviest_position(self) -> int:
        """pp rank whose ranks need most memory."""
        return max(self.memories, key=lambda pp_rank: self.memories[pp_rank].total)


def facts(plan: Plan, config: Config) -> Facts:
    """Simulate the schedule, account for memory, traffic and cost, compare tensor layouts and ways of the data axis."""
    simulation = simulate.of_plan(plan)
    busiest, rows = prediction.traffic(plan)
    flops = simulation.makespan if plan.spec.forward_flops else 0.0
    cost = cluster_cost.cost(plan, config.cluster, rows, flops)
    data_axis = costs(plan, config.cluster, cost)
    cost = agreed(cost, data_axis)
    training = cluster_cost.training(plan, config.cluster, cost, config.tokens) if config.tokens else None
    memories = prediction.memories(plan)
    return Facts(simulation, busiest, rows, memories, cost, training, compare(plan, config), data_axis)


def rank_row(plan: Plan, rank: int, cluster: ClusterConfig) -> dict[str, Any]:
    """One row of the rank table. gpu: index within the host; None on CPU, unless a cluster of GPUs is planned for."""
    per_node = ranks_per_node(cluster, plan.world)
    coordinate = plan.mesh.coordinate(rank) if plan.role(rank) == "worker" else {}
    axes = ("pp", "dp", "ep", "tp") if plan.mesh.size("ep") > 1 else ("pp", "dp", "tp")
    return {
        "rank": rank,
        "node": rank // per_node,
        "gpu": rank % per_node if coordinate and (plan.device == "cuda" or cluster.gpus_per_node) else None,
        "role": plan.role(rank),
        **{axis: coordinate.get(axis, 0) if coordinate else None for axis in axes},
        **{mesh_dim: coordinate.get(mesh_dim) for mesh_dim in plan.mesh.mesh_dim_names if mesh_dim not in axes},
    }


def axis_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every axis with its degree, how many groups it makes and the first of them; slowest axis first."""
    rows = []
    names = list(plan.mesh.mesh_dim_names)
    for factored, parts in plan.mesh.flattened:
        names.insert(names.index(parts[0]), factored)
    for axis in names:
        size = plan.mesh.size(axis)
        first = plan.mesh.group_of(0, axis)
        rows.append({"axis": axis, "degree": size, "groups": plan.num_workers // size, "first_group": list(first)})
    return rows


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every stage: where it runs, its blocks, logical parameters (a tied copy counts where its original is), FLOPs."""
    rows = []
    flops = simulate.stage_flops(plan)
    for stage in plan.stages:
        parameters = sum(plan.spec.block(name).num_parameters for name in stage.blocks)
        rows.append(
            {
                "stage": stage.index,
                "position": stage.pp_rank,
                "blocks": list(stage.blocks),
                "parameters": parameters,
                "forward_flops": flops[stage.index],
            }
        )
    return rows


def server_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every server: its rank, how much it owns and holds, and the largest share over the mean (1.0: even)."""
    if not plan.servers:
        return []
    memories = [plan.data.server_memory(server, plan) for server in range(plan.servers)]
    mean = sum(memory.weights for memory in memories) / plan.servers
    return [
        {
            "server": server,
            "rank": plan.num_workers + server,
            "shards": plan.data.num_shards(server, plan),
            "of_mean": memory.weights / mean,
            **_bytes(memory),
        }
        for server, memory in enumerate(memories)
    ]


def warnings(plan: Plan, config: Config, found: Facts) -> list[str]:
    """The plan's own warnings, and what its costs give reason to say."""
    cluster, texts = config.cluster, list(plan.warnings)
    memory = found.memories[found.heaviest_position]
    if cluster_cost.fits(memory, cluster) == "no":
        texts.append(
            f"does not fit: a rank of pp={found.heaviest_position} needs {gib(memory.total)}, "
            f"{cluster_cost.why_fits(memory, cluster)}; {memory_advice.advice(plan, config)}"
        )
    per_node = ranks_per_node(cluster, plan.world)
    if cluster.nodes and plan.world > cluster.nodes * per_node:
        texts.append(f"{plan.world} ranks, and the cluster has {cluster.nodes} x {per_node} devices")
    if plan.mesh.size("tp") > 1 and not stays_in_node(plan, cluster, "tp"):
        texts.append(f"tp groups of {plan.mesh.size('tp')} reach across hosts of {per_node} devices")
    texts += _across_hosts(plan, cluster)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if plan.device == "cpu" and not cluster.gpus_per_node and plan.world > cores:
        crowd = f"{counted(plan.world, 'rank')} on {counted(cores, 'core')} of this host"
        texts.append(f"{crowd}: step time is no scaling measurement")
    texts += bubble.warnings(plan, config, found.simulation)
    if config.model.attention_dropout > 0:
        texts.append("attention_dropout > 0: attention is computed explicitly, with s x s scores kept per head")
    return texts


def _across_hosts(plan: Plan, cluster: ClusterConfig) -> list[str]:
    """A hint where experts lie on several hosts that a flat all-to-all does not know of."""
    ep, per_node = plan.mesh.size("ep"), ranks_per_node(cluster, plan.world)
    if plan.expert is None or plan.expert.group_size > 1 or stays_in_node(plan, cluster, "ep"):
        return []
    inner = gcd(ep, max(1, per_node // plan.mesh.size("tp")))
    two_levels = f"; strategy.expert.group_size={inner} sends inside a host first" if 1 < inner < ep else ""
    return [f"ep groups of {ep} reach across hosts of {per_node} devices{two_levels}"]


def document(plan: Plan, config: Config, found: Facts | None = None) -> dict[str, Any]:
    """The whole plan, ready for JSON: every rank, every stage, every row. found: of `facts`, if already computed."""
    found = found or facts(plan, config)
    worst = found.memories[found.heaviest_position]
    simulation = found.simulation
    return {
        "schema": 1,
        "preset": plan.preset,
        "model": _model(plan),
        "world": plan.world,
        "degrees": plan.degrees,
        "device": plan.device,
        "precision": plan.precision.name,
        "optimizer": plan.optimizer,
        "recompute": plan.recompute,
        "dropout": plan.dropout,
        "batch": {**asdict(plan.batch), "replica_batch": plan.batch.replica_batch},
        "data": plan.data.document(),
        "tensor": {"kind": plan.tensor.kind, **asdict(plan.tensor)},
        "pipeline": {"kind": plan.pipeline.kind, "chunks": plan.pipeline.virtual_stages},
        "experts": expert_facts.facts(plan),
        "equivalence": asdict(plan.equivalence),
        "filled": list(plan.filled),
        "warnings": warnings(plan, config, found),
        "axes": axis_rows(plan),
        "ranks": [rank_row(plan, rank, config.cluster) for rank in range(plan.world)],
        "stages": stage_rows(plan),
        "servers": server_rows(plan),
        "memory": {
            "per_position": [{"position": pp_rank, **_bytes(memory)} for pp_rank, memory in found.memories.items()],
            "heaviest_position": found.heaviest_position,
            "leaves_out": list(worst.leaves_out),
            "fits": cluster_cost.fits(worst, config.cluster),
            "why": cluster_cost.why_fits(worst, config.cluster),
        },
        "schedule": {
            "kind": plan.pipeline.kind,
            "chunks": plan.pipeline.virtual_stages,
            "bubble_of_total": simulation.bubble_of_total,
            "bubble_of_ideal": simulation.bubble_of_ideal,
        },
        "communication": {
            "busiest_rank": found.busiest_rank,
            "rows": [asdict(row) for row in found.traffic if row.purpose != prediction.CONTROL],
            "control": [asdict(row) for row in found.traffic if row.purpose == prediction.CONTROL],
            "links": link_rows(plan),
        },
        "cost": asdict(found.cost),
        "training": asdict(found.training) if found.training else None,
        "layouts": asdict(found.layouts) if found.layouts else None,
        "data_axis": _data_axis(found.data_axis) if found.data_axis else None,
    }


def _data_axis(data_axis: DataAxis) -> dict[str, Any]:
    fields = asdict(data_axis)
    return {**fields, "ways": fields.pop("strategies")}


def link_rows(plan: Plan) -> list[dict[str, int]]:
    """Bytes of a step from rank to rank, where the data strategy itself decides who sends to whom; none for large
    worlds,
    whose links are the squares of their ranks."""
    if plan.mesh.size("dp") == 1 or plan.world > LINKED_RANKS:
        return []
    return [{"from": pair[0], "to": pair[1], "bytes": size} for pair, size in sorted(plan.data.links(plan).items())]


def _model(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.spec.name,
        "parameters": plan.spec.num_parameters,
        "blocks": len(plan.spec.blocks),
        "vocab": plan.spec.vocab,
        "hidden": plan.spec.hidden,
        "heads": plan.spec.heads,
        "layers": plan.spec.num_layers,
        "seq": plan.spec.seq,
    }


def _bytes(memory: prediction.Memory) -> dict[str, int]:
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "temporary": memory.temporary,
        "total": memory.total,
    }
