"""What the grid tensor strategies will do: axes, forms, layouts, and what a plan may ask of them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import BlockSpec, LayerSpec, ParameterSpec
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Plan
from parallelrun.plan.tensor_strategy import LayerBackward, LayoutChoice, MeshDims
from parallelrun.product import ActivationLayout, Product
from parallelrun.wording import divisors

from ..common import one_axis_memory
from ..common.activation_memory import loss_backward
from ..common.product_strategy import AXIS, ProductStrategy, Traffic, overlaps
from . import checks, choose, memory, products, shape
from .keys import Grid2DConfig, Grid25DConfig, GridConfig

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class GridStrategy(ProductStrategy):
    """Samples, features and weights are split over several mesh dims; subclasses say over how many."""

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """The grid, layer roles, heads, widths and samples must divide; sequence and vocabulary need not."""
        return checks.check(request)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        """The form of every pair of layers, by what it moves."""
        asked = GridConfig.of(request.config)
        forms = choose.choose(request.spec, checks.choice(request))
        return cls(overlap=asked.overlap, forms=forms, save_gathered=asked.save_gathered)

    @classmethod
    def mesh_dims(cls, request: Request) -> MeshDims:
        """row x col, depth x row x col, or x x y x z; `tp` is made of them."""
        sizes = shape.arranged(request)
        assert sizes, "checked before"
        return tuple(sizes.items()), ((AXIS, tuple(sizes)),)

    @classmethod
    def vocab_degrees(cls, request: Request) -> tuple[int, ...]:
        """Those of the rows of the head's weight; none where tp makes no grid."""
        sizes = shape.arranged(request)
        if not sizes:
            return ()
        head = products.head(cls.kind, choose.boundary_layout(sizes))
        return tuple(sizes[axis] for axis in head.weight.dims[0])

    @classmethod
    def micro_batch_divisor(cls, request: Request) -> int:
        """Whole samples are split over the rows axes."""
        return checks.sample_parts(request)

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        """Grid and depth, where they were not given."""
        return shape.filled(request)

    @classmethod
    def asked_form(cls, config: Config) -> str:
        return GridConfig.of(config).form

    def label(self, plan: Plan) -> str:
        """`2d 2x3`."""
        return f"{self.kind} {'x'.join(str(degree) for degree in products.tensor_sizes(plan).values())}"

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """See `products`."""
        return products.parameter_layout(parameter, plan)

    def product_of(self, layer: LayerSpec, plan: Plan) -> Product | None:
        """See `products`."""
        return products.product_of(layer, plan)

    def activation_layout(self, layer: LayerSpec | None, plan: Plan) -> ActivationLayout:
        """See `products`."""
        return products.activation_layout(layer, plan) if layer else products.plan_boundary(plan)

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """This rank's samples and features."""
        *middle, features = plan.spec.boundary_shape
        samples, width = products.plan_boundary(plan).local(plan.batch.micro_batch, features, plan.mesh.sizes)
        return (samples, *middle, width)

    def loss_axes(self, plan: Plan) -> tuple[str, ...]:
        """The axes over which samples are split where the logits are."""
        product = self.head_product(plan)
        rows = product.y.rows if product else products.plan_boundary(plan).rows
        return tuple(axis for axis in rows if plan.mesh.size(axis) > 1)

    def recomputes_last_call(self, block: BlockSpec, forward: list[Traffic], plan: Plan) -> bool:
        """All but a last scatter in a node of its own, which is behind the last tensor that backward needs."""
        last = next(x for x in reversed(block.layers) if x.layer_role != "dropout" or plan.dropout > 0)
        scatters = last.layer_role == "row_parallel" and any(t.operand == "y" for t in self.transfers_of(last, plan))
        return not scatters or overlaps(plan)

    def layer_backward(self, layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """See `memory`; at tp=1 the layers are those of one device."""
        of_layer = memory.layer_backward if plan.mesh.size(AXIS) > 1 else one_axis_memory.layer_backward
        return of_layer(layer, block, plan)

    def loss_backward(self, plan: Plan) -> LayerBackward:
        """Of the local logits."""
        return loss_backward(plan, self.head_product(plan))


@dataclass(frozen=True)
class Tensor2D(GridStrategy):
    """A grid of rows and columns."""

    kind: ClassVar[str] = "2d"
    layout_name: ClassVar[str] = "2d"
    config_class = Grid2DConfig
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
        flat = Grid2DConfig(grid=f"{rows}x{tp // rows}" if rows > 1 and rows * rows != tp else None)
        return [
            LayoutChoice(name, flat),
            LayoutChoice(f"{name} lean", replace(flat, save_gathered=False), name),
            LayoutChoice(f"{name} summa", replace(flat, form="summa"), name),
        ]

    def resolved_config(self, config: Config, plan: Plan) -> Grid2DConfig:
        """With the grid."""
        return replace(Grid2DConfig.of(config), grid=f"{plan.mesh.size('row')}x{plan.mesh.size('col')}")


@dataclass(frozen=True)
class Tensor25D(Tensor2D):
    """Several grids, each with a copy of the weights and its own samples."""

    kind: ClassVar[str] = "2.5d"
    layout_name: ClassVar[str] = "2.5d"
    config_class = Grid25DConfig
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
            LayoutChoice(f"2.5d {depth}x{side}x{side}", Grid25DConfig(depth=depth))
            for depth in divisors(tp)
            if depth > 1 and (side := isqrt(tp // depth)) >= depth and side * side == tp // depth
        ]
        return found or [LayoutChoice("2.5d", Grid25DConfig(depth=2))]

    def resolved_config(self, config: Config, plan: Plan) -> Grid25DConfig:
        """With grid and depth."""
        config = replace(config, strategy=replace(config.strategy, tensor=super().resolved_config(config, plan)))
        return replace(Grid25DConfig.of(config), depth=plan.mesh.size("depth"))


@dataclass(frozen=True)
class Tensor3D(GridStrategy):
    """A cube."""

    kind: ClassVar[str] = "3d"
    layout_name: ClassVar[str] = "3d"
    config_class = GridConfig
    source: ClassVar[str] = "Agarwal et al. 1995; Bian et al. 2021"
    explanation: ClassVar[str] = (
        "Ranks form a cube. Each operand is cut over all three axes; a product gathers the activation along one, the "
        "weight along another, and scatters the partial sums along the third."
    )

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """The cube, and the same gathering again in backward."""
        side = shape.cube_root(tp)
        name = f"3d {side}x{side}x{side}" if side**3 == tp else "3d"
        lean = GridConfig(save_gathered=False)
        return [LayoutChoice(name, GridConfig()), LayoutChoice(f"{name} lean", lean, name)]
