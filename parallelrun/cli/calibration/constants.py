"""The constants of a cluster that a calibration fits, and what they predict for each measurement.

Every prediction is made by the code that predicts the step of a plan: there is no second table of formulas.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from typing import Any

from parallelrun.base.precision import BYTES, TABLE
from parallelrun.cli.calibration.fit import Constant, fit
from parallelrun.cli.calibration.measurements import Measurements, TimedExchange, TimedProduct, TimedStep
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.step_time import cores
from parallelrun.planner.predict.step_time.kernels import product_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.freeze import load_frozen
from parallelrun.planner.resolve.resolve_config import resolve

INTRA_GB_S = 16.0  # of a link that nobody has measured: PCIe 4 on 8 lanes
PRECISION = "fp32"  # of exchanges
OF_PRODUCTS = (Constant("product_efficiency", 0.8, 0.05, 1.0, 2.0),)
OF_STEPS = (
    Constant("attention_efficiency", 0.2, 0.005, 1.0),
    Constant("memory_efficiency", 0.5, 0.01, 1.0),
    Constant("operation_us", 6.0, 0.2, 200.0),
)
OF_LINKS = (
    Constant("collective_us", 60.0, 0.5, 20_000.0),
    Constant("hop_us", 10.0, 0.1, 5000.0),
    Constant("link_efficiency", 0.5, 0.01, 1.0),
)
OF_CORES = (
    Constant("product_ramp", 30.0, 1.0, 2000.0),
    Constant("step_us", 1000.0, 10.0, 100_000.0),
    Constant("thread_efficiency", 0.6, 0.01, 1.0, 2.0),
    Constant("convolution_efficiency", 0.3, 0.005, 1.0),
)
OF_DEVICES = (
    Constant("product_ramp", 200.0, 1.0, 2000.0),  # of the A100, see conf/cluster
    Constant("kernel_us", 4.0, 0.2, 100.0),
    Constant("convolution_efficiency", 0.4, 0.005, 1.0),
)
EXPECTED = {
    TimedProduct: 0.25,
    TimedExchange: 0.35,
    TimedStep: 0.06,
}  # errors of single measurements: steps are what is predicted


@dataclass(frozen=True)
class Calibration:
    """A cluster with fitted constants, and how far each training step is from its prediction: predicted / measured."""

    cluster: ClusterConfig
    fitted: tuple[str, ...]
    ratios: tuple[tuple[TimedStep, float], ...]

    @cached_property
    def error(self) -> float:
        """The median of |predicted / measured - 1| over the training steps; 0 without any."""
        return statistics.median([abs(ratio - 1) for _, ratio in self.ratios] or [0.0])


def base(measured: Measurements, name: str) -> ClusterConfig:
    """The cluster as measured, before anything is fitted."""
    on_cpu = measured.device == "cpu"
    return ClusterConfig(
        name=name,
        nodes=1,
        gpus_per_node=None if on_cpu else measured.cores,
        cores=measured.cores if on_cpu else None,
        memory_gb=measured.memory_bytes / 1e9 if measured.memory_bytes else None,
        peak_tflops={precision: flops / 1e12 for precision, flops in measured.peaks.items()},
        memory_gb_s=measured.memory_bytes_s / 1e9,
        intra_gb_s=fastest_exchange(measured) / 1e9 or INTRA_GB_S,
        multiprocessors=measured.multiprocessors,
        kernel_us=0.0 if on_cpu else ClusterConfig().kernel_us,
    )


def fastest_exchange(measured: Measurements) -> float:
    """Bytes a second that a rank sends in the fastest collective; 0 if none was measured."""
    return max((_wire(row) / row.sample.seconds for row in measured.exchanges), default=0.0)


def _wire(row: TimedExchange) -> float:
    from parallelrun.planner.predict.prediction import wire_bytes

    return float(wire_bytes(Collective("dp", row.operation, "", 1, row.num_bytes), row.ranks))


def constants_of(measured: Measurements) -> tuple[Constant, ...]:
    """The constants that the measurements determine. Without collectives those of links keep their values."""
    constants = [*OF_PRODUCTS, *OF_STEPS, *(OF_CORES if measured.device == "cpu" else OF_DEVICES)]
    return (*constants, *(OF_LINKS if measured.exchanges else ()))


def calibrated(measured: Measurements, name: str) -> Calibration:
    """Fit the constants to everything measured."""
    start, constants = base(measured, name), constants_of(measured)
    step_plans = [plan_of_step(step) for step in measured.steps]
    rows: list[TimedProduct | TimedExchange | TimedStep]
    rows = [*measured.products, *measured.exchanges, *measured.steps]
    plans = {ranks: plan_of_exchange(ranks, measured.device) for ranks in {row.ranks for row in measured.exchanges}}

    def cluster(values: Sequence[float]) -> ClusterConfig:
        pairs: dict[str, Any] = {constant.key: value for constant, value in zip(constants, values)}
        return replace(start, **pairs)

    def predict(values: Sequence[float]) -> list[float]:
        fitted_cluster = cluster(values)
        seconds = [product_seconds(row, fitted_cluster) for row in measured.products]
        seconds += [exchange_seconds(row, plans[row.ranks], fitted_cluster) for row in measured.exchanges]
        return seconds + [step_seconds(plan, fitted_cluster) for plan in step_plans]

    seconds = [row.sample.seconds for row in rows]
    result = fit(constants, predict, seconds, [EXPECTED[type(row)] for row in rows])
    errors = result.errors[len(rows) - len(step_plans) :]
    ratios = tuple((step, exp(error)) for step, error in zip(measured.steps, errors))
    return Calibration(cluster(result.values), tuple(constant.key for constant in constants), ratios)


def product_seconds(row: TimedProduct, cluster: ClusterConfig) -> float:
    """Predicted seconds of a product on one core or device."""
    rates = rates_of(cluster, row.precision)
    assert rates is not None, "a calibrated cluster has rates"
    return product_s(row.rows, row.inner, row.columns, BYTES[TABLE[row.precision].compute], rates)


def plan_of_exchange(ranks: int, device: str) -> Plan:
    """The plan whose ranks exchange with each other: data parallelism."""
    return resolve(replace(Config(), dp=ranks, global_batch=ranks, device=device))


def exchange_seconds(row: TimedExchange, plan: Plan, cluster: ClusterConfig) -> float:
    """Predicted seconds of one call of a collective, with no operations of a training around it."""
    rates = rates_of(replace(cluster, operation_us=0.0), PRECISION)
    assert rates is not None, "a calibrated cluster has rates"
    own = cores.of_a_rank(rates, plan, cluster)
    return collective_s(Collective("dp", row.operation, "", 1, row.num_bytes), plan, cluster, own) or 0.0


def plan_of_step(step: TimedStep) -> Plan:
    """The plan of a training that was timed."""
    return resolve(load_frozen(step.config))


def step_seconds(plan: Plan, cluster: ClusterConfig) -> float:
    """Predicted seconds of a step; 0 if it is unknown."""
    predicted = step_time(plan, cluster)
    return predicted.step_s if predicted else 0.0
