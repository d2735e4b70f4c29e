"""The figures of one plan that a sweep compares, as a flat row. Torch-free."""

from __future__ import annotations

from typing import Any

from parallelrun.config.schema import ClusterConfig
from parallelrun.plan import cluster_cost
from parallelrun.plan.document import Facts
from parallelrun.plan.structure import Plan


def figures(plan: Plan, cluster: ClusterConfig, found: Facts) -> dict[str, Any]:
    """Predicted memory, traffic, bubble and time of a step, under the names that a run's summary.json uses.

    Times are None where the cluster gives no rates. The step time assumes that communication overlaps nothing.
    """
    memory = found.memories[found.heaviest_position]
    step_time = found.cost.step_s[0] if found.cost.step_s else None
    batch = plan.batch.global_batch
    return {
        "global_batch": batch,
        "microbatches": plan.batch.microbatches,
        "fits": cluster_cost.fits(memory, cluster),
        "memory_bytes": memory.total,
        "bubble_predicted": found.simulation.bubble_of_total,
        "wire_bytes_per_step": round(sum(row.total_wire_bytes / row.every for row in found.traffic)),
        "step_time_predicted_s": step_time,
        "samples_per_s": batch / step_time if step_time else None,
    }
