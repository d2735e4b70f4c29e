"""Put a one-device network on the ranks of the tensor axis: cut its parameters, swap its role layers. On meta."""

from __future__ import annotations

from parallelrun.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.layers import RoleLayer
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..common.cross_entropy import VocabParallelLoss
from ..common.sharding import has_vocab_head, replace_module, shard_parameters
from . import layers, layouts
from .traffic import overlaps


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    group = mesh.group("tp")
    if group.size == 1:
        return
    shard_parameters(network, plan, mesh, layouts.layout)
    tp = layers.TPContext(group, plan.tensor.sequence_parallel, overlaps(plan))
    for name, layer in list(network.named_modules()):
        if isinstance(layer, RoleLayer):
            replace_module(network, name, _replacement(layer, tp, plan, mesh))
    if isinstance(network.loss, single_device.TokenLoss) and has_vocab_head(plan):
        start, _ = layouts.row_range(plan.spec.vocab, plan, mesh.coordinate)
        network.loss = VocabParallelLoss(network.loss.label_smoothing, group, start, plan.spec.vocab)


def _replacement(
    layer: single_device.RoleLayer, tp: layers.TPContext, plan: Plan, mesh: Mesh
) -> single_device.RoleLayer:
    """The layer's tensor-parallel form; the layer itself where it needs none (norms)."""
    if isinstance(layer, single_device.TokenEmbedding):
        return layers.VocabParallelEmbedding(layer, tp, layouts.row_range(layer.vocab, plan, mesh.coordinate)[0])
    for role, form in layers.PARALLEL_LAYERS.items():
        if isinstance(layer, role):
            return form(layer, tp)
    return layer
