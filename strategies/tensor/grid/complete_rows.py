"""Layers of a grid that read complete rows: routers and experts, and norms of the latents of latent attention.

Features are gathered over the axis that splits them, so that its ranks have the same rows, as the ranks of tp have
without a grid: they split the inside of every expert, and their partial results are scattered along features. The other
axes keep their samples: each rank routes its own, and the gradients of experts and router are summed over these axes.

Where ep spans tp, experts are complete, and an all-to-all makes slices of sequences of slices of features, and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.models.moe.spec import inside_dim
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec, ParameterSpec
from parallelrun.planner.model.product import ActivationLayout, Product
from parallelrun.planner.model.product.forms import gathered_features, scattered_features

from ..common import expert_memory
from ..common.activation_memory import as_computed
from ..common.product_strategy import ProductStrategy
from ..common.traffic import AXIS, OTHER, overlaps
from .forms import boundary_layout

MOVES = {"expert_input": gathered_features, "expert_output": scattered_features}  # by layer role


@dataclass(frozen=True)
class CompleteRows(ProductStrategy):
    """Brings complete rows to layers, and their results back into the grid's layout."""

    def tensor_sizes(self, plan: Plan) -> dict[str, int]:
        """Return the degree of every tensor axis, in mesh order."""
        return {axis: plan.mesh.size(axis) for axis in plan.mesh.mesh_dims_of(AXIS)}

    def boundary(self, plan: Plan) -> ActivationLayout:
        """Return the layout of activations between blocks."""
        return boundary_layout(self.tensor_sizes(plan))

    def token_axis(self, plan: Plan) -> str:
        """The axis that splits features between blocks."""
        return self.boundary(plan).features[-1]

    @property
    def slices_tokens(self) -> bool:
        return True

    def saves_gathered(self, layer: LayerSpec, plan: Plan) -> bool:
        """The router reads what was gathered, and keeps it."""
        return self.save_gathered or layer.layer_role in MOVES

    def recomputes_last_call(self, block: BlockSpec, forward: list[Collective], plan: Plan) -> bool:
        """All but a last scatter in a node of its own, which is behind the last tensor that backward needs."""
        last = next(x for x in reversed(as_computed(block.layers)) if x.layer_role != "dropout" or plan.dropout > 0)
        if last.layer_role in MOVES:
            return False
        scatters = last.layer_role == "row_parallel" and any(t.operand == "y" for t in self.transfers_of(last, plan))
        return not scatters or overlaps(plan) or bool(block.saves_after_sum)

    def rows_product(self, layer: LayerSpec, plan: Plan) -> Product | None:
        """How features of complete rows are gathered or scattered; None: the layer does neither."""
        make = MOVES.get(layer.layer_role)
        return make(self.boundary(plan)) if make and not plan.ep_spans_tp else None

    def rows_layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """Return the layout of a weight of experts, whose inside is split unless ep spans tp, or of one that multiplies
        complete rows or is added to them: each rank has its gradient by some samples, and by parts of experts, or by
        some of their tokens, or by its heads."""
        boundary, num_dims = self.boundary(plan), len(parameter.shape)
        if parameter.layer_role != "expert":
            return Layout(((),) * num_dims, () if parameter.frozen else (*boundary.rows, *boundary.features))
        if plan.ep_spans_tp:
            return Layout.replicated(num_dims)
        split = inside_dim(parameter)
        if split < 0:
            return Layout(((),) * num_dims, (*boundary.rows, *boundary.features))
        return Layout(tuple(boundary.features if dim == split else () for dim in range(num_dims)), boundary.rows)

    def _layer_backward(self, layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """The gradient of complete rows is no slice of the one that waits, and arrives in a buffer besides."""
        *passes, last = super()._layer_backward(layer, block, plan)
        rows = expert_memory.moved_bytes(plan)
        if layer.layer_role == "expert":
            last = replace(last, arriving=last.arriving + rows)
        elif layer.layer_role in MOVES:
            last = replace(last, giving=last.giving + rows, scratch=last.scratch + rows)
        return (*passes, last)

    def _of_layer(self, layer: LayerSpec, plan: Plan) -> tuple[list[Collective], list[Collective]]:
        if layer.layer_role not in MOVES or not plan.ep_spans_tp or plan.token_ranks == 1:
            return super()._of_layer(layer, plan)
        part = prod(self.boundary(plan).local(plan.num_rows, plan.spec.hidden, plan.mesh.sizes))
        sent = [Collective(self.token_axis(plan), "all_to_all", OTHER, 1, part * BYTES[plan.precision.compute])]
        return sent, sent if self.has_input_gradient(layer, plan) else []
