"""Put a one-device network on the ranks of a grid: cut its parameters, replace its role layers and loss. On meta."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.layout import Layout
from parallelrun.mesh import Mesh
from parallelrun.model_spec import LayerSpec
from parallelrun.models import layers as single_device
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan
from parallelrun.product import ActivationLayout, Product

from ..common.sharding import has_vocab_head, replace_module, shard_parameters
from . import layers, matmul
from .layers import BoundProduct, GridLoss, LayoutTracker, slice_of
from .norm import GridNorm
from .products import activation_layout, head, plan_boundary, product_of


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    if plan.mesh.size("tp") == 1:
        return
    shard_parameters(network, plan, mesh)
    specs, boundary = {layer.name: layer for layer in plan.spec.layers()}, plan_boundary(plan)
    tracker = LayoutTracker(boundary, mesh)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, single_device.AttentionProduct):  # it has no parameters: the spec does not list it
            replace_module(network, name, layers.GridAttentionProduct(layer, tracker))
        elif isinstance(layer, single_device.RoleLayer):
            replace_module(network, name, _replacement(layer, specs[name], tracker, plan, mesh))
    for name in network.block_names:
        network.block(name).register_forward_pre_hook(tracker.restart)
    if plan.spec.kind == "features" and plan.spec.blocks[0].name in network.block_names:
        _slice_input(network.block(plan.spec.blocks[0].name), boundary, mesh)
    if isinstance(network.loss, single_device.TokenLoss) and has_vocab_head(plan):
        network.loss = _loss(network.loss, plan, mesh)


def _replacement(
    layer: single_device.RoleLayer, spec: LayerSpec, tracker: LayoutTracker, plan: Plan, mesh: Mesh
) -> nn.Module:
    """The layer's form on this rank; the layer itself where it works the same on a part (positions)."""
    product = product_of(spec, plan)
    if product is not None:
        return _multiplying(layer, product, tracker, plan, mesh)
    if isinstance(layer, single_device.HiddenNorm):
        (axis,) = activation_layout(spec, plan).features
        group = mesh.group(axis)
        return GridNorm(layer, group) if group.size > 1 else layer
    return layers.GridDropout(layer, tracker) if isinstance(layer, single_device.HashDropout) else layer


def _multiplying(
    layer: single_device.RoleLayer, product: Product, tracker: LayoutTracker, plan: Plan, mesh: Mesh
) -> nn.Module:
    vocab = layer.vocab if isinstance(layer, (single_device.VocabHead, single_device.TokenEmbedding)) else None
    multiply = BoundProduct(product, mesh, matmul.matmul_options(plan), tracker, vocab)
    if isinstance(layer, single_device.TokenEmbedding):
        return layers.GridTokenEmbedding(layer, multiply, slice_of(product.x.rows, mesh))
    if isinstance(layer, single_device.ColumnLinear):
        return layers.GridColumnLinear(layer, multiply)
    if isinstance(layer, single_device.VocabHead):
        return layers.GridVocabHead(layer, multiply)
    assert isinstance(layer, (single_device.RowLinear, single_device.UnsplitLinear)), f"{layer.layer_role} multiplies"
    return layers.GridRowLinear(layer, multiply)


def _loss(loss: single_device.TokenLoss, plan: Plan, mesh: Mesh) -> GridLoss:
    """Of logits that are split as the head gives them."""
    logits, vocab = head(plan.tensor.kind, plan_boundary(plan)).y, plan.spec.vocab
    (axis,) = logits.features
    ((start, _),) = Layout((logits.features,)).ranges((vocab,), plan.mesh.sizes, mesh.coordinate)
    return GridLoss(loss.label_smoothing, mesh.group(axis), start, vocab, slice_of(logits.rows, mesh))


def _slice_input(block: nn.Module, layout: ActivationLayout, mesh: Mesh) -> None:
    """A model on features reads the microbatch whole; its first block gets this rank's samples and features of it."""
    rows, features = slice_of(layout.rows, mesh), slice_of(layout.features, mesh)

    def cut(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (features.of(rows.of(inputs[0]), -1), *inputs[1:])

    block.register_forward_pre_hook(cut)
