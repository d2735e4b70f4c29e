"""A plan as plain data: `plan --json` prints it, plan.json stores it and `report.plans.plan` draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.plan import WORLD, Plan
from parallelrun.planner.facts import alternatives
from parallelrun.planner.facts.advice import warnings
from parallelrun.planner.facts.alternatives import Alternatives
from parallelrun.planner.facts.corruption_cost import checks
from parallelrun.planner.facts.plan_facts import Facts, facts
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Packing, PartUse
from parallelrun.planner.pieces.hosts import backend_of_axis, ranks_per_node
from parallelrun.planner.pieces.packing import packing_document, with_packing
from parallelrun.planner.predict import cluster_cost, prediction, simulate
from parallelrun.planner.predict.step_time.step import why_unknown


def document(plan: Plan, config: Config, results: Facts | None = None) -> dict[str, Any]:
    """The plan with every rank, stage and row, ready for JSON. results: the result of `facts`, if already computed."""
    results = results or facts(plan, config)
    return {
        "schema": 1,
        "preset": plan.preset,
        "stack": plan.stack.name,
        "model": _model(plan),
        "world": plan.world,
        "degrees": plan.degrees,
        "device": plan.device,
        "precision": plan.precision.name,
        "optimizer": plan.optimizer,
        "recompute": plan.recompute,
        "dropout": plan.dropout,
        "loss_chunks": plan.loss_chunks,
        "batch": {**asdict(plan.batch), "replica_batch": plan.batch.replica_batch},
        "data": plan.data.document(),
        "tensor": {"kind": plan.tensor.kind, **asdict(plan.tensor)},
        "pipeline": {"kind": plan.pipeline.kind, "chunks": plan.pipeline.virtual_stages},
        "experts": experts(plan),
        "context": context(plan, results.packing),
        "equivalence": asdict(plan.equivalence),
        "mixture": [asdict(part) for part in mixture(plan, config)] or None,
        "packing": packing_document(plan.spec, results.packing),
        "filled": list(plan.filled),
        "warnings": warnings(plan, config, results),
        "axes": axis_rows(plan),
        "backend": backends(plan, config),
        "ranks": [rank_row(plan, rank, config.cluster) for rank in range(plan.world)],
        "stages": stage_rows(plan),
        "servers": server_rows(plan),
        **_predictions(plan, config, results),
    }


def mixture(plan: Plan, config: Config) -> list[PartUse]:
    """Return the run's use of each part of a mixture of datasets."""
    dataset = definitions.dataset(config)
    return dataset.uses(config, plan.spec, plan.batch.global_batch)


def _predictions(plan: Plan, config: Config, results: Facts) -> dict[str, Any]:
    """Predicted memory, schedule, traffic and cost."""
    worst, cluster = results.memories[results.heaviest_pp_rank], config.cluster
    return {
        "memory": {
            "per_position": [{"position": pp_rank, **_bytes(memory)} for pp_rank, memory in results.memories.items()],
            "heaviest_position": results.heaviest_pp_rank,
            "heaviest_gib": worst.total / 2**30,
            "leaves_out": list(worst.leaves_out),
            "fits": cluster_cost.fits(worst, cluster),
            "why": cluster_cost.why_fits(worst, cluster),
            "checkpoint_copies_bytes": prediction.copied_bytes(config, plan),
        },
        "schedule": {
            "kind": plan.pipeline.kind,
            "chunks": plan.pipeline.virtual_stages,
            "bubble_of_total": results.simulation.bubble_of_total,
            "bubble_of_ideal": results.simulation.bubble_of_ideal,
        },
        "communication": {
            "busiest_rank": results.busiest_rank,
            "rows": [asdict(row) for row in results.traffic if row.purpose != prediction.CONTROL],
            "control": [asdict(row) for row in results.traffic if row.purpose == prediction.CONTROL],
        },
        "cost": asdict(results.cost),
        "time": asdict(results.time) if results.time else None,
        "time_unknown": None if results.time else {"why": why_unknown(plan, cluster)},
        "training": asdict(results.training) if results.training else None,
        "goodput": asdict(results.goodput) if results.goodput else None,
        "sdc": asdict(looking) if (looking := checks(plan, config)) else None,
        "layouts": _alternatives(plan, config, "layouts", alternatives.layouts),
        "data_axis": _alternatives(plan, config, "data_axis", alternatives.data_axis),
    }


def _alternatives(
    plan: Plan, config: Config, section: str, compare: Callable[[Plan, Config], Alternatives | None]
) -> dict[str, Any] | None:
    """A comparison with plans that were not selected; None unless `detail` names it."""
    compared = compare(plan, config) if alternatives.requested(config, section) else None
    return asdict(compared) if compared else None


