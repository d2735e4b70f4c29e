"""Rates and sizes in another unit are refused with the likely fix; those of every real machine are not."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.config.keys import known_keys
from parallelrun.config.units import CONFUSED
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import pairs, tiny_config, tiny_plan

# One way, per device, with the units that people write them in by mistake (prediction.md, hardware facts).
MACHINES = {
    "A100": {"memory_gb": 80, "peak_tflops": 312, "intra_gb_s": 300, "inter_gb_s": 25, "memory_gb_s": 2039},
    "GB200": {"memory_gb": 186, "peak_tflops": 2500, "intra_gb_s": 900, "inter_gb_s": 50, "memory_gb_s": 8000},
    "B300": {"memory_gb": 288, "peak_tflops": 2250, "intra_gb_s": 900, "inter_gb_s": 100, "memory_gb_s": 8000},
    "V100 on Ethernet": {"memory_gb": 32, "peak_tflops": 125, "intra_gb_s": 12, "inter_gb_s": 0.78, "memory_gb_s": 900},
    "a rank of many on a laptop": {"memory_gb": 0.5, "peak_tflops": 0.005, "intra_gb_s": 0.1, "inter_gb_s": 0.02,
                                   "memory_gb_s": 1.0},
    "a CPU host": {"memory_gb": 2048, "peak_tflops": 4.0, "intra_gb_s": 5.0, "inter_gb_s": 1.25, "memory_gb_s": 400},
}  # fmt: skip
TIMES = {"latency_us": 5.0, "collective_us": 30.0, "kernel_us": 4.0, "operation_us": 20.0}


def of_cluster(values: dict[str, float]) -> dict[str, float]:
    return {f"cluster.{key}": float(value) for key, value in values.items()}


def problems(overrides: dict[str, object]):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides))
    return caught.value.problems


@pytest.mark.parametrize("machine", MACHINES)
def test_every_real_machine_is_allowed(machine):
    tiny_plan({**of_cluster(MACHINES[machine]), **of_cluster(TIMES)})


@pytest.mark.parametrize(
    ("key", "value", "unit", "right"),
    [
        ("inter_gb_s", 200.0, "Gb/s", 25.0),
        ("inter_gb_s", 25_000.0, "MB/s", 25.0),
        ("memory_gb", 80_000.0, "MB", 80.0),
        ("memory_gb", 0.08, "TB", 80.0),
        ("memory_gb_s", 2_039_000.0, "MB/s", 2039.0),
        ("peak_tflops", 312e12, "FLOP/s", 312.0),
        ("latency_us", 5e-6, "s", 5.0),
        ("latency_us", 5e-3, "ms", 5.0),
        ("link_efficiency", 78.0, "%", 0.78),
    ],
)
def test_another_unit_is_refused_with_the_likely_fix(key, value, unit, right):
    (problem,) = problems({f"cluster.{key}": value})
    assert f"{value:g} {unit} are {right:g}" in problem.what and problem.where == f"cluster.{key}"
    ((named, suggested),) = pairs(problem.suggestion)
    assert (named, float(suggested)) == (f"cluster.{key}", right)
    tiny_plan({f"cluster.{key}": right})


def test_each_precision_s_peak_is_checked():
    (problem,) = problems({"cluster.peak_tflops": {"fp32": 19.5, "bf16": 312_000.0}})
    assert problem.suggestion == "cluster.peak_tflops.bf16=312"


def test_a_rate_that_is_plausible_alone_but_not_beside_the_others():
    """3.35 TB/s of an H100: a CPU has 3.35 GB/s, and no device computes 295,000 FLOPs for each byte that it reads."""
    (problem,) = problems({"cluster.peak_tflops": 989.0, "cluster.memory_gb_s": 3.35})
    assert problem.suggestion == "cluster.memory_gb_s=3350" and "295,224 FLOPs" in problem.what
    tiny_plan({"cluster.peak_tflops": 0.05, "cluster.memory_gb_s": 3.35})


RATES = [key for name, key in known_keys().items() if name.startswith("cluster.") and key.kind in ("float", "Any")]


@pytest.mark.parametrize("key", RATES, ids=lambda key: key.name)
def test_no_rate_may_be_negative_and_those_that_divide_may_not_be_zero(key):
    for value in (-1.0, float("nan"), float("inf"), *((0.0,) if key.above == 0 else ())):
        (problem,) = problems({key.name: value})
        assert problem.where == key.name and problem.suggestion
        assert not key.plausible or "are plausible" in problem.what
    assert key.above == 0 or key.least == 0
    if key.least == 0:
        tiny_plan({key.name: 0.0})


@pytest.fixture(scope="module")
def listed():
    with redirect_stdout(io.StringIO()) as screen:
        assert main(["ls", "keys"]) == 0
    return screen.getvalue()


@pytest.mark.parametrize("key", [key for key in known_keys().values() if key.plausible], ids=lambda key: key.name)
def test_a_plausible_range_has_a_unit_and_is_shown(key, listed):
    low, high = key.plausible
    assert low < high and key.unit in CONFUSED
    assert f"{low:g} to {high:g} {key.unit}" in listed


def test_a_negative_rate_is_likely_meant_without_its_sign():
    (problem,) = problems({"cluster.memory_gb_s": -2039.0})
    assert problem.suggestion == "cluster.memory_gb_s=2039.0" and "0.1 to 30000 GB/s are plausible" in problem.what
