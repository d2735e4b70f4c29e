"""Our 1D, 2D and 3D products in shared memory against Colossal-AI's legacy layers on gloo: one Linear, paired.

    pip install --no-deps --no-build-isolation --target /tmp/colossal colossalai==0.5.0
    pip install --target /tmp/colossal tqdm psutil click fabric contexttimer einops pydantic
    python -m benchmarks.colossal --peer /tmp/colossal

Both sides run in the same processes and alternate: Linear 1024 -> 4096 with bias, 8 x 128 tokens, fp32, forward and
backward. They have the same weights, inputs and output gradients, and each is compared with one process's Linear before
anything is timed. A step ends with every gradient complete: ours sums the bias's, which training would do once per
step, theirs does itself. `products` is the plain local products of the same shape, the least that our side must
compute; `torchs_products` the same by torch's own kernels, the least of theirs.

Its legacy layers expect CUDA and the whole library: packages that they never use are stood in for by empty modules, and
the CUDA random states of their initialisers by nothing. The layers themselves run as published. Its 2.5D is left out:
with depth > 1 it computes a wrong weight gradient.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.pairs import WithTorchsProducts, beyond, compare, on_ranks, peers_on_gloo, read_arguments, time_pairs
from parallelrun.base.layout import Layout
from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.model.product import ActivationLayout, Product, forms
from parallelrun.strategies.tensor.grid import matmul
from parallelrun.strategies.tensor.megatron import operators

SAMPLES, SEQ, IN, OUT = 8, 128, 1024, 4096
BAR, BAR_1D, BEYOND_BAR = 0.8, 1.0, 0.8
ABSENT = ("peft", "bitsandbytes", "galore_torch", "transformers", "ray", "diffusers")
GRID, CUBE, WHOLE = ActivationLayout(("row",), ("col",)), ActivationLayout(("x", "y"), ("z",)), ActivationLayout()


@dataclass(frozen=True)
class Case:
    """product: ours; sizes: of our mesh; mode, options: of Colossal-AI's tensor parallelism."""

    product: Product
    sizes: dict[str, int]
    mode: str

    @property
    def world(self) -> int:
        return MeshShape(tuple(self.sizes.items())).num_ranks


CASES = {
    "2d": Case(forms.stationary_y(GRID), {"row": 2, "col": 2}, "2d"),
    "2d_stationary_w": Case(forms.stationary_w(GRID), {"row": 2, "col": 2}, "2d"),
    "2d_summa": Case(forms.summa(GRID), {"row": 2, "col": 2}, "2d"),
    "3d": Case(forms.cube(CUBE), {"x": 2, "y": 2, "z": 2}, "3d"),
    "1d": Case(forms.column_1d(), {"tp": 4}, "1d"),
}


@dataclass(frozen=True)
class Part:
    """[start, stop) of every dim that one side's rank holds of X, W, b and Y."""

    x: Layout
    weight: Layout
    bias: Layout
    y: Layout
    sizes: dict[str, int]
    place: dict[str, int]

    def of(self, whole: Tensor | None, name: str) -> Tensor:
        assert whole is not None
        layout: Layout = getattr(self, name)
        for dim, (start, stop) in enumerate(layout.ranges(tuple(whole.shape), self.sizes, self.place)):
            whole = whole.narrow(dim, start, stop - start)
        return whole.contiguous().clone()


def activation(lies: ActivationLayout) -> Layout:
    return Layout((lies.rows, (), lies.features))


