"""Whole models under tensor parallelism: loss and every gradient of one device, collectives as predicted."""

from __future__ import annotations

import pytest

from tests.pool import COMPILER, run_ranks
from tests.tensor_cases import BOUND, llama, prove_gpt

SEQUENCE = {"strategy.tensor.sequence_parallel": True}
APART = {"strategy.tensor.overlap": False}


def assert_proved(overrides, pipeline="none", backend="", bound=BOUND):
    timeout = 300 if backend else 60  # compilation took more than 60 seconds on a machine with ten times its load
    imports = COMPILER if backend else ()
    for proof in run_ranks(overrides["tp"], prove_gpt, overrides, pipeline, backend, timeout=timeout, imports=imports):
        assert proof.error < bound, proof.where
        assert proof.counted == proof.predicted
        assert proof.predicted, "nothing was sent"


@pytest.mark.parametrize("apart", [{}, APART], ids=["overlapped", "apart"])
@pytest.mark.parametrize("sequence", [{}, SEQUENCE], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", [{}, llama()], ids=["gpt", "llama"])  # llama at tp=4: each kv head has two copies
def test_a_model_trains_as_on_one_device(model, tp, sequence, apart):
    assert_proved({**model, "tp": tp, **sequence, **apart})


@pytest.mark.parametrize("sequence", [{}, SEQUENCE], ids=["whole", "sequence"])
def test_one_kv_head_is_copied_to_every_rank(sequence):
    assert_proved(llama(tp=4, model__kv_heads=1) | sequence)


@pytest.mark.parametrize("vocab", [7, 3, 50])  # 2 + 2 + 2 + 1, 1 + 1 + 1 + 0, 13 + 13 + 13 + 11
def test_the_vocabulary_need_not_divide(vocab):
    assert_proved({"tp": 4, "model.vocab": vocab, "model.label_smoothing": 0.1, **SEQUENCE})


@pytest.mark.parametrize("overrides", [{}, SEQUENCE, {"model.attention_dropout": 0.2}], ids=str)
def test_dropout_drops_the_same_elements(overrides):
    assert_proved({"tp": 2, "dropout": 0.2, **overrides})


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("overrides", [{}, SEQUENCE, {"dropout": 0.1}, {**SEQUENCE, **APART}], ids=str)
def test_recomputation_sends_again_what_is_predicted(overrides, recompute):
    assert_proved({"tp": 2, "recompute": recompute, **overrides})


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 0.1), ("fp16", 0.02)])
def test_other_precisions_differ_by_their_rounding(precision, bound):
    quiet = {"model.bias": False}  # a key bias has a gradient of pure noise
    assert_proved({"tp": 2, "precision.name": precision, **quiet, **SEQUENCE}, bound=bound)


@pytest.mark.parametrize("tp", [2, 4])
def test_an_mlp_on_features_trains_as_on_one_device(tp):
    assert_proved({"tp": tp, "model.name": "mlp", "model.preset": "mlp", "model.vocab": 7, "dropout": 0.1})


def test_zero_bubble_separates_the_collectives():
    assert_proved({"tp": 2, **SEQUENCE}, pipeline="zero_bubble")