def _model(plan: Plan) -> dict[str, Any]:
    spec = plan.spec
    sizes = {key: getattr(spec, key) for key in ("vocab", "hidden", "heads")}
    counts = {"parameters": spec.num_parameters, "blocks": len(spec.blocks)}
    return {"name": spec.name, **counts, **sizes, "layers": spec.num_layers, "seq": spec.seq}


def _bytes(memory: Memory) -> dict[str, int]:
    return {**memory.parts, "total": memory.total, **({"host": memory.host} if memory.host else {})}


def rank_row(plan: Plan, rank: int, cluster: ClusterConfig) -> dict[str, Any]:
    """One row of the rank table. gpu: index within the host; None on CPU, unless the cluster has GPUs."""
    per_node = ranks_per_node(cluster, plan.world)
    coordinate = plan.mesh.coordinate(rank) if plan.role(rank) == "worker" else {}
    axes = [axis for axis in ("pp", "dp", "cp", "ep", "tp") if axis not in ("cp", "ep") or plan.mesh.size(axis) > 1]
    return {
        "rank": rank,
        "node": rank // per_node,
        "gpu": rank % per_node if coordinate and (plan.device == "cuda" or cluster.gpus_per_node) else None,
        "role": plan.role(rank),
        **{axis: coordinate.get(axis, 0) if coordinate else None for axis in axes},
        **{mesh_dim: coordinate.get(mesh_dim) for mesh_dim in plan.mesh.mesh_dim_names if mesh_dim not in axes},
    }


def axis_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every axis with its degree, its number of groups and its first group; the slowest axis first."""
    rows = []
    names = list(plan.mesh.mesh_dim_names)
    for flattened, parts in plan.mesh.flattened:
        names.insert(names.index(parts[0]), flattened)
    for axis in names:
        size, first = plan.mesh.size(axis), plan.mesh.group_of(0, axis)
        rows.append({"axis": axis, "degree": size, "groups": plan.num_workers // size, "first_group": list(first)})
    return rows


def backends(plan: Plan, config: Config) -> dict[str, str]:
    """Return what would carry the collectives of each axis of several ranks, and of all ranks if some are servers."""
    names = (*plan.mesh.mesh_dim_names, *(name for name, _ in plan.mesh.flattened))
    axes = [*(axis for axis in dict.fromkeys(names) if plan.mesh.size(axis) > 1), *([WORLD] if plan.servers else [])]
    return {axis: backend_of_axis(plan, config, axis) for axis in axes}


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every stage: its pp rank, blocks, FLOPs and logical parameters (a tied copy counts with its original)."""
    flops = simulate.stage_flops(plan)
    return [
        {
            "stage": stage.index,
            "position": stage.pp_rank,
            "blocks": list(stage.blocks),
            "parameters": sum(plan.spec.block(name).num_parameters for name in stage.blocks),
            "forward_flops": flops[stage.index],
        }
        for stage in plan.stages
    ]


def server_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every server: its rank, number of shards, memory, and its share over the mean share (1.0: even)."""
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


def context(plan: Plan, packing: Packing | None = None) -> dict[str, Any] | None:
    """The strategy of cp, the positions of a rank, and by order the work of the slowest rank's attention over the mean;
    None at cp=1. Where the order makes no difference, there is only the plan's own. packing: of documents in samples,
    where it is known; otherwise the imbalance is that of whole samples."""
    if plan.context is None:
        return None
    own, plan = plan.context, with_packing(plan, packing)
    imbalances = {own.order: own.imbalance(plan, plan.spec.window)}
    for order in own.orders(plan):
        imbalances[order] = replace(own, order=order).imbalance(plan, plan.spec.window)
    return {"kind": own.kind, **asdict(own), "positions": plan.seq, "imbalance": imbalances}


def experts(plan: Plan) -> dict[str, Any] | None:
    """Number, layers, capacity and distribution of the experts; None for a model without experts.

    layers: blocks that have experts. group_tokens: tokens of a routing group. capacity, eval_capacity: the most tokens
    of a group that an expert takes, None without a limit. held: experts of a layer that a rank holds.
    """
    router, spec = plan.spec.router, plan.spec
    if router is None:
        return None
    tokens = router.group_samples * spec.targets_per_sample
    dispatcher = {"kind": "none", "chunks": 1, "group_size": 1, "overlap": True}
    return {
        "experts": spec.experts,
        "held": spec.experts // plan.mesh.size("ep"),
        "layers": [b.name for b in spec.blocks if any(layer.layer_role == "expert" for layer in b.layers)],
        "group_tokens": tokens,
        "capacity": router.capacity(tokens, spec.experts) if router.limited else None,
        "eval_capacity": router.capacity(tokens, spec.experts, training=False) if router.limited else None,
        "router": asdict(router),
        "way": {"kind": plan.expert.kind, **asdict(plan.expert)} if plan.expert else dispatcher,
    }
