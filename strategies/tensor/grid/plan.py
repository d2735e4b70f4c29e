"""Prediction of the grid tensor strategies: axes, forms, layouts and checks.

The runtime and the predictions read the same products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.base.wording import divisors
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.contract.request import Request
from parallelrun.planner.contract.tensor_strategy import LayoutChoice, MeshDims
from parallelrun.planner.model.model_spec import LayerSpec, Pair, ParameterSpec
from parallelrun.planner.model.product import ActivationLayout, Move, Product
from parallelrun.planner.model.product import forms as products

from ..common.activation_memory import local_numel
from ..common.keys import Grid2DConfig, Grid25DConfig, GridConfig
from ..common.traffic import AXIS, overlaps
from .checks import GridRequest
from .complete_rows import CompleteRows
from .forms import boundary_layout, key_of, latent_product, make_product, pair_products
from .shape import KEYS, cube_root


@dataclass(frozen=True)
class GridStrategy(CompleteRows):
    """Samples, features and weights are split over several mesh dims; subclasses say over how many.

    only_form: the form of all complete pairs and of the head, where there is no choice.
    """

    only_form: ClassVar[str | None] = None

    @classmethod
    def _of(cls, request: Request) -> GridRequest:
        return GridRequest(request, cls.layout_name, cls.only_form or cls.asked_form(request.config))

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """The grid, layer roles, heads, widths and samples must divide; sequence and vocabulary need not."""
        return cls._of(request).check()

    @classmethod
    def is_legal(cls, request: Request) -> bool:
        return cls._of(request).is_legal()

    @classmethod
    def resolve(cls, request: Request) -> GridStrategy:
        """The form of every pair of layers, by what it moves."""
        keys = GridConfig.of(request.config)
        return cls(overlap=keys.overlap, forms=cls._of(request).choice.choose(), save_gathered=keys.save_gathered)

    @classmethod
    def mesh_dims(cls, request: Request) -> MeshDims:
        """row x col, depth x row x col, or x x y x z; `tp` is made of them."""
        sizes = cls._of(request).sizes
        assert sizes, "checked before"
        return tuple(sizes.items()), ((AXIS, tuple(sizes)),)

    @classmethod
    def vocab_degrees(cls, request: Request) -> tuple[int, ...]:
        """Those of the rows of the head's weight; none where tp makes no grid."""
        sizes = cls._of(request).sizes
        return tuple(sizes[axis] for axis in cls.head(boundary_layout(sizes)).weight.dims[0]) if sizes else ()

    @classmethod
    def micro_batch_divisor(cls, request: Request) -> int:
        """Whole samples are split over the rows axes."""
        return cls._of(request).sample_parts

    @classmethod
    def head_parts(cls, request: Request) -> int:
        """As the form of the layers around attention splits their features."""
        return cls._of(request).choice.head_parts() if cls._of(request).sizes else request.tp

    @classmethod
    def token_ranks(cls, request: Request) -> int:
        """Those of the axis that splits features."""
        return next(reversed((cls._of(request).sizes or {"": request.tp}).values()))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        """Grid and depth, where they were not given."""
        tensor, sizes = GridConfig.of(request.config), cls._of(request).sizes
        if request.tp == 1 or "grid" not in KEYS[cls.layout_name] or not sizes:
            return ()
        values, why = [] if tensor.grid else [f"grid={sizes['row']}x{sizes['col']}"], f"tp {request.tp}"
        if "depth" in KEYS[cls.layout_name] and tensor.depth is None:
            values.append(f"depth={sizes.get('depth', 1)}")
            why += ", the largest legal depth"
        return (f"{' '.join(values)} (filled: {why})",) if values else ()

    @classmethod
    def head(cls, boundary: ActivationLayout) -> Product:
        """Return the product of hidden states -> logits, split over the vocabulary."""
        return make_product(cls.only_form or "stationary_y", boundary)

    @classmethod
    def table(cls, boundary: ActivationLayout) -> Product:
        """Return the lookup of token ids -> hidden states, from a table that is split as the head's weight."""
        head = cls.head(boundary)
        (axis,) = head.gathered_weight.dims[0]
        scatter = Move("rows" if axis in boundary.rows else "features", axis)
        return products.lookup(boundary, head.weight, head.gather_w, scatter)

    @classmethod
    def asked_form(cls, config: Config) -> str:
        return GridConfig.of(config).form

    def resolved_config(self, config: Config, plan: Plan) -> GridConfig:
        """Return the keys with the grid and the depth of the plan."""
        mesh, section = plan.mesh, GridConfig.of(config)
        values: dict[str, Any] = {"grid": f"{mesh.size('row')}x{mesh.size('col')}", "depth": mesh.size("depth")}
        return replace(section, **{key: values[key] for key in KEYS[self.layout_name]})

    def label(self, plan: Plan) -> str:
        """`2d 2x3`."""
        return f"{self.layout_name} {'x'.join(str(degree) for degree in self.tensor_sizes(plan).values())}"

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """A weight as its product holds it, a bias as Y's features, norms and positions as the features between blocks.

        Partial over the axes whose ranks see other samples: the rows of what the parameter is added to or multiplied
        with, and 2.5d's depth; of a norm of heads also over those whose ranks have other heads. A parameter without a
        layer role (only at tp=1) is replicated.
        """
        layer, num_dims = plan.spec.layer_of[parameter.name], len(parameter.shape)
        product = self.product_of(layer, plan)
        if parameter.layer_role in ("expert", "router") or (num_dims == 1 and layer.name in plan.spec.latent_layers):
            layout = self.rows_layout(parameter, plan)
        elif product is not None:
            layout = product.weight_layout if num_dims == 2 else product.bias_layout
        elif parameter.layer_role in ("norm", "attention", "position_embedding"):
            split = self.activation_layout(layer, plan)
            layout = Layout((*((),) * (num_dims - 1), split.features), split.rows)
        elif parameter.layer_role == "per_head":
            split = self.activation_layout(layer, plan)
            layout = Layout(((),) * num_dims, (*split.rows, *split.features))
        else:
            layout = Layout.replicated(num_dims)
        return Layout(layout.dims, tuple(axis for axis in layout.partial if plan.mesh.size(axis) > 1))

    def product_of(self, layer: LayerSpec, plan: Plan) -> Product | None:
        """Return the product of a column, row, linear, head or embedding layer (a lookup), or what gathers or scatters
        complete rows; None for any other."""
        return once(plan.blocks_cache, ("product", layer.name), lambda: self._product_of(layer, plan))

    def _product_of(self, layer: LayerSpec, plan: Plan) -> Product | None:
        boundary = self.boundary(plan)
        if of_latent := latent_product(layer, plan.spec, boundary):
            return of_latent
        if layer.layer_role in ("column_parallel", "row_parallel"):
            columns, row = self._of_pair(plan.spec.pair_of[layer.name], plan)
            return columns if layer.layer_role == "column_parallel" else row
        if layer.layer_role == "linear":
            return products.stationary_y(boundary)
        make = {"head": self.head, "embedding": self.table}.get(layer.layer_role)
        return make(boundary) if make else self.rows_product(layer, plan)

    def _of_pair(self, pair: Pair, plan: Plan) -> tuple[Product, Product]:
        """(product of the column layers, of the row layer) in the forms that the plan has chosen."""
        return pair_products(dict(self.forms)[key_of(pair)], self.boundary(plan))

    def activation_layout(self, layer: LayerSpec | None, plan: Plan) -> ActivationLayout:
        """As its product reads it; of a position, norm, dropout or attention layer as inside its pair, else as between
        blocks."""
        product = self.product_of(layer, plan) if layer else None
        if product is not None:
            return product.x
        if layer and layer.name in plan.spec.latent_layers:
            return replace(self.boundary(plan), features=())
        pair = plan.spec.pair_of.get(layer.name) if layer else None
        return self._of_pair(pair, plan)[0].y if pair else self.boundary(plan)

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """This rank's samples, positions and features."""
        *middle, features = plan.spec.boundary_shape
        samples, width = self.boundary(plan).local(plan.batch.micro_batch, features, plan.mesh.sizes)
        return (samples, *([plan.seq] if plan.context else middle), width)

    def loss_axes(self, plan: Plan) -> tuple[str, ...]:
        """The axes over which samples are split where the logits are."""
        product = self.head_product(plan)
        rows = product.y.rows if product else self.boundary(plan).rows
        return tuple(axis for axis in rows if plan.mesh.size(axis) > 1)

    def fuses(self, plan: Plan) -> bool:
        return overlaps(plan)

    def moved_bytes(self, layer: LayerSpec, product: Product, plan: Plan) -> tuple[int, int]:
        """With the gradients of several outputs, which one node packs into one tensor before it gathers them."""
        moved, of_weights = super().moved_bytes(layer, product, plan)
        if sum(len(p.shape) == 2 for p in layer.parameters) < 2 or product.panels or not overlaps(plan):
            return moved, of_weights
        packed = prod(product.y.local(plan.num_rows, layer.out_features, plan.mesh.sizes))
        if not self.saves_gathered(layer, plan):  # and the weights, which are gathered again
            packed += sum(local_numel(parameter, plan) for parameter in layer.parameters)
        return moved + packed * BYTES[plan.precision.compute], of_weights

    def shared_bytes(self, layer: LayerSpec, product: Product, plan: Plan) -> int:
        """Where q, k and v are views of one buffer (scattered, or written by one node) and rotary positions make other
        tensors of q and k, v's view keeps all three."""
        scatters = product.scatter_y is not None and plan.mesh.size(product.scatter_y.axis) > 1
        if plan.mesh.size(AXIS) == 1 or product.panels or not (scatters or overlaps(plan)):
            return 0
        if plan.spec.learns_positions or plan.spec.normalises_heads:  # a norm of heads keeps what it reads
            return 0
        weights = [parameter for parameter in layer.parameters if len(parameter.shape) == 2]
        rotated = sum(weight.shape[0] for weight in weights[:-1])
        rows, features = product.y.local(plan.num_rows, rotated, plan.mesh.sizes)
        return rows * features * BYTES[plan.precision.compute]


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
            LayoutChoice(f"{name} lean", replace(flat, save_gathered=False), name, searched=False),
            LayoutChoice(f"{name} summa", replace(flat, form="summa"), name, searched=False),
        ]


