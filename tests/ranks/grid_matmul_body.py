"""One product on the ranks of a grid against `torch.nn.functional` on one process: what its tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from parallelrun.base.layout import Layout
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.contract.plan import Collective
from parallelrun.planner.model.product import ActivationLayout, Move, Product, transfers
from parallelrun.planner.model.product import forms as products
from parallelrun.strategies.tensor.grid import lookup, matmul
from parallelrun.training.verify.measure import tensor_errors

GRID, DEEP, CUBE = (
    ActivationLayout(("row",), ("col",)),
    ActivationLayout(("depth", "row"), ("col",)),
    ActivationLayout(("x", "y"), ("z",)),
)
PURPOSES = {"w": "weights", "dw": "weight_gradients"}
SAMPLES, SEQ, VOCAB = 12, 2, 37
WEIGHTS = ("weight", "bias")

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
    "grid table": lambda: table(GRID, products.stationary_y(GRID), Move("features", "col")),
    "deep table": lambda: table(DEEP, products.stationary_y(DEEP), Move("features", "col")),
    "cube table": lambda: table(CUBE, products.cube(CUBE), Move("rows", "y")),
}


def table(outside: ActivationLayout, head: Product, scatter: Move) -> Product:
    return products.lookup(outside, head.weight, head.gather_w, scatter)


@dataclass(frozen=True)
class Case:
    """One product on a grid. outputs: features of each; whole: numbers are small integers, exact in any order."""

    form: str
    sizes: dict[str, int] = field(hash=False)
    features: int = 24
    outputs: tuple[int, ...] = (48,)
    bias: bool = True
    compute: torch.dtype = torch.float64
    reduce: torch.dtype = torch.float64
    stored: torch.dtype = torch.float64
    save_gathered: bool = True
    fused: bool = True
    input_gradient: bool = True
    whole: bool = False

    @property
    def product(self) -> Product:
        return FORMS[self.form]()

    @property
    def options(self) -> matmul.MatmulOptions:
        return matmul.MatmulOptions(self.compute, self.reduce, self.save_gathered, self.fused)


@dataclass
class Found:
    """What a rank found. errors: by name, `verify`'s measure; sums over partial axes are done here."""

    values: dict[str, Tensor]
    errors: dict[str, float]
    counted: list[Collective]
    predicted: list[Collective]
    saved: int
    coordinate: dict[str, int]


def mesh_of(sizes: dict[str, int]) -> Mesh:
    """A mesh of these mesh dims; nothing else of a plan is needed."""
    shape = MeshShape(tuple(sizes.items()))
    plan: Any = SimpleNamespace(world=shape.num_ranks, mesh=shape, tied_copies=(), servers=0)
    return build_mesh(plan, torch.device("cpu"))


