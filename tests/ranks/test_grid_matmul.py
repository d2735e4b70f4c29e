"""The product of the grid strategies on real ranks: every form gives Y, dX, dW and db of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.model.product import ActivationLayout, Product
from parallelrun.planner.model.product import forms as products
from parallelrun.strategies.tensor.grid import matmul
from parallelrun.training.verify.measure import tensor_errors
from tests.matrix import FULL
from tests.pool import run_ranks

BOUND = 1e-12
SAMPLES, SEQ, FEATURES = 12, 2, 24
GRID, DEEP, CUBE = (
    ActivationLayout(("row",), ("col",)),
    ActivationLayout(("depth", "row"), ("col",)),
    ActivationLayout(("x", "y"), ("z",)),
)
FORMS: dict[str, Callable[[], Product]] = {
    "stationary_y": lambda: products.stationary_y(GRID),
    "stationary_x": lambda: products.stationary_x(GRID),
    "stationary_w": lambda: products.stationary_w(GRID),
    "stationary_w, the way back": lambda: products.stationary_w(products.stationary_w(GRID).y),
    "summa": lambda: products.summa(GRID),
    "deep stationary_y": lambda: products.stationary_y(DEEP),
    "deep stationary_x": lambda: products.stationary_x(DEEP),
    "deep stationary_w": lambda: products.stationary_w(DEEP),
    "deep summa": lambda: products.summa(DEEP),
    "cube": lambda: products.cube(CUBE),
    "cube, the way back": lambda: products.cube(products.cube(CUBE).y),
    "cube stationary_y": lambda: products.stationary_y(CUBE),
}
FLAT_FORMS = [form for form in FORMS if "deep" not in form and "cube" not in form]
DEEP_FORMS = [form for form in FORMS if "deep" in form]
CUBE_FORMS = [form for form in FORMS if "cube" in form]


@dataclass(frozen=True)
class Case:
    """One product on a grid. outputs: features of each. dtypes: of products, of sums of dW, of stored weights."""

    form: str
    sizes: dict[str, int]
    outputs: tuple[int, ...] = (48, 24, 24)
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float64,) * 3
    save_gathered: bool = True
    fused: bool = True


def mesh_of(sizes: dict[str, int]) -> Mesh:
    """A mesh of these mesh dims; nothing else of a plan is needed."""
    shape = MeshShape(tuple(sizes.items()))
    plan: Any = SimpleNamespace(world=shape.num_ranks, mesh=shape, tied_copies=(), servers=0)
    return build_mesh(plan, torch.device("cpu"))


def operands(case: Case) -> dict[str, Tensor]:
    """X, every weight and bias, and the gradient of every output."""
    shapes: dict[str, tuple[int, ...]] = {"x": (SAMPLES, SEQ, FEATURES)}
    for number, size in enumerate(case.outputs):
        shapes |= {f"weight{number}": (size, FEATURES), f"bias{number}": (size,), f"dy{number}": (SAMPLES, SEQ, size)}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def layout_of(name: str, product: Product) -> Layout:
    if name.startswith("weight"):
        return product.weight_layout
    if name.startswith("bias"):
        return product.bias_layout
    activation = product.x if name == "x" else product.y
    return Layout((activation.rows, (), activation.features))


def part(tensor: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    for dim, (start, stop) in enumerate(layout.ranges(tuple(tensor.shape), mesh.shape.sizes, mesh.coordinate)):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor.clone()


def differentiate(
    values: dict[str, Tensor], num_outputs: int, multiply: Callable[[Tensor, list[Any]], tuple[Tensor, ...]]
) -> dict[str, Tensor]:
    """Outputs and gradients."""
    leaves = {name: tensor.requires_grad_() for name, tensor in values.items() if not name.startswith("dy")}
    outputs = multiply(values["x"], [(leaves[f"weight{i}"], leaves[f"bias{i}"]) for i in range(num_outputs)])
    torch.autograd.backward(outputs, [values[f"dy{i}"].to(y.dtype) for i, y in enumerate(outputs)])
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {**{f"y{number}": y.detach() for number, y in enumerate(outputs)}, **gradients}


def prove(case: Case) -> tuple[dict[str, float], dict[str, torch.dtype]]:
    """On a rank: errors against one process by name, in `verify`'s measure, and dtypes."""
    mesh, product, count = mesh_of(case.sizes), FORMS[case.form](), len(case.outputs)
    compute, reduce, stored = case.dtypes
    options = matmul.MatmulOptions(compute, reduce, case.save_gathered, case.fused)
    local = {
        name: part(tensor, layout_of(name, product), mesh).to(stored if name[0] in "wb" else compute)
        for name, tensor in operands(case).items()
    }
    ours = differentiate(local, count, lambda x, weights: matmul.multiply(x, weights, product, mesh, options))
    for name, gradient in ours.items():
        for axis in layout_of(name, product).partial:
            if mesh.shape.size(axis) > 1:
                dist.all_reduce(gradient, group=mesh.group(axis).process_group)
    alone = differentiate(
        operands(case), count, lambda x, weights: tuple(functional.linear(x, *weight) for weight in weights)
    )
    expected = {name: part(tensor, layout_of(name, product), mesh) for name, tensor in alone.items()}
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in expected.items()}
    errors = tensor_errors({name: tensor.double() for name, tensor in ours.items()}, expected)
    return errors, {name: tensor.dtype for name, tensor in ours.items()}


def prove_all(cases: list[Case]) -> list[tuple[dict[str, float], dict[str, torch.dtype]]]:
    """Body of a rank."""
    return [prove(case) for case in cases]


def variants(form: str, sizes: dict[str, int]) -> list[Case]:
    """One output, and three of different sizes, with gathered operands saved or not, fused or not."""
    case = Case(form, sizes)
    if "summa" in form:  # gathers nothing, always one node
        return [case]
    one = replace(case, outputs=(48,))
    if not FULL:
        return [replace(one, save_gathered=False), case, replace(case, fused=False)]
    return [one, case, replace(case, save_gathered=False), replace(case, fused=False)]


@pytest.mark.parametrize(
    ("forms", "sizes"),
    [
        (FLAT_FORMS, {"row": 2, "col": 3}),
        ([form for form in FLAT_FORMS if form != "summa"], {"row": 1, "col": 4}),
        (DEEP_FORMS, {"depth": 2, "row": 2, "col": 2}),
        (CUBE_FORMS, {"x": 2, "y": 2, "z": 2}),
        *([(FLAT_FORMS, {"row": 2, "col": 2}), (FLAT_FORMS, {"row": 3, "col": 2})] if FULL else []),
    ],
    ids=str,
)
def test_every_form_gives_the_product_of_one_process(forms: list[str], sizes: dict[str, int]) -> None:
    cases = [case for form in forms for case in variants(form, sizes)]
    for results in run_ranks(prod(sizes.values()), prove_all, cases):
        for case, (errors, _) in zip(cases, results, strict=True):
            assert {"y0", "x", "weight0", "bias0"} <= set(errors) and max(errors.values()) < BOUND, (case, errors)


def test_half_precision_computes_in_bf16_and_sums_weight_gradients_in_fp32() -> None:
    dtypes = torch.bfloat16, torch.float32, torch.float32
    cases = [replace(case, dtypes=dtypes) for form in FLAT_FORMS for case in variants(form, {"row": 2, "col": 2})]
    for results in run_ranks(4, prove_all, cases):
        for case, (errors, found) in zip(cases, results, strict=True):
            assert 1e-5 < max(errors.values()) < 2e-2, (case, errors)
            assert found["y0"] == torch.bfloat16 and found["weight0"] == torch.float32
