"""The measure of equality and the verdict of verify."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallelrun.training.verify.checked import checked_config
from parallelrun.training.verify.measure import compare, tensor_errors
from parallelrun.training.verify.run import judge
from parallelrun.training.verify.trace import Trace
from tests.plans import tiny_config, tiny_plan


def trace() -> Trace:
    weights = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    gradient = {"a": torch.tensor([0.5, -1.0], dtype=torch.float64), "b": torch.full((2,), 1e-18, dtype=torch.float64)}
    final = {name: value - 0.1 * gradient[name] for name, value in weights.items()}
    return Trace([2.0, 1.5], [1.1, 0.9], [gradient, gradient], weights, final, 1.7)


def verdict(changed: Trace) -> dict:
    config = checked_config(tiny_config())
    return judge(changed, trace(), config, replace(tiny_plan(), precision=tiny_plan().precision))


def test_error_is_relative_to_the_tensors_own_size() -> None:
    reference = {"big": torch.tensor([100.0]), "small": torch.tensor([1.0])}
    ours = {"big": torch.tensor([101.0]), "small": torch.tensor([1.01])}
    assert tensor_errors(ours, reference) == pytest.approx({"big": 0.01, "small": 0.01}, rel=1e-4)


def test_a_gradient_of_pure_noise_is_measured_against_its_kind() -> None:
    reference = {"weight": torch.tensor([1.0]), "key_bias": torch.tensor([1e-17])}
    ours = {"weight": torch.tensor([1.0]), "key_bias": torch.tensor([-3e-17])}
    assert tensor_errors(ours, reference)["key_bias"] < 1e-12


def test_gradients_that_are_small_for_their_format_are_measured_against_its_smallest_normal_number() -> None:
    ours, theirs = {"w": torch.tensor([2e-6])}, {"w": torch.tensor([1e-6])}
    assert tensor_errors(ours, theirs)["w"] == pytest.approx(1.0)
    assert tensor_errors(ours, theirs, least_floor=1e-4)["w"] == pytest.approx(0.01)
    ours, theirs = trace(), trace()
    theirs.gradients = [{name: 1e-6 * value for name, value in one.items()} for one in theirs.gradients]
    ours.gradients = [{name: value + 2.0**-24 for name, value in one.items()} for one in theirs.gradients]
    plan = tiny_plan({"dp": 4, "strategy.data.compression": "fp16"})
    assert judge(ours, theirs, checked_config(tiny_config()), plan)["max_error"]["grads"] == pytest.approx(2.0**-10)


def test_not_a_number_is_an_infinite_error() -> None:
    assert tensor_errors({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([1.0])})["a"] == float("inf")


def test_equal_traces_pass() -> None:
    assert verdict(trace())["passed"]


@pytest.mark.parametrize("kind", ["initial", "loss", "grads", "grad_norm", "params", "val_loss"])
def test_one_wrong_quantity_of_any_kind_fails_and_is_named(kind: str) -> None:
    wrong = trace()
    if kind == "initial":
        wrong.initial = {**wrong.initial, "b": wrong.initial["b"] + 1e-3}
        wrong.final = {**wrong.final, "b": wrong.final["b"] + 1e-3}  # the update stays right
    elif kind == "loss":
        wrong.losses = [2.0, 1.5 + 1e-9]
    elif kind == "grads":
        wrong.gradients = [wrong.gradients[0], {**wrong.gradients[1], "a": wrong.gradients[1]["a"] * (1 + 1e-9)}]
    elif kind == "grad_norm":
        wrong.grad_norms = [1.1, 0.9 + 1e-9]
    elif kind == "params":
        wrong.final = {**wrong.final, "a": wrong.final["a"] + 1e-10}
    else:
        wrong.val_loss += 1e-9
    document = verdict(wrong)
    assert not document["passed"]
    assert [k for k, error in document["max_error"].items() if error > document["tolerance"]] == [kind]


def test_copies_that_disagree_fail() -> None:
    wrong = trace()
    wrong.disagreeing = ["layers.0.attention_norm.weight"]
    assert not verdict(wrong)["passed"]


def test_compare_names_the_worst_parameter_and_step() -> None:
    wrong = trace()
    wrong.gradients = [wrong.gradients[0], {**wrong.gradients[1], "a": wrong.gradients[1]["a"] * 2}]
    assert compare(wrong, trace())["grads"].where == "a (step 2)"