def operands() -> dict[str, Tensor]:
    """The logical tensors: X, W (out, in), b and dY."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    return {
        "x": draw(SAMPLES, SEQ, IN),
        "weight": draw(OUT, IN, scale=IN**-0.5),
        "bias": draw(OUT),
        "y": draw(SAMPLES, SEQ, OUT),
    }


@dataclass
class Side:
    """One side on this rank: its parts, `forward(x)`, and `complete()`, which finishes gradients after backward."""

    part: Part
    weight: nn.Parameter
    bias: nn.Parameter
    forward: Callable[[Tensor], Tensor]
    complete: Callable[[], None]
    transposed: bool = False

    def prepare(self, whole: dict[str, Tensor]) -> None:
        """Take this rank's parts of the operands."""
        weight = self.part.of(whole["weight"], "weight")
        self.weight.data.copy_(weight.t() if self.transposed else weight)
        self.bias.data.copy_(self.part.of(whole["bias"], "bias"))
        self.x = self.part.of(whole["x"], "x").requires_grad_()
        self.dy = self.part.of(whole["y"], "y")

    def step(self) -> Tensor:
        for mesh_dim in (self.x, self.weight, self.bias):
            mesh_dim.grad = None
        y = self.forward(self.x)
        y.backward(self.dy)
        self.complete()
        return y

    def error(self, whole: dict[str, Tensor]) -> float:
        """The largest relative error of Y and every gradient against one process."""
        mesh_dims = {name: whole[name].clone().requires_grad_() for name in ("x", "weight", "bias")}
        expected = functional.linear(mesh_dims["x"], mesh_dims["weight"], mesh_dims["bias"])
        expected.backward(whole["y"])
        y = self.step().detach()
        found = {"y": y, **{name: getattr(self, name).grad for name in mesh_dims}}
        if self.transposed:
            found["weight"] = found["weight"].t()
        right = {"y": expected.detach(), **{name: mesh_dim.grad for name, mesh_dim in mesh_dims.items()}}
        parts = {name: self.part.of(value, name) for name, value in right.items()}
        return max(float((found[n] - parts[n]).abs().max() / parts[n].abs().max()) for n in parts)


def ours(case: Case) -> Side:
    """Our product as the layers use it."""
    shape = MeshShape(tuple(case.sizes.items()))
    plan: Any = SimpleNamespace(world=shape.num_ranks, mesh=shape, tied_copies=(), servers=0)
    mesh, product = build_mesh(plan, torch.device("cpu")), case.product
    part = Part(
        activation(product.x), product.weight, product.bias_layout, activation(product.y), case.sizes, mesh.coordinate
    )
    weight = nn.Parameter(part.of(torch.empty(OUT, IN), "weight"))
    bias = nn.Parameter(part.of(torch.empty(OUT), "bias"))
    options = matmul.MatmulOptions(torch.float32, torch.float32)

    def forward(x: Tensor) -> Tensor:
        if case.mode == "1d":
            return operators.column_parallel_linear(
                x, [(weight, bias)], operators.TPContext(mesh.group("tp"), False, True)
            )[0]
        return matmul.multiply(x, [(weight, bias)], product, mesh, options)[0]

    return Side(part, weight, bias, forward, lambda: _sum_bias(bias, product, mesh))


def _sum_bias(bias: nn.Parameter, product: Product, mesh: Mesh) -> None:
    assert bias.grad is not None
    for axis in product.bias_layout.partial:
        comm.all_reduce(bias.grad, mesh.group(axis), "partial")


class Empty(ModuleType):
    """A package of which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An entry of `sys.meta_path`: the ABSENT packages, and whatever is imported from them, are empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextlib.contextmanager
def _no_seed(mode: Any) -> Iterator[None]:
    yield


def theirs(case: Case, peer: str) -> Side:
    """Colossal-AI's layer of that mode, in process groups of its own making on the ranks that are up."""
    warnings.filterwarnings("ignore")
    sys.path.append(peer)
    sys.meta_path.append(StandIns())
    import colossalai.legacy.context as context

    context.seed = context.random.seed = _no_seed
    from colossalai.legacy.context import ParallelMode
    from colossalai.legacy.core import global_context
    from colossalai.legacy.nn.layer.parallel_1d import Linear1D_Col
    from colossalai.legacy.nn.layer.parallel_2d import Linear2D
    from colossalai.legacy.nn.layer.parallel_3d import Linear3D

    rank, world = dist.get_rank(), dist.get_world_size()
    global_context.verbose = False
    global_context.load_config({"parallel": {"tensor": {"size": world, "mode": case.mode}}})
    with peers_on_gloo() as group:
        global_context._register_dist(rank, world, group, None, list(range(world)), ParallelMode.GLOBAL)
        global_context.add_global_rank(ParallelMode.GLOBAL, rank)
        global_context.init_parallel_groups()
    layer = {"1d": Linear1D_Col, "2d": Linear2D, "3d": Linear3D}[case.mode](IN, OUT)
    return Side(_their_part(case.mode, rank), layer.weight, layer.bias, layer, lambda: None, case.mode != "1d")


