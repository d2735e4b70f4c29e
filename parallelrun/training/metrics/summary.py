"""The document of summary.json: what was run, how fast, with which losses, memory and traffic."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from parallelrun.distributed.comm import backend_of
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.packing import packing_document
from parallelrun.planner.predict import prediction, simulate
from parallelrun.planner.predict.step_time.measured import predicted_step
from parallelrun.training.loop.build import Training
from parallelrun.training.metrics.step_records import EarlierRows, StepRecord, mean_times, percentile_95, timed


def document(
    training: Training,
    records: Sequence[StepRecord],
    earlier: EarlierRows,
    everyone: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    state: str,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the document of a run of `records`.

    earlier: the steps of attempts before this one. everyone: the facts of every rank (`Recorder.facts`). rows: those of
    comm.json. more: what is said of routing and of restarts.
    """
    return {
        "schema": 1,
        "state": state,
        **_about(training),
        "steps": records[-1].step if records else earlier.last_step,
        **_speed(training, records, earlier, everyone),
        **_results(records, earlier),
        **more,
        "peak_memory_bytes": max(facts["peak_bytes"] for facts in everyone),
        "payload_bytes_per_step": _per_step(training.plan, "payload_bytes", rows),
        "wire_bytes_per_step": _per_step(training.plan, "wire_bytes", rows),
        "communication_as_predicted": all(prediction.matches_prediction(row) for row in rows) if rows else None,
        "bubble_predicted": simulate.of_plan(training.plan).bubble_of_total,
        "packing": packing_document(training.plan.spec, training.packing),
        "dataset": training.config.dataset.name,
        "dataset_sha256": training.dataset.fingerprint,
    }


def _about(training: Training) -> dict[str, Any]:
    """Return the entries that are known before the first step."""
    plan = training.plan
    return {
        "model": training.config.model.preset,
        "strategy": plan.preset,
        "equivalence": plan.equivalence.kind,
        **plan.degrees,
        "world": plan.world,
        "data": plan.data.kind,
        "tensor": plan.tensor.kind,
        "pipeline": plan.pipeline.kind,
        "microbatches": plan.batch.microbatches,
        "global_batch": plan.batch.global_batch,
        "precision": plan.precision.name,
        "parameters": plan.spec.num_parameters,
        "device": plan.device,
        "backend": backend_of(training.mesh),
        "ranks_per_core": plan.world / len(os.sched_getaffinity(0)) if plan.device == "cpu" else None,
    }


def _speed(
    training: Training, records: Sequence[StepRecord], earlier: EarlierRows, everyone: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    plan = training.plan
    times = sorted(r.step_time_s for r in timed(records, training.config.profile))
    times = times or sorted(earlier.values("step_time_s"))
    median = statistics.median(times) if times else None
    tokens = plan.batch.global_batch * training.tokens_per_sample
    means = mean_times([facts["times"] for facts in everyone])
    return {
        "step_time_median_s": median,
        "step_time_p95_s": percentile_95(times) if times else None,
        "tokens_per_s": tokens / median if median else None,
        "samples_per_s": plan.batch.global_batch / median if median else None,
        **means,
        "predicted": predicted_step(plan, training.config.cluster),
    }


def _results(records: Sequence[StepRecord], earlier: EarlierRows) -> dict[str, Any]:
    """Return the first and the last value of each kind; None if there is none."""
    results: dict[str, Any] = {}
    for kind in ("loss", "val_loss", "val_top1"):
        values = [*earlier.values(kind), *(value for r in records if (value := getattr(r, kind)) is not None)]
        results |= {f"first_{kind}": values[0] if values else None, kind: values[-1] if values else None}
    return results


def _per_step(plan: Plan, key: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of all ranks per step, on average if some are sent only in every H-th step."""
    total: float = sum(row[key] / prediction.steps_between(plan, row["purpose"]) for row in rows)
    return round(total)