@dataclass(frozen=True)
class Tensor25D(Tensor2D):
    """Several grids, each with a copy of the weights and its own samples."""

    kind: ClassVar[str] = "2.5d"
    layout_name: ClassVar[str] = "2.5d"
    config_class = Grid25DConfig
    source: ClassVar[str] = "Wang et al. 2021 (Tesseract)"
    explanation: ClassVar[str] = (
        "Several grids share the samples, each with a copy of the weights: as 2D inside a grid, and once a step the "
        "gradients of the weights are summed over the depth."
    )

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """Square grids at every legal depth."""
        configs = [
            LayoutChoice(f"2.5d {depth}x{side}x{side}", Grid25DConfig(depth=depth))
            for depth in divisors(tp)
            if depth > 1 and (side := isqrt(tp // depth)) >= depth and side * side == tp // depth
        ]
        return configs or [LayoutChoice("2.5d", Grid25DConfig(depth=2))]


@dataclass(frozen=True)
class Tensor3D(GridStrategy):
    """A cube."""

    kind: ClassVar[str] = "3d"
    layout_name: ClassVar[str] = "3d"
    only_form: ClassVar[str | None] = "cube"
    config_class = GridConfig
    source: ClassVar[str] = "Agarwal et al. 1995; Bian et al. 2021"
    explanation: ClassVar[str] = (
        "Ranks form a cube. Each operand is cut over all three axes; a product gathers the activation along one, the "
        "weight along another, and scatters the partial sums along the third."
    )

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """The cube, and the same gathering again in backward."""
        side = cube_root(tp)
        name = f"3d {side}x{side}x{side}" if side**3 == tp else "3d"
        lean = GridConfig(save_gathered=False)
        return [LayoutChoice(name, GridConfig()), LayoutChoice(f"{name} lean", lean, name, searched=False)]