def _their_part(mode: str, rank: int) -> Part:
    """2D: rank = 2 i + j, b in four parts (j, i). 3D: rank = i + 2 j + 4 k; X rows (i, j), features k."""
    if mode == "1d":
        split = Layout((("tp",), ()))
        return Part(activation(WHOLE), split, Layout((("tp",),)), Layout(((), (), ("tp",))), {"tp": 4}, {"tp": rank})
    if mode == "2d":
        lies = activation(ActivationLayout(("i",), ("j",)))
        sizes, place = {"i": 2, "j": 2}, {"i": rank // 2, "j": rank % 2}
        return Part(lies, Layout((("j",), ("i",))), Layout((("j", "i"),)), lies, sizes, place)
    x, y = ActivationLayout(("i", "j"), ("k",)), ActivationLayout(("i", "k"), ("j",))
    place = {"i": rank % 2, "j": rank // 2 % 2, "k": rank // 4}
    sizes = {"i": 2, "j": 2, "k": 2}
    return Part(activation(x), Layout((("j",), ("k", "i"))), Layout((("j",),)), activation(y), sizes, place)


def local_products(case: Case) -> Callable[[], None]:
    """Y, dX and dW of the shape that a rank multiplies, whatever it moves: M / q, K, N / q on a 2D grid."""
    rows, width, features = {
        "1d": (SAMPLES * SEQ, IN, OUT // 4),
        "2d": (SAMPLES * SEQ // 2, IN, OUT // 2),
        "3d": (SAMPLES * SEQ // 2, IN // 2, OUT // 2),
    }[case.mode]
    x, weight, dy = torch.randn(rows, width), torch.randn(features, width), torch.randn(rows, features)

    def multiply() -> None:
        functional.linear(x, weight)
        dy @ weight
        dy.t() @ x

    return multiply


def _run(case_name: str, peer: str, pairs: int, warmup: int) -> dict[str, Any]:
    case, whole = CASES[case_name], operands()
    sides = {"ours": ours(case), "theirs": theirs(case, peer)}
    errors = {}
    for name, side in sides.items():
        side.prepare(whole)
        worst = torch.tensor([side.error(whole)])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        errors[name] = worst.item()
        assert errors[name] < 1e-5, f"{case_name}: {name} is wrong by {errors[name]}"
    del whole
    torch_private.use_fast_products()
    products, theirs_step = local_products(case), WithTorchsProducts(sides["theirs"].step)
    beside: dict[str, Callable[[], None]] = {"products": products, "torchs_products": WithTorchsProducts(products)}
    times = time_pairs(sides["ours"].step, theirs_step, pairs, warmup, **beside)
    return {"case": case_name, "errors": errors, "times": times}


def main() -> None:
    arguments = read_arguments(__doc__, "colossal", CASES, peer="/tmp/colossal")
    names, options = arguments.case.split(","), (arguments.peer, arguments.pairs, arguments.warmup)
    results = ((on_ranks(CASES[n].world, _run, n, *options), BAR_1D if n == "1d" else BAR) for n in names)
    compare(arguments.name, results, _beyond_products)


def _beyond_products(row: dict[str, Any]) -> str:
    """Add the time beyond the products to a row, and say it."""
    row |= {"peer": "colossalai 0.5.0, legacy layers", **beyond(row["times"], "products", "torchs_products")}
    products, torchs = (statistics.median(row["times"][f"{name}products"]) * 1e3 for name in ("", "torchs_"))
    return (
        f"products {products:.1f} and {torchs:.1f} ms; beyond them {row['beyond_ratio']:.2f} "
        f"({row['beyond_low']:.2f}-{row['beyond_high']:.2f}), A/A {row['beyond_a_a']:.2f}, bar {BEYOND_BAR}"
    )


if __name__ == "__main__":
    main()
