"""Planted bugs of the grid tensor strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.planner.model.product import Move, Product


def _partial_without(*axes: str, role: str = "") -> None:
    """Gradients of parameters of a role (any: empty) are not summed over those axes."""
    from parallelrun.strategies.tensor.grid.plan import GridStrategy

    right = GridStrategy.layout

    def wrong(self: GridStrategy, parameter: ParameterSpec, plan: Plan) -> Layout:
        layout = right(self, parameter, plan)
        if role and parameter.layer_role != role:
            return layout
        return Layout(layout.dims, tuple(axis for axis in layout.partial if axis not in axes))

    GridStrategy.layout = wrong


def depth_not_summed() -> None:
    """Colossal-AI's 2.5D: every depth slice keeps the gradient of its own samples."""
    _partial_without("depth")


def rows_of_norms_not_summed() -> None:
    """A norm's gradient is that of the samples of one row of the grid."""
    _partial_without("row", role="norm")


def columns_of_head_norms_not_summed() -> None:
    """The gradient of a norm of heads is that of the heads of one column of the grid."""
    _partial_without("col", role="per_head")


def positions_not_summed() -> None:
    _partial_without("row", role="position_embedding")


def rows_of_experts_not_summed() -> None:
    """An expert's gradient is that of the samples of one row of the grid."""
    _partial_without("row", role="expert")


def columns_of_routers_not_summed() -> None:
    """A router's gradient is that of one column's parts of the experts, or of its slices of sequences."""
    _partial_without("col", role="router")


def columns_of_latent_norms_not_summed() -> None:
    """The gradient of a norm of latents is that of the heads of one column of the grid."""
    _partial_without("col", role="norm")


def columns_of_latent_weights_not_summed() -> None:
    """The gradient of a weight that gives latents is that of the heads of one column of the grid."""
    from parallelrun.strategies.tensor.grid import buffers

    right = buffers.WeightPacking.start_scatter

    def wrong(self: buffers.WeightPacking, buffer: torch.Tensor) -> Any:
        if len(self.groups) < 2:
            return right(self, buffer)
        columns = self.groups[-1]
        own = buffer.view(columns.size, -1, buffer.size(-1))[columns.index]
        return right(replace(self, groups=self.groups[:-1]), own)

    buffers.WeightPacking.start_scatter = wrong


def routers_of_the_first_samples() -> None:
    """Every row of the grid draws the jitter of the first row's samples."""
    from parallelrun.models.moe.router import Router

    right = Router._sample_ids

    def wrong(self: Router, batch: int) -> torch.Tensor:
        self.sample_part = (0, self.sample_part[1])
        return right(self, batch)

    Router._sample_ids = wrong


def auxiliary_loss_divided_by_all_of_tp() -> None:
    """Each row of the grid counts the auxiliary loss of its samples as if all rows computed the same."""
    Plan.expert_tp = property(lambda self: self.mesh.size("tp"))


def load_of_the_first_row() -> None:
    """Selection biases follow the load of the samples of one row of the grid."""
    from parallelrun.training.loop import router_step

    right = router_step.RoutingUpdater.__init__

    def wrong(self: router_step.RoutingUpdater, *arguments: Any) -> None:
        right(self, *arguments)
        self._counts = self._mesh.coordinate["tp"] == 0

    router_step.RoutingUpdater.__init__ = wrong


def slices_exchanged_once() -> None:
    """What comes back from experts is sent, and its gradient is not."""
    from parallelrun.models import exchange

    def wrong(ctx: Any, *grads: torch.Tensor) -> Any:
        group, _, split, joined = ctx.reverse
        size = grads[0].size(split) // group.size
        return grads[0].narrow(split, 0, size).repeat_interleave(group.size, joined), *(None,) * 4

    exchange._Exchange.backward = staticmethod(wrong)


def wrong_scatter_axis() -> None:
    """3D: partial sums are summed over the axis that splits the samples."""
    from parallelrun.strategies.tensor.grid.plan import GridStrategy

    right = GridStrategy.product_of

    def wrong(self: GridStrategy, layer: Any, plan: Plan) -> Product | None:
        product = right(self, layer, plan)
        if product is None or product.form != "3d" or layer.layer_role == "head":
            return product
        assert product.scatter_y is not None
        return replace(product, scatter_y=Move("rows", product.weight.dims[0][1]))

    GridStrategy.product_of = wrong


