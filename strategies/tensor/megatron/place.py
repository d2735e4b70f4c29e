"""Put a one-device network on the ranks of the tensor axis: cut its parameters, swap its role layers. On meta."""

from __future__ import annotations

from parallelrun.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..cross_entropy import VocabParallelLoss
from ..placing import cut_parameters, put, splits_vocabulary
from . import layers, layouts
from .traffic import overlaps


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    group = mesh.group("tp")
    if group.size == 1:
        return
    cut_parameters(network, plan, mesh, layouts.layout)
    span = layers.Span(group, plan.tensor.sequence_parallel, overlaps(plan))
    for name, layer in list(network.named_modules()):
        if isinstance(layer, single_device.RoleLayer):
            put(network, name, _replacement(layer, span, plan, mesh))
    if isinstance(network.loss, single_device.TokenLoss) and splits_vocabulary(plan):
        start, _ = layouts.row_range(plan.spec.vocab, plan, mesh.coordinate)
        network.loss = VocabParallelLoss(network.loss.label_smoothing, group, start, plan.spec.vocab)


def _replacement(layer: single_device.RoleLayer, span: layers.Span, plan: Plan, mesh: Mesh) -> single_device.RoleLayer:
    """The layer's form on this rank; itself where it works the same on a part (norms)."""
    if isinstance(layer, single_device.TokenEmbedding):
        return layers.Embedding(layer, span, layouts.row_range(layer.vocab, plan, mesh.coordinate)[0])
    for role, form in layers.FORMS.items():
        if isinstance(layer, role):
            return form(layer, span)
    return layer
