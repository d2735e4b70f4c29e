"""What the grid tensor strategies (2d, 2.5d, 3d) will do: checks, axes, forms, layouts. Torch-free.

Sources: SUMMA as in Optimus (Xu et al. 2021), Tesseract (Wang et al. 2021), 3D (Bian et al. 2021, after Agarwal et al.
1995); forms chosen per layer as in MeshSlice and AxoNN. See `parallelrun.product` and docs/tensor_parallel.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

from parallelrun.config.schema import TensorStrategyConfig
from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import BlockSpec, ParameterSpec
from parallelrun.plan.messages import Explanation
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Plan
from parallelrun.plan.tensor_strategy import LayoutChoice, MeshDims, Pass, TensorStrategy
from parallelrun.wording import divisors

from .. import explaining
from . import axes, checks, choose, layouts, memory, products, shapes, traffic

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class GridStrategy(TensorStrategy):
    """Samples, features and weights are split over several mesh dims; subclasses say over how many.

    explanation, source: for `parallelrun explain`.
    """

    explanation: ClassVar[str]
    source: ClassVar[str]

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """The grid, layer roles, heads, widths and samples must divide; sequence and vocabulary need not."""
        return checks.check(request)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        """The form of every pair of layers, by what it moves."""
        asked = request.config.strategy.tensor
        forms = choose.choose(request.spec, checks.choice(request))
        return cls(overlap=asked.overlap, forms=forms, save_gathered=asked.save_gathered)

    @classmethod
    def mesh_dims(cls, request: Request) -> MeshDims:
        """row x col, depth x row x col, or x x y x z; `tp` is made of them."""
        tensor = request.config.strategy.tensor
        grid = None if tensor.kind == "3d" else axes.read_grid(tensor.grid)
        return axes.mesh_dims(tensor.kind, request.tp, grid, tensor.depth)

    @classmethod
    def vocab_degrees(cls, request: Request) -> tuple[int, ...]:
        """Those of the rows of the head's weight; none where tp makes no grid."""
        sizes = shapes.arranged(request) or {}
        if not sizes:
            return ()
        head = products.head(request.config.strategy.tensor.kind, axes.between_blocks(sizes))
        return tuple(sizes[axis] for axis in head.weight.dims[0])

    @classmethod
    def micro_batch_divisor(cls, request: Request) -> int:
        """A microbatch is cut by whole samples into as many parts as the rows axes make."""
        return checks.sample_parts(request)

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        """Grid and depth, where they were not given."""
        return shapes.filled(request)

    def label(self, plan: Plan) -> str:
        """`2d 2x3`."""
        return f"{self.kind} {'x'.join(str(degree) for degree in axes.tensor_sizes(plan).values())}"

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """See `layouts`."""
        return layouts.layout(parameter, plan)

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """This rank's samples and features."""
        *middle, features = plan.spec.boundary_shape
        sizes = axes.tensor_sizes(plan)
        samples, width = axes.outside(plan).local(plan.batch.micro_batch, features, sizes)
        return (samples, *middle, width)

    def loss_axes(self, plan: Plan) -> tuple[str, ...]:
        """The axes over which samples are split where the logits are."""
        head = next((layer for layer in plan.spec.blocks[-1].layers if layer.layer_role == "head"), None)
        product = products.product_of(head, plan) if head else None
        rows = product.y.rows if product else axes.outside(plan).rows
        return tuple(axis for axis in rows if plan.mesh.size(axis) > 1)

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """See `memory`."""
        return memory.saved_bytes(block, plan)

    def passes(self, block: BlockSpec, plan: Plan) -> tuple[Pass, ...]:
        """See `memory`."""
        return memory.passes(block, plan)

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """See `traffic`."""
        return traffic.collectives(blocks, plan)

    def explain(self, plan: Plan) -> Explanation:
        """The collectives of every block."""
        return explaining.explanation(plan, self.explanation, self.source, traffic.steps)


