"""Memory of a plan under other programs than this one."""

from __future__ import annotations

import pytest

from parallelrun.planner.memory.backward_block import backward_block
from parallelrun.planner.predict import prediction
from tests.unit.config.test_presets import plan as planned

LLAMA = ("model=llama3_8b", "precision=bf16", "dp=8", "global_batch=16", "micro_batch=2", "device=cuda")
ROWS, HIDDEN, KV, FFN, HEADS = 2 * 8192, 4096, 1024, 14336, 32


def block(*words: str):
    plan = planned(*(word for word in LLAMA if not any(word.split("=")[0] + "=" in other for other in words)), *words)
    return backward_block("layers.1", plan, False)


@pytest.mark.parametrize(
    ("words", "weights", "gradients", "states"),
    [
        (("stack=megatron_core", "strategy=zero1"), 2, 2, 12 / 8),  # bf16, bf16 sums, distributed optimizer
        (("stack=megatron_deepspeed", "strategy=zero1"), 2, 4, 12 / 8),
        (("stack=megatron_lm_2021", "strategy=ddp"), 2, 2, 12),
        (("stack=nanotron", "strategy=zero1"), 2, 6, 12 / 8),
        (("stack=torchtitan", "strategy=fsdp"), 4 / 8, 4 / 8, 8 / 8),
        (("stack=parallelrun", "strategy=ddp"), 4, 4, 8),
    ],
)
def test_bytes_of_a_weight_of_its_gradient_and_its_state(words, weights, gradients, states):
    plan = planned(*LLAMA, *words)
    found, numel = prediction.memories(plan)[0], plan.spec.num_parameters
    root = 2 * 128256 * HIDDEN if plan.data.kind == "fsdp" else 0  # the head stays gathered, in 16 bits
    assert found.weights / numel == pytest.approx(weights + root / numel, rel=0.02)
    assert found.optimizer / numel == pytest.approx(states, rel=0.01)
    # DDP and FSDP hold the sums of a step's only microbatch later than its peak, if at all
    least = 0 if plan.data.kind == "fsdp" else gradients
    assert least * 0.99 <= found.gradients / numel <= gradients * 1.2


def test_scores_are_kept_or_recomputed_first():
    scores = 5 * ROWS * HEADS * 8192
    flash, kept = block("stack.selective=attention"), block("stack.selective=attention", "stack.fused_attention=false")
    assert kept.kept - flash.kept == scores and kept.again == flash.again == 0
    again = block("stack.selective=attention", "stack.fused_attention=false", "recompute=selective")
    assert (again.kept, again.again) == (flash.kept, scores)


def test_per_operation_recomputation_keeps_the_results_of_every_second_product():
    """The block's input, the queries, values, gate and the MLP's result, and what attention gives, with its sums."""
    own = block("stack.selective=products", "recompute=selective")
    assert own.kept == ROWS * (2 * (HIDDEN + HIDDEN + KV + FFN + HIDDEN + HIDDEN) + 4 * HEADS)
    assert own.kept + own.again == block().kept


@pytest.mark.parametrize(("words", "copies"), [(("strategy=zero1",), 2), (("strategy=fsdp",), 0)])
def test_weights_in_fp8_are_copies_and_inputs_in_fp8_are_smaller(words, copies):
    """Inputs of queries and MLP, and of the down projection; attention's result is kept in 16 bits, too."""
    words = (*LLAMA[:1], *LLAMA[2:], *words, "stack.fp8_copies=true")
    plans = [planned(*words, f"precision={name}") for name in ("bf16", "fp8")]
    linear = plans[0].spec.num_parameters - 2 * 128256 * HIDDEN - (2 * 32 + 1) * HIDDEN
    before, after = (prediction.memories(plan)[0].weights for plan in plans)
    assert after - before == copies * linear
    for recompute, less in (("none", 1), ("selective", 0), ("full", 0)):
        copied = f"recompute={recompute}", "stack.fp8_copies=true"
        both = [block(f"precision={name}", *copied) for name in ("bf16", "fp8")]
        assert both[0].kept - both[1].kept == less * ROWS * (HIDDEN + FFN)
    assert both[0].again - both[1].again == ROWS * (HIDDEN + FFN)


def test_experts_have_copies_in_fp8_where_their_products_are_in_it():
    words = ("model=mixtral_8x7b", "dp=8", "ep=8", "strategy=dropless", "global_batch=8", "device=cuda",
             "stack.fp8_copies=true")  # fmt: skip
    plans = [planned(*words, f"precision={name}", "stack.fp8=all") for name in ("bf16", "fp8")]
    experts, added = 32 * 3 * HIDDEN * FFN, [prediction.memories(plan)[0].weights for plan in plans]
    dense = planned(*words, "precision=fp8", "stack.fp8=dense")
    assert prediction.memories(dense)[0].weights == added[1] - 2 * experts
    assert added[1] - added[0] == 2 * (experts + 32 * 2 * HIDDEN * (HIDDEN + KV))


def test_a_separate_gate_and_partitioned_inputs():
    assert block("stack.separate_gate=true").kept - block().kept == 2 * ROWS * FFN
    full, split = (
        block("recompute=full", "tp=4", f"stack.partitioned_activations={value}") for value in ("false", "true")
    )
    assert full.kept == 2 * ROWS * HIDDEN == 4 * split.kept
