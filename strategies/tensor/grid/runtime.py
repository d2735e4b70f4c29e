"""Put a one-device network on the ranks of a grid: cut its parameters, replace its role layers and loss. On meta."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.distributed.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.moe.router import Router
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.product import ActivationLayout

from ..common.cross_entropy import VocabParallelLoss
from ..common.norm import SplitNorm
from ..common.sharding import first_row, has_vocab_head, shard_parameters, slice_of
from .layers import EXCHANGING, MULTIPLYING, TRACKING, LayoutTracker
from .matmul import matmul_options
from .plan import GridStrategy


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1. Positions and the MLP's activation work on a
    part as they do on the whole.
    """
    if plan.mesh.size("tp") == 1:
        return
    strategy = plan.tensor
    assert isinstance(strategy, GridStrategy)
    shard_parameters(network, plan, mesh)
    specs, boundary, options = {x.name: x for x in plan.spec.layers()}, strategy.boundary(plan), matmul_options(plan)
    tracker = LayoutTracker(boundary, mesh)
    for name, layer in list(network.named_modules()):
        if type(layer) in TRACKING:  # attention has no parameters: the spec does not list it
            network.set_submodule(name, TRACKING[type(layer)](layer, tracker=tracker))
        elif plan.ep_spans_tp and type(layer) in EXCHANGING:
            if plan.token_ranks > 1:
                group = mesh.group(strategy.token_axis(plan))
                network.set_submodule(name, EXCHANGING[type(layer)](layer, group=group))
        elif isinstance(layer, Router):
            rows = slice_of(boundary.rows, mesh)
            layer.sample_part = rows.index, rows.count
        elif type(layer) in MULTIPLYING:
            product = strategy.product_of(specs[name], plan)
            assert product is not None, f"{name} multiplies"
            bound = MULTIPLYING[type(layer)](layer, product=product, mesh=mesh, options=options, tracker=tracker)
            network.set_submodule(name, bound)
        elif isinstance(layer, single_device.HiddenNorm) and layer.layer_role == "norm":
            for axis in strategy.activation_layout(specs[name], plan).features:
                if mesh.shape.size(axis) > 1:
                    network.set_submodule(name, SplitNorm(layer, group=mesh.group(axis)))
    for name in network.block_names:
        network.block(name).register_forward_pre_hook(tracker.restart)
    if plan.spec.kind == "features" and plan.spec.blocks[0].name in network.block_names:
        _slice_input(network.block(plan.spec.blocks[0].name), boundary, mesh)
    if isinstance(network.loss, single_device.TokenLoss) and has_vocab_head(plan):
        network.loss = _loss(network.loss, plan, mesh)


def _loss(loss: single_device.TokenLoss, plan: Plan, mesh: Mesh) -> VocabParallelLoss:
    """Of logits that are split as the head gives them."""
    assert isinstance(plan.tensor, GridStrategy)
    logits, vocab = plan.tensor.head(plan.tensor.boundary(plan)).y, plan.spec.vocab
    (axis,) = logits.features
    start = first_row(vocab, logits.features, mesh)
    return VocabParallelLoss(loss, mesh.group(axis), start, vocab, slice_of(logits.rows, mesh))


def _slice_input(block: nn.Module, layout: ActivationLayout, mesh: Mesh) -> None:
    """A model on features reads the microbatch whole; its first block gets this rank's samples and features of it."""
    rows, features = slice_of(layout.rows, mesh), slice_of(layout.features, mesh)

    def cut(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (features.of(rows.of(inputs[0]), -1), *inputs[1:])

    block.register_forward_pre_hook(cut)
