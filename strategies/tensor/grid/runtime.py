"""Put a one-device network on the ranks of a grid: cut its parameters, swap its role layers and its loss. On meta."""

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
from . import layers, layouts, matmul
from .axes import boundary_layout_of
from .loss import GridLoss
from .norm import GridNorm
from .parts import slice_of
from .products import activation_layout, head, product_of


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    if plan.mesh.size("tp") == 1:
        return
    shard_parameters(network, plan, mesh, layouts.layout)
    specs = {layer.name: layer for layer in plan.spec.layers()}
    tracker = layers.LayoutTracker(boundary_layout_of(plan), mesh)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, single_device.AttentionProduct):  # it has no parameters: the spec does not list it
            replace_module(network, name, layers.GridAttentionProduct(layer, tracker))
        elif isinstance(layer, single_device.RoleLayer):
            replace_module(network, name, _replacement(layer, specs[name], tracker, plan, mesh))
    for name in network.block_names:
        network.block(name).register_forward_pre_hook(tracker.restart)
    if plan.spec.kind == "features" and plan.spec.blocks[0].name in network.block_names:
        _cut_input(network.block(plan.spec.blocks[0].name), boundary_layout_of(plan), mesh)
    if isinstance(network.loss, single_device.TokenLoss) and has_vocab_head(plan):
        network.loss = _loss(network.loss, plan, mesh)


def _replacement(
    layer: single_device.RoleLayer, spec: LayerSpec, tracker: layers.LayoutTracker, plan: Plan, mesh: Mesh
) -> nn.Module:
    """The layer's form on this rank; itself where it works the same on a part (positions)."""
    product = product_of(spec, plan)
    if product is not None:
        return _multiplying(layer, product, tracker, plan, mesh)
    if isinstance(layer, single_device.HiddenNorm):
        (axis,) = activation_layout(spec, plan).features
        group = mesh.group(axis)
        return GridNorm(layer, group) if group.size > 1 else layer
    if isinstance(layer, single_device.HashDropout):
        return layers.GridDropout(layer, tracker)
    return layer


def _multiplying(
    layer: single_device.RoleLayer, product: Product, tracker: layers.LayoutTracker, plan: Plan, mesh: Mesh
) -> nn.Module:
    options = matmul.matmul_options(plan)
    if isinstance(layer, single_device.ColumnLinear):
        return layers.GridColumnLinear(layer, layers.BoundProduct(product, mesh, options, tracker))
    if isinstance(layer, (single_device.RowLinear, single_device.UnsplitLinear)):
        return layers.GridRowLinear(layer, layers.BoundProduct(product, mesh, options, tracker))
    assert isinstance(layer, (single_device.VocabHead, single_device.TokenEmbedding)), (
        f"{layer.layer_role} does not multiply"
    )
    multiply = layers.BoundProduct(product, mesh, options, tracker, layer.vocab)
    if isinstance(layer, single_device.VocabHead):
        return layers.GridVocabHead(layer, multiply)
    return layers.GridTokenEmbedding(layer, multiply, slice_of(product.x.rows, mesh))


def _loss(loss: single_device.TokenLoss, plan: Plan, mesh: Mesh) -> GridLoss:
    """Of logits that lie as the head gives them."""
    logits = head(plan.tensor.kind, boundary_layout_of(plan)).y
    (axis,) = logits.features
    vocab = plan.spec.vocab
    ((start, _),) = Layout((logits.features,)).ranges((vocab,), plan.mesh.sizes, mesh.coordinate)
    return GridLoss(loss.label_smoothing, mesh.group(axis), start, vocab, slice_of(logits.rows, mesh))


def _cut_input(block: nn.Module, lies: ActivationLayout, mesh: Mesh) -> None:
    """A model on features reads the microbatch whole; its first block gets this rank's samples and features of it."""
    rows, features = slice_of(lies.rows, mesh), slice_of(lies.features, mesh)

    def cut(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (features.of(rows.of(inputs[0]), -1), *inputs[1:])

    block.register_forward_pre_hook(cut)
