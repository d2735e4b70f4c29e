"""The gradient norm's arithmetic and clipping, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.model.model_spec import Initialiser, ParameterSpec
from parallelrun.training.loop.gradients import Gradients
from tests.plans import tiny_plan


def parameter(gradient: torch.Tensor, shared: bool = False) -> LocalParameter:
    shape = tuple(gradient.shape)
    tensor = torch.zeros_like(gradient)
    tensor.grad = gradient
    spec = ParameterSpec("weight", shape, Initialiser("zeros"), "row_parallel")
    return LocalParameter("weight", tensor, spec, Layout.replicated(len(shape)), shared)


def gradients(*parameters: LocalParameter, flat: Sequence[torch.Tensor] = ()) -> Gradients:
    plan = tiny_plan()
    return Gradients(parameters, plan, Mesh(plan.mesh, 0, torch.device("cpu")), {"dp": flat} if flat else {})


def squares(*parameters: LocalParameter) -> float:
    return float(gradients(*parameters).squared_norm())


@pytest.mark.parametrize("shape", [(), (0, 5), (3,), (4096,), (4097,), (3, 4096), (5000, 3)])
def test_the_sum_of_squares_is_that_of_all_elements(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert squares(parameter(gradient)) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)


def test_millions_of_fp32_elements_lose_no_digits():
    """torch.linalg.vector_norm over one long row is off by 1e-5 here, which would show as a plan's error."""
    gradient = torch.rand(8_000_000, generator=torch.Generator().manual_seed(2)) + 0.5
    assert squares(parameter(gradient)) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("numel", [10, 5000])
def test_one_bad_element_makes_the_norm_not_finite(bad, numel):
    gradient = torch.zeros(numel)
    gradient[7] = bad
    total = squares(parameter(gradient))
    assert total != total or total == float("inf")


def test_clipping_scales_to_the_bound_and_leaves_less_alone():
    one = parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert gradients(one).clip(5.0, 1.0) == pytest.approx(0.2, rel=1e-6)
    assert float(one.tensor.grad.norm()) == pytest.approx(1.0, rel=1e-6)
    untouched = parameter(torch.tensor([3.0, 4.0]))
    assert gradients(untouched).clip(5.0, 10.0) == 1.0
    assert untouched.tensor.grad.tolist() == [3.0, 4.0]


def test_no_bound_means_no_clipping_but_the_loss_scale_still_goes():
    one = parameter(torch.tensor([6.0, 8.0]))
    assert gradients(one).clip(5.0, 0.0, scale=2.0) == 1.0
    assert one.tensor.grad.tolist() == [3.0, 4.0]


def test_a_missing_gradient_is_named():
    one = parameter(torch.ones(2))
    one.tensor.grad = None
    with pytest.raises(AssertionError, match="weight"):
        squares(one)


def test_flat_buffers_are_measured_and_clipped_in_place_of_what_they_hold():
    buffer = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    both = [parameter(buffer[:3]), parameter(buffer[3:])]
    together = gradients(*both, flat=[buffer])
    total = float(buffer.square().sum())
    assert float(together.squared_norm()) == pytest.approx(total, rel=1e-12) == squares(*both)
    together.clip(total**0.5, 1.0)
    assert squares(*both) == pytest.approx(1.0, rel=1e-5)


def test_flat_buffers_do_not_make_copies_count():
    """A buffer may hold a copy that another rank counts: then the norm goes by parameter, and all are clipped."""
    buffer = torch.ones(8)
    both = gradients(parameter(buffer[:3]), parameter(buffer[3:], shared=True), flat=[buffer])
    assert float(both.squared_norm()) == pytest.approx(3.0)
    both.clip(3.0**0.5, 1.0)
    assert buffer.tolist() == pytest.approx([3.0**-0.5] * 8, rel=1e-5)
