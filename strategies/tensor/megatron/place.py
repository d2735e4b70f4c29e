"""Put a one-device network on the ranks of the tensor axis: cut its parameters, swap its role layers. On meta."""

from __future__ import annotations

from torch import nn

from parallelrun.mesh.runtime import Mesh
from parallelrun.models import layers as one_device
from parallelrun.models.network import Network
from parallelrun.models.spec import ParameterSpec
from parallelrun.plan.structure import Plan

from . import layers, layouts
from .loss import VocabParallelLoss
from .traffic import overlaps


def place(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    group = mesh.group("tp")
    if group.size == 1:
        return
    _cut_parameters(network, plan, mesh)
    span = layers.Span(group, plan.tensor.sequence_parallel, overlaps(plan))
    for name, layer in list(network.named_modules()):
        if isinstance(layer, one_device.RoleLayer):
            _put(network, name, _replacement(layer, span, plan, mesh))
    if isinstance(network.loss, one_device.TokenLoss) and _splits_vocabulary(plan):
        start, _ = layouts.row_range(plan.spec.vocab, plan, mesh.coordinate)
        network.loss = VocabParallelLoss(network.loss.label_smoothing, group, start, plan.spec.vocab)


def _splits_vocabulary(plan: Plan) -> bool:
    return any(layer.layer_role == "head" for layer in plan.spec.layers())


def _cut_parameters(network: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Give every Parameter its local shape (uninitialised); one that several modules share stays shared."""
    originals = {copy: plan.spec.parameters[original] for copy, original in plan.spec.tied}
    known: dict[str, ParameterSpec] = {**plan.spec.parameters, **originals}
    local: dict[int, nn.Parameter] = {}
    for name, parameter in list(network.named_parameters(remove_duplicate=False)):
        if id(parameter) not in local:
            layout = layouts.layout(known[name], plan)
            shape = layout.local_shape(tuple(parameter.shape), plan.mesh.sizes, mesh.coordinate)
            cut = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
            local[id(parameter)] = cut
        module, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(module), attribute, local[id(parameter)])


def _replacement(layer: one_device.RoleLayer, span: layers.Span, plan: Plan, mesh: Mesh) -> one_device.RoleLayer:
    """The layer's form on this rank; itself where it works the same on a part (norms)."""
    if isinstance(layer, one_device.Embedding):
        return layers.Embedding(layer, span, layouts.row_range(layer.vocab, plan, mesh.coordinate)[0])
    for role, form in layers.FORMS.items():
        if isinstance(layer, role):
            return form(layer, span)
    return layer


def _put(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, layer)
