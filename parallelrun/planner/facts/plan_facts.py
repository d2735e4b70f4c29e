"""Everything that is computed about a plan, and the figures of it that a sweep compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.definitions import Packing
from parallelrun.planner.pieces.packing import packing_of, with_packing
from parallelrun.planner.predict import cluster_cost, prediction, simulate
from parallelrun.planner.predict.goodput import Goodput, goodput
from parallelrun.planner.predict.step_time.step import StepTime, step_time
from parallelrun.planner.predict.traffic import TrafficRow, traffic_of


@dataclass(frozen=True)
class Facts:
    """The results of every computation about a plan.

    cost: bounds at peak rates. time: the prediction, if the cluster gives the rates for it. memories: per pp rank, of
    its rank that holds most. training: the time for `tokens` tokens, if they are given. goodput: the useful part of the
    time, if failures are given. packing: of documents in samples, where it is known; FLOPs and times are then those of
    the documents, otherwise of full samples.
    """

    simulation: simulate.Simulation
    busiest_rank: int
    traffic: tuple[TrafficRow, ...]
    memories: dict[int, Memory]
    cost: cluster_cost.Cost
    time: StepTime | None
    training: cluster_cost.TrainingTime | None
    goodput: Goodput | None
    packing: Packing | None = None

    @property
    def heaviest_pp_rank(self) -> int:
        """The pp rank whose ranks need most memory."""
        return max(self.memories, key=lambda pp_rank: self.memories[pp_rank].total)


def facts(plan: Plan, config: Config) -> Facts:
    """Simulate the schedule, and predict memory, traffic and cost."""
    packing = packing_of(config, plan.spec)
    plan = with_packing(plan, packing)
    simulation = simulate.of_plan(plan)
    busiest, rows = traffic_of(plan)
    flops = simulation.makespan if plan.spec.forward_flops else 0.0
    cost = cluster_cost.cost(plan, config.cluster, rows, flops)
    training = cluster_cost.training_time(plan, config.cluster, cost, config.tokens) if config.tokens else None
    memories = prediction.memories(plan, config.cluster)
    time = step_time(plan, config.cluster)
    useful = goodput(plan, config, time.step_s if time else None)
    return Facts(simulation, busiest, rows, memories, cost, time, training, useful, packing)


def figures(plan: Plan, cluster: ClusterConfig, results: Facts) -> dict[str, Any]:
    """Predicted memory, traffic, bubble and step time as a flat row, under the names used in a run's summary.json.

    The step time is the prediction; where there is none, it is the bound at peak rates without overlapped
    communication (`step_time_is_bound`). Times are None if the cluster gives no rates.
    """
    memory = results.memories[results.heaviest_pp_rank]
    bound = results.cost.step_s[0] if results.cost.step_s else None
    step_time = results.time.step_s if results.time else bound
    batch = plan.batch.global_batch
    of_training = {}
    if results.training and step_time:
        of_training["training_days"] = results.training.steps * step_time / cluster_cost.DAY
        if results.training.price_per_day:
            of_training["training_price"] = of_training["training_days"] * results.training.price_per_day
    each: float = results.packing.tokens if results.packing else plan.spec.seq if plan.spec.kind == "tokens" else 0
    return {
        "global_batch": batch,
        "microbatches": plan.batch.microbatches,
        "fits": cluster_cost.fits(memory, cluster),
        "memory_bytes": memory.total,
        "bubble_predicted": results.simulation.bubble_of_total,
        "wire_bytes_per_step": round(sum(row.total_wire_bytes / row.every for row in results.traffic)),
        "step_time_predicted_s": step_time,
        "step_time_is_bound": step_time is not None and results.time is None,
        "tokens_per_s": batch * each / step_time if each and step_time else None,
        "samples_per_s": batch / step_time if step_time else None,
        **of_training,
    }
