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

from ..placing import cut_parameters, put, splits_vocabulary
from . import layers, layouts, matmul
from .axes import outside
from .loss import GridLoss
from .norm import Norm
from .parts import part_of
from .products import head, lies, product_of


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    if plan.mesh.size("tp") == 1:
        return
    cut_parameters(network, plan, mesh, layouts.layout)
    specs = {layer.name: layer for layer in plan.spec.layers()}
    trail = layers.Trail(outside(plan), mesh)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, single_device.AttentionProduct):  # it has no parameters: the spec does not list it
            put(network, name, layers.AttentionProduct(layer, trail))
        elif isinstance(layer, single_device.RoleLayer):
            put(network, name, _replacement(layer, specs[name], trail, plan, mesh))
    for name in network.block_names:
        network.block(name).register_forward_pre_hook(trail.restart)
    if plan.spec.kind == "features" and plan.spec.blocks[0].name in network.block_names:
        _cut_input(network.block(plan.spec.blocks[0].name), outside(plan), mesh)
    if isinstance(network.loss, single_device.TokenLoss) and splits_vocabulary(plan):
        network.loss = _loss(network.loss, plan, mesh)


def _replacement(
    layer: single_device.RoleLayer, spec: LayerSpec, trail: layers.Trail, plan: Plan, mesh: Mesh
) -> nn.Module:
    """The layer's form on this rank; itself where it works the same on a part (positions)."""
    product = product_of(spec, plan)
    if product is not None:
        return _multiplying(layer, product, trail, plan, mesh)
    if isinstance(layer, single_device.HiddenNorm):
        (axis,) = lies(spec, plan).features
        group = mesh.group(axis)
        return Norm(layer, group) if group.size > 1 else layer
    if isinstance(layer, single_device.HashDropout):
        return layers.Dropout(layer, trail)
    return layer


def _multiplying(
    layer: single_device.RoleLayer, product: Product, trail: layers.Trail, plan: Plan, mesh: Mesh
) -> nn.Module:
    span = matmul.span_of(plan)
    if isinstance(layer, single_device.ColumnLinear):
        return layers.Columns(layer, layers.Multiplier(product, mesh, span, trail))
    if isinstance(layer, (single_device.RowLinear, single_device.UnsplitLinear)):
        return layers.Row(layer, layers.Multiplier(product, mesh, span, trail))
    assert isinstance(layer, (single_device.VocabHead, single_device.TokenEmbedding)), (
        f"{layer.layer_role} does not multiply"
    )
    multiply = layers.Multiplier(product, mesh, span, trail, layer.vocab)
    if isinstance(layer, single_device.VocabHead):
        return layers.Head(layer, multiply)
    return layers.Embedding(layer, multiply, part_of(product.x.rows, mesh))


def _loss(loss: single_device.TokenLoss, plan: Plan, mesh: Mesh) -> GridLoss:
    """Of logits that lie as the head gives them."""
    logits = head(plan.tensor.kind, outside(plan)).y
    (axis,) = logits.features
    vocab = plan.spec.vocab
    ((start, _),) = Layout((logits.features,)).ranges((vocab,), plan.mesh.sizes, mesh.coordinate)
    return GridLoss(loss.label_smoothing, mesh.group(axis), start, vocab, part_of(logits.rows, mesh))


def _cut_input(block: nn.Module, lies: ActivationLayout, mesh: Mesh) -> None:
    """A model on features reads the microbatch whole; its first block gets this rank's samples and features of it."""
    rows, features = part_of(lies.rows, mesh), part_of(lies.features, mesh)

    def cut(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (features.of(rows.of(inputs[0]), -1), *inputs[1:])

    block.register_forward_pre_hook(cut)
