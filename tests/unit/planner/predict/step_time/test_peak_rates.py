"""Nothing is predicted faster than devices, memory and links at their peak rates, however good the constants are."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.config import presets
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.pieces.hosts import ranks_in_node, stays_in_node
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.cluster_cost import peak_flops
from parallelrun.planner.predict.step_time import blocks
from parallelrun.planner.predict.step_time.kernels import attention_s, product_s, streaming_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import Rates, rates_of
from parallelrun.planner.predict.step_time.step import StepModel, step_time
from parallelrun.planner.resolve.resolve_config import resolve
from tests.matrix import every
from tests.plans import tiny_config
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned
from tests.unit.planner.contract.test_properties import mostly_legal

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
BEST = {
    **dict.fromkeys(("product_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency"), 1.0),
    **{item.name: 0.0 for item in fields(ClusterConfig) if item.name.endswith("_us")},
    "product_ramp": 0.0,
}


@cache
def rated_clusters() -> list[tuple[ClusterConfig, str]]:
    """Every built-in cluster with each precision that it has a rate for. Composed when a test asks: every worker
    imports this file, one runs it."""
    clusters = [composed(f"cluster={name}").config.cluster for name in presets.options("cluster")]
    return [(cluster, name) for cluster in clusters for name in TABLE if rates_of(with_memory(cluster), name)]


def with_memory(cluster: ClusterConfig) -> ClusterConfig:
    return replace(cluster, memory_gb_s=cluster.memory_gb_s or 500.0)


def rates(cluster: ClusterConfig, precision: str, best: bool) -> Rates:
    found = rates_of(replace(with_memory(cluster), **(BEST if best else {})), precision)
    assert found is not None
    return found


sizes = st.one_of(st.integers(1, 300), st.sampled_from([2**power for power in range(20)]), st.integers(1, 200_000))


@settings(max_examples=150, **COMMON)
@given(st.deferred(lambda: st.sampled_from(rated_clusters())), sizes, sizes, sizes, st.integers(1, 64), st.booleans())
def test_no_product_beats_the_peak_rate_or_the_memory(rated, rows, inner, columns, count, best):
    cluster, precision = rated
    flops = 2 * count * rows * inner * columns
    width = BYTES[TABLE[precision].compute]
    seconds = product_s(rows, inner, columns, width, rates(cluster, precision, best), count)
    moved = count * width * (rows * inner + inner * columns + rows * columns)
    least = max(flops / peak_flops(cluster, precision), moved / ((cluster.memory_gb_s or 500.0) * 1e9))
    assert seconds >= least * (1 - 1e-12)
    if not best:
        assert seconds > 1.01 * flops / peak_flops(cluster, precision)


@settings(max_examples=60, **COMMON)
@given(st.deferred(lambda: st.sampled_from(rated_clusters())), st.floats(1, 1e18), sizes, sizes, st.booleans())
def test_no_attention_beats_the_peak_rate_and_no_copy_the_memory(rated, amount, seq, head_size, causal):
    cluster, precision = rated
    found = rates(cluster, precision, best=True)
    assert attention_s(amount, seq, head_size, causal, found) >= amount / peak_flops(cluster, precision) * (1 - 1e-12)
    assert streaming_s(amount, 1, found) >= amount / ((cluster.memory_gb_s or 500.0) * 1e9) * (1 - 1e-12)


@settings(max_examples=50, **COMMON)
@given(mostly_legal(), st.sampled_from(["a100_dgx", "h100_dgx", "v100_32gb"]), st.sampled_from([1, 2, 4, 8]))
def test_no_plan_computes_or_sends_faster_than_the_peak_rates(overrides, name, per_node):
    cluster = replace(composed(f"cluster={name}").config.cluster, gpus_per_node=per_node, **BEST)
    try:
        plan = resolve(tiny_config(overrides))
    except ConfigError:
        return
    time = step_time(plan, cluster)
    assert time is not None
    flops = 3 * plan.spec.forward_flops * plan.batch.global_batch
    assert time.step_s >= flops / plan.num_workers / peak_flops(cluster, plan.precision.name) * (1 - 1e-9)
    peak = peak_flops(cluster, plan.precision.name)
    assert time.mfu == pytest.approx(flops / time.step_s / plan.num_workers / peak)
    found = rates(cluster, plan.precision.name, best=True)
    for row in prediction.collectives(plan, 0):
        size = prediction.group_size(plan, row.axis)
        if size > 1:
            inside = stays_in_node(plan, cluster, row.axis)
            ports = 1 if row.operation in ("send", "recv") else ranks_in_node(plan, cluster, row.axis)
            rate = cluster.intra_gb_s if inside else min(cluster.intra_gb_s, ports * cluster.inter_gb_s)
            crossing = 1.0 if inside or ports == 1 else (size - ports) / (size - 1)  # of the bytes, at least
            least = crossing * prediction.wire_bytes(row, size) / (rate * 1e9)
            assert collective_s(row, plan, cluster, found) >= least * (1 - 1e-9), row


def test_every_cluster_with_rates_was_tried():
    assert len({cluster.name for cluster, _ in rated_clusters()}) >= 8


MODELS = {
    "llama3_8b": ("tp=2", "micro_batch=2"),
    "gpt3_175b": ("tp=8", "pp=8", "micro_batch=1", "recompute=full"),
    "mixtral_8x7b": ("strategy=dropless", "ep=8", "micro_batch=1"),
    "deepseek_v2_lite": ("strategy=dropless", "ep=8", "micro_batch=4"),
}
EVERY_STACK = ("gpt3_175b", "deepseek_v2_lite")


@pytest.mark.parametrize("model", MODELS)
def test_no_part_of_a_plan_reaches_nine_tenths_of_the_peak(model):
    """Products and attention of every block, on every GPU, by every program; by default on every third GPU."""
    words = (f"model={model}", "precision=fp16", "dp=8", "global_batch=64", *MODELS[model])
    stacks = presets.options("stack") if model in EVERY_STACK else ("parallelrun", "megatron_core")
    plans = [planned(*words, f"stack={stack}") for stack in stacks]
    gpus = [cluster for cluster, precision in rated_clusters() if precision == "fp16" and cluster.multiprocessors]
    assert len(gpus) >= 14 and len(presets.options("stack")) >= 8
    for cluster in every(3, gpus):
        peak = peak_flops(cluster, "fp16")
        for plan in plans:
            for block in dict.fromkeys(map(plan.spec.block, plan.spec.first_alike.values())):
                parts = StepModel(cluster).block_time(plan, block).forward
                flops = block.forward_flops * plan.batch.micro_batch / plan.mesh.size("tp")
                if block.kind == "transformer" and plan.stack.fused_attention:
                    rows = plan.num_rows / plan.mesh.size("tp") / (2 if plan.spec.is_causal else 1)
                    attention = 4.0 * rows * plan.spec.seq * plan.spec.qk_features  # keys and values as wide as queries
                    flops -= 2.0 * rows * plan.spec.seq * plan.spec.attention_features * 2
                    assert parts[blocks.ATTENTION] > attention / (0.9 * peak), (cluster.name, plan.stack.name)
                if block.kind != "embedding" and plan.stack.fused_attention:
                    assert parts[blocks.PRODUCTS] > flops / (0.9 * peak), (cluster.name, plan.stack.name, block.name)