def numbers(seed: int, shape: tuple[int, ...], case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if case.whole:
        return torch.randint(-4, 5, shape, generator=generator).double()
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def part(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's part of a tensor."""
    for dim, (start, stop) in enumerate(layout.ranges(tuple(whole.shape), mesh.shape.sizes, mesh.coordinate)):
        whole = whole.narrow(dim, start, stop - start)
    return whole.clone()


def as_layout(activation: ActivationLayout) -> Layout:
    return Layout((activation.rows, (), activation.features))


def layouts_of(product: Product, num_outputs: int) -> dict[str, Layout]:
    """Of everything that is compared."""
    found = {"x": as_layout(product.x), "ids": Layout((product.x.rows, ()))}
    for number in range(num_outputs):
        found[f"y{number}"] = as_layout(product.y)
        found[f"weight{number}"], found[f"bias{number}"] = product.weight_layout, product.bias_layout
    return found


def inputs_of(case: Case) -> dict[str, Tensor]:
    """Global operands, and the gradients of the outputs (dy)."""
    lookup = case.product.lookup
    features = VOCAB if lookup else case.features
    ids = torch.randint(VOCAB, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(3))
    found = {"ids": ids} if lookup else {"x": numbers(1, (SAMPLES, SEQ, features), case)}
    for number, size in enumerate(case.outputs):
        shape = (VOCAB, size) if lookup else (size, features)
        found[f"weight{number}"] = numbers(10 + number, shape, case)
        if case.bias and not lookup:
            found[f"bias{number}"] = numbers(20 + number, (size,), case)
        found[f"dy{number}"] = numbers(30 + number, (SAMPLES, SEQ, size), case)
    return found


def differentiate(case: Case, mesh_dims: dict[str, Tensor], run: Callable[[], tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Outputs and gradients. leaves: operands and dy, of the whole or of this rank."""
    for name, mesh_dim in mesh_dims.items():
        mesh_dim.requires_grad_(name.startswith(WEIGHTS) or (name == "x" and case.input_gradient))
    out = run()
    found = {f"y{number}": y for number, y in enumerate(out)}
    torch.autograd.backward(out, [mesh_dims[f"dy{number}"].to(y.dtype) for number, y in enumerate(out)])
    gradients = {name: mesh_dim.grad for name, mesh_dim in mesh_dims.items() if mesh_dim.grad is not None}
    return {name: value.detach() for name, value in (found | gradients).items()}


def on_one_process(case: Case) -> dict[str, Tensor]:
    whole = inputs_of(case)

    def run() -> tuple[Tensor, ...]:
        numbered = range(len(case.outputs))
        if case.product.lookup:
            return tuple(functional.embedding(whole["ids"], whole[f"weight{i}"]) for i in numbered)
        return tuple(functional.linear(whole["x"], whole[f"weight{i}"], whole.get(f"bias{i}")) for i in numbered)

    return differentiate(case, whole, run)


def local_of(case: Case, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's parts, weights as stored, the rest in the compute dtype."""
    layouts, found = layouts_of(case.product, len(case.outputs)), {}
    for name, whole in inputs_of(case).items():
        mine = part(whole, layouts[name.removeprefix("d")], mesh)
        dtype = case.stored if name.startswith(WEIGHTS) else case.compute
        found[name] = mine if name == "ids" else mine.to(dtype)
    return found


def multiply(case: Case, local: dict[str, Tensor], mesh: Mesh) -> tuple[Tensor, ...]:
    if case.product.lookup:
        return (lookup.look_up(local["ids"], local["weight0"], case.product, mesh, case.options, VOCAB),)
    weights = [(local[f"weight{i}"], local.get(f"bias{i}")) for i in range(len(case.outputs))]
    return matmul.multiply(local["x"], weights, case.product, mesh, case.options, case.outputs)


def prove(case: Case, sum_partial: bool = True) -> Found:
    """Body of a rank: the product here and on one process."""
    mesh = mesh_of(case.sizes)
    local, saved = local_of(case, mesh), Counter()
    parameters = {mesh_dim.untyped_storage().data_ptr() for name, mesh_dim in local.items() if name.startswith(WEIGHTS)}
    kept: list[torch.UntypedStorage] = []  # a freed one's address would be used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    def run() -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return multiply(case, local, mesh)

    with CommunicationCounter(mesh) as counter:
        found = differentiate(case, local, run)
    errors = errors_of(found, case, mesh, sum_partial)
    return Found(found, errors, counter.rows(), predicted(case), sum(saved.values()), mesh.coordinate)


def errors_of(found: dict[str, Tensor], case: Case, mesh: Mesh, sum_partial: bool = True) -> dict[str, float]:
    """Against one process, after the sums that Layouts ask for."""
    layouts = layouts_of(case.product, len(case.outputs))
    for name, value in found.items():
        for axis in layouts[name].partial if sum_partial and name.startswith(WEIGHTS) else ():
            if mesh.shape.size(axis) > 1:
                dist.all_reduce(value, group=mesh.group(axis).process_group)
    expected = {name: part(whole, layouts[name], mesh) for name, whole in on_one_process(case).items()}
    assert {name: v.shape for name, v in found.items()} == {name: v.shape for name, v in expected.items()}
    return tensor_errors({name: value.double() for name, value in found.items()}, expected)


def split(case: Case) -> Found:
    """Body of a rank: backward in two halves, as torch's zero-bubble schedules run it. counted: what the input half
    sends; predicted: what the weight half sends."""
    mesh = mesh_of(case.sizes)
    local = local_of(case, mesh)
    for name, mesh_dim in local.items():
        mesh_dim.requires_grad_(name == "x" or name.startswith(WEIGHTS))
    numbered = range(len(case.outputs))
    out = multiply(case, local, mesh)
    found = {f"y{i}": out[i].detach() for i in numbered}
    weights = [mesh_dim for name, mesh_dim in local.items() if name.startswith(WEIGHTS)]
    with CommunicationCounter(mesh) as first:
        _, groups = stage_backward_input(list(out), [local[f"dy{i}"] for i in numbered], [local["x"]], iter(weights))
    with CommunicationCounter(mesh) as second:
        stage_backward_weight(iter(weights), groups)
    found |= {name: mesh_dim.grad for name, mesh_dim in local.items() if mesh_dim.grad is not None}
    return Found(found, errors_of(found, case, mesh), first.rows(), second.rows(), 0, mesh.coordinate)


def split_all(cases: list[Case]) -> list[Found]:
    """Body of a rank."""
    return [split(case) for case in cases]


def predicted(case: Case) -> list[Collective]:
    """What `product.transfers` says, as the counter tells it."""
    features = VOCAB if case.product.lookup else case.features
    moved = transfers(
        case.product, SAMPLES * SEQ, features, sum(case.outputs), case.sizes,
        save_gathered=case.save_gathered, input_gradient=case.input_gradient,
    )  # fmt: skip
    calls: Counter = Counter()
    payload: Counter = Counter()
    for move in moved:
        key = move.axis, move.operation, PURPOSES.get(move.operand, "activations")
        calls[key] += move.calls
        payload[key] += move.calls * move.elements * (case.reduce if move.operand == "dw" else case.compute).itemsize
    return [Collective(*key, calls=calls[key], payload_bytes=payload[key]) for key in sorted(calls)]


def prove_all(cases: list[Case]) -> list[Found]:
    """Body of a rank: several cases on one set of ranks."""
    return [prove(case) for case in cases]