@dataclass(frozen=True)
class Tensor2D(GridStrategy):
    """A grid of rows and columns."""

    kind: ClassVar[str] = "2d"
    layout_name: ClassVar[str] = "2d"
    reads: ClassVar[tuple[str, ...]] = ("overlap", "grid", "form", "save_gathered")
    source: ClassVar[str] = "van de Geijn and Watts 1997; Xu et al. 2021 (Optimus)"
    explanation: ClassVar[str] = (
        "Ranks form a grid of rows and columns, and every activation and weight is cut over both. A product gathers "
        "one operand along a row of the grid, the other along a column, or scatters the partial sums: for each pair of "
        "layers the plan takes what moves the fewest bytes (SUMMA broadcasts panels of both instead)."
    )

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """The most nearly square grid: in the form that moves least, gathering again in backward, and with SUMMA."""
        rows = max(n for n in divisors(tp) if n * n <= tp)
        name = f"2d {rows}x{tp // rows}" if rows > 1 else "2d"
        flat = TensorStrategyConfig(cls.kind, grid=f"{rows}x{tp // rows}" if rows > 1 and rows * rows != tp else None)
        return [
            LayoutChoice(name, flat),
            LayoutChoice(f"{name} lean", replace(flat, save_gathered=False), name),
            LayoutChoice(f"{name} summa", replace(flat, form="summa"), name),
        ]

    def resolved_config(self, config: TensorStrategyConfig, plan: Plan) -> TensorStrategyConfig:
        """With the grid."""
        return replace(config, grid=f"{plan.mesh.size('row')}x{plan.mesh.size('col')}")


@dataclass(frozen=True)
class Tensor25D(Tensor2D):
    """Several grids, each with a copy of the weights and its own samples."""

    kind: ClassVar[str] = "2.5d"
    layout_name: ClassVar[str] = "2.5d"
    reads: ClassVar[tuple[str, ...]] = ("overlap", "grid", "depth", "form", "save_gathered")
    copies_weights: ClassVar[bool] = True
    source: ClassVar[str] = "Wang et al. 2021 (Tesseract)"
    explanation: ClassVar[str] = (
        "Several grids share the samples, each with a copy of the weights: as 2D inside a grid, and once a step the "
        "gradients of the weights are summed over the depth."
    )

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """Square grids at every legal depth."""
        found = [
            LayoutChoice(f"2.5d {depth}x{side}x{side}", TensorStrategyConfig(cls.kind, depth=depth))
            for depth in divisors(tp)
            if depth > 1 and (side := isqrt(tp // depth)) >= depth and side * side == tp // depth
        ]
        return found or [LayoutChoice("2.5d", TensorStrategyConfig(cls.kind, depth=2))]

    def resolved_config(self, config: TensorStrategyConfig, plan: Plan) -> TensorStrategyConfig:
        """With grid and depth."""
        return replace(super().resolved_config(config, plan), depth=plan.mesh.size("depth"))


@dataclass(frozen=True)
class Tensor3D(GridStrategy):
    """A cube."""

    kind: ClassVar[str] = "3d"
    layout_name: ClassVar[str] = "3d"
    reads: ClassVar[tuple[str, ...]] = ("overlap", "save_gathered")
    source: ClassVar[str] = "Agarwal et al. 1995; Bian et al. 2021"
    explanation: ClassVar[str] = (
        "Ranks form a cube. Each operand is cut over all three axes; a product gathers the activation along one, the "
        "weight along another, and scatters the partial sums along the third."
    )

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """The cube, and the same gathering again in backward."""
        side = axes.cube_root(tp)
        name = f"3d {side}x{side}x{side}" if side**3 == tp else "3d"
        lean = TensorStrategyConfig(cls.kind, save_gathered=False)
        return [LayoutChoice(name, TensorStrategyConfig(cls.kind)), LayoutChoice(f"{name} lean", lean, name)]
