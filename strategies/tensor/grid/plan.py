"""What the grid tensor strategies (2d, 2.5d, 3d) will do: checks, axes, forms, layouts. Torch-free.

Sources: SUMMA as in Optimus (Xu et al. 2021), Tesseract (Wang et al. 2021), 3D (Bian et al. 2021, after Agarwal et al.
1995); forms chosen per layer as in MeshSlice and AxoNN. See `parallelrun.product` and docs/tensor_layouts.md.
"""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import BlockSpec, ParameterSpec
from parallelrun.plan.messages import Explanation
from parallelrun.plan.strategy import Pass, Request
from parallelrun.plan.structure import Collective, Equivalence, Plan, TensorWay

from .. import explaining
from . import axes, checks, choose, layouts, products, shapes, traffic

EXPLAINED = {
    "2d": (
        "Ranks form a grid of rows and columns, and every activation and weight is cut over both. A product gathers "
        "one operand along a row of the grid, the other along a column, or scatters the partial sums: for each pair of "
        "layers the plan takes what moves the fewest bytes (SUMMA broadcasts panels of both instead).",
        "van de Geijn and Watts 1997; Xu et al. 2021 (Optimus)",
    ),
    "2.5d": (
        "Several grids share the samples, each with a copy of the weights: as 2D inside a grid, and once a step the "
        "gradients of the weights are summed over the depth.",
        "Wang et al. 2021 (Tesseract)",
    ),
    "3d": (
        "Ranks form a cube. Each operand is cut over all three axes; a product gathers the activation along one, the "
        "weight along another, and scatters the partial sums along the third.",
        "Agarwal et al. 1995; Bian et al. 2021",
    ),
}


class Way:
    """The TensorWayPlan of kinds `2d`, `2.5d` and `3d`."""

    def check(self, request: Request) -> list[Problem]:
        """The grid, layer roles, heads, widths and samples must divide; sequence and vocabulary need not."""
        return checks.check(request)

    def sample_parts(self, request: Request) -> int:
        """A microbatch is cut by whole samples into as many parts as the rows axes make."""
        return checks.sample_parts(request)

    def mesh_dims(self, request: Request) -> axes.MeshDims:
        """row x col, depth x row x col, or x x y x z; `tp` is made of them."""
        tensor = request.config.strategy.tensor
        grid = None if tensor.kind == "3d" else axes.read_grid(tensor.grid)
        return axes.mesh_dims(tensor.kind, request.tp, grid, tensor.depth)

    def resolve(self, request: Request) -> TensorWay:
        """The form of every pair of layers, by what it moves."""
        tensor = request.config.strategy.tensor
        return TensorWay(
            kind=tensor.kind,
            overlap=tensor.overlap,
            forms=choose.choose(request.spec, checks.choice(request)),
            save_gathered=tensor.save_gathered,
        )

    def vocabulary_parts(self, request: Request) -> tuple[int, ...]:
        """Those of the rows of the head's weight; none where tp makes no grid."""
        sizes = shapes.arranged(request) or {}
        if not sizes:
            return ()
        head = products.head(request.config.strategy.tensor.kind, axes.between_blocks(sizes))
        return tuple(sizes[axis] for axis in head.weight.dims[0])

    def filled(self, request: Request) -> tuple[str, ...]:
        """Grid and depth, where they were not given."""
        return shapes.filled(request)

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """See `layouts`."""
        return layouts.layout(parameter, plan)

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """What passes between blocks for one microbatch: this rank's samples and features."""
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
        """Bytes one microbatch of `block` keeps for backward on a rank. See `memory`."""
        from . import memory

        return memory.saved_bytes(block, plan)

    def passes(self, block: BlockSpec, plan: Plan) -> tuple[Pass, ...]:
        """See `memory`."""
        from . import memory

        return memory.passes(block, plan)

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """Calls and payload of the forward and backward passes of all microbatches. See `traffic`."""
        return traffic.collectives(blocks, plan)

    def explain(self, plan: Plan) -> Explanation:
        """The collectives of every block, for `parallelrun explain`."""
        text, source = EXPLAINED[plan.tensor.kind]
        return explaining.explanation(plan, text, source, traffic.steps)

    def equivalence(self, plan: Plan) -> Equivalence:
        """The same function and the same gradients as on one device."""
        return Equivalence("exact")
