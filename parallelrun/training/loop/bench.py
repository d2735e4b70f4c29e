"""`parallelrun bench`: warm-up, then timed steps without evaluation or saving; median and spread."""

from __future__ import annotations

import os
import statistics
import time

import torch

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_OK
from parallelrun.base.records import write_json
from parallelrun.distributed.comm import gather_json
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time.measured import predicted_step
from parallelrun.report.runs import bench as report
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.schedules import LossScaler, learning_rate
from parallelrun.training.loop.step import train_step
from parallelrun.training.metrics.recorder import peak_bytes
from parallelrun.training.metrics.step_records import percentile_95


def run(training: Training, context: WorkerContext) -> int:
    """Time `bench.steps` steps after `bench.warmup`; write bench.json and show it."""
    config, plan = training.config, training.plan
    scaler = LossScaler(config.precision, scaled=plan.precision.scaled)
    times: list[float] = []
    total = config.bench.warmup + config.bench.steps
    for step in range(1, total + 1):
        context.heartbeat(step, "bench")
        began = time.perf_counter()
        result = train_step(training, step, learning_rate(config.optimizer, step, total), scaler)
        if training.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        scaler.update(result.applied)
        if step > config.bench.warmup:
            times.append(time.perf_counter() - began)
    own = {"times": times, "peak_bytes": peak_bytes(training.mesh.device)}
    everyone = gather_json(own, training.mesh)
    if context.rank == 0:
        slowest = [max(step) for step in zip(*(rank["times"] for rank in everyone))]
        write(slowest, max(rank["peak_bytes"] for rank in everyone), training, context)
    return EXIT_OK


def write(times: list[float], peak: int, training: Training, context: WorkerContext) -> None:
    """Write bench.json and show it. times: of each step on its slowest rank; peak: bytes of memory."""
    plan = training.plan
    ordered = sorted(times)
    median = statistics.median(times)
    lower, _, upper = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    tokens = plan.batch.global_batch * training.tokens_per_sample
    payload = sum(row.payload_bytes for row in prediction.collectives(plan, 0))
    document = {
        "schema": 1,
        "preset": plan.preset,
        "model": training.config.model.preset,
        "degrees": plan.degrees,
        "world": plan.world,
        "device": plan.device,
        "precision": plan.precision.name,
        "cores": len(os.sched_getaffinity(0)),
        "warmup": training.config.bench.warmup,
        "steps": len(times),
        "step_times_s": times,
        "median_s": median,
        "lower_quartile_s": lower,
        "upper_quartile_s": upper,
        "min_s": ordered[0],
        "p95_s": percentile_95(ordered),
        "tokens_per_s": tokens / median,
        "samples_per_s": plan.batch.global_batch / median,
        "model_flops_per_s": 3 * plan.spec.forward_flops * plan.batch.global_batch / median,
        "payload_bytes_rank_0": payload,
        "predicted": predicted_step(plan, training.config.cluster),
        "peak_memory_bytes": peak,
    }
    write_json(context.directory / "bench.json", document)
    if context.console_owner:
        report.show(document)