def norm_of_own_features() -> None:
    """Each rank's mean and variance are those of its own features."""
    from parallelrun.strategies.tensor.common import norm

    norm._merge = lambda own, count, group: (own[0], own[1] / count)


def norm_gradient_of_own_features() -> None:
    """The forward pass is right; backward subtracts the means of the rank's own features."""
    from parallelrun.distributed import comm

    right = comm.all_reduce

    def wrong(tensor: torch.Tensor, group: Any, label: str, **options: Any) -> Any:
        return tensor.mul_(group.size) if label == "norm" else right(tensor, group, label, **options)

    comm.all_reduce = wrong


def loss_of_the_first_row_counted() -> None:
    """Only tensor coordinate 0 counts its loss, as where every rank has the loss of all samples."""
    from parallelrun.strategies.tensor.grid.plan import GridStrategy

    GridStrategy.loss_axes = lambda self, plan: ()


def loss_of_every_column_counted() -> None:
    """All ranks count: each loss as often as the vocabulary has parts."""
    from parallelrun.training.loop.build import Training

    Training.counts_loss = True


def _part(name: str, wrong: Any) -> None:
    from parallelrun.strategies.tensor.grid import runtime

    right = getattr(runtime, name)
    setattr(runtime, name, lambda *arguments: wrong(right(*arguments)))


def targets_of_the_first_samples() -> None:
    """Every row of the grid reads the targets of the first row's samples."""

    def wrong(loss: Any) -> Any:
        loss.rows = replace(loss.rows, index=0)
        return loss

    _part("_loss", wrong)


def tokens_of_the_first_samples() -> None:
    """Every row of the grid embeds the first row's samples."""
    from parallelrun.strategies.tensor.grid import layers

    right = layers.GridTokenEmbedding.forward

    def wrong(self: layers.GridTokenEmbedding, tokens: torch.Tensor) -> torch.Tensor:
        own = layers.slice_of
        layers.slice_of = lambda axes, mesh: replace(own(axes, mesh), index=0)
        try:
            return right(self, tokens)
        finally:
            layers.slice_of = own

    layers.GridTokenEmbedding.forward = wrong


def masks_of_the_first_samples() -> None:
    """Every row of the grid drops what the first row drops."""
    from parallelrun.models import masked_layers

    right = masked_layers._HashMasked.sample_ids

    def wrong(self: masked_layers._HashMasked, num_samples: int) -> torch.Tensor:
        self.sample_part = (0, self.sample_part[1])
        return right(self, num_samples)

    masked_layers._HashMasked.sample_ids = wrong


def masks_of_the_first_heads() -> None:
    """Every column of the grid drops the probabilities of the first column's heads."""
    from parallelrun.models.masked_layers import AttentionProduct
    from parallelrun.strategies.tensor.grid import layers

    def wrong(self: layers.GridAttentionProduct, *heads: torch.Tensor) -> torch.Tensor:
        rows, _ = self.tracker.slices
        self.sample_part = (rows.index, rows.count)
        return AttentionProduct.forward(self, *heads)

    layers.GridAttentionProduct.forward = wrong


def inside_taken_for_outside() -> None:
    """What stands inside a pair is taken to lie as between blocks: the axes have changed roles there."""
    from parallelrun.strategies.tensor.grid import layers

    right = layers.LayoutTracker.slices.fget

    def wrong(self: layers.LayoutTracker) -> Any:
        self.restart()
        return right(self)

    layers.LayoutTracker.slices = property(wrong)


def padding_taken_for_tokens() -> None:
    """Rows of the table that pad a part are multiplied too: logits of tokens that do not exist."""
    from parallelrun.strategies.tensor.grid import runtime

    right = runtime._loss

    def wrong(loss: Any, plan: Plan, mesh: Any) -> Any:
        found = right(loss, plan, mesh)
        forward = found.forward

        def padded(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            missing = -(-plan.spec.vocab // found.group.size) - logits.size(-1)
            return forward(torch.nn.functional.pad(logits, (0, missing)), targets)

        found.forward = padded
        return found

    runtime._loss = wrong


def vocabulary_cut_by_rows_first() -> None:
    """Each rank takes its logits for those of the tokens that its own part of the table holds."""
    from parallelrun.strategies.tensor.grid import runtime

    right = runtime._loss

    def wrong(loss: Any, plan: Plan, mesh: Any) -> Any:
        found = right(loss, plan, mesh)
        found.start = mesh.coordinate["row"] * plan.spec.vocab // 2
        return found

    runtime._loss = wrong
