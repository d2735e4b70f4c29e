"""What every tensor strategy does to put a one-device network on its ranks: cut parameters, swap modules. On meta."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from parallelrun.layout import Layout
from parallelrun.mesh import Mesh
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.structure import Plan


def shard_parameters(
    network: nn.Module, plan: Plan, mesh: Mesh, layout: Callable[[ParameterSpec, Plan], Layout]
) -> None:
    """Give every Parameter its local shape (uninitialised); one that several modules share stays shared."""
    originals = {copy: plan.spec.parameters[original] for copy, original in plan.spec.tied}
    known: dict[str, ParameterSpec] = {**plan.spec.parameters, **originals}
    local: dict[int, nn.Parameter] = {}
    for name, parameter in list(network.named_parameters(remove_duplicate=False)):
        if id(parameter) not in local:
            shape = layout(known[name], plan).local_shape(tuple(parameter.shape), plan.mesh.sizes, mesh.coordinate)
            cut = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
            local[id(parameter)] = cut
        module, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(module), attribute, local[id(parameter)])


def replace_module(network: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace the module at a dotted path."""
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, layer)


def has_vocab_head(plan: Plan) -> bool:
    """Do logits come from a head, whose outputs a tensor strategy splits?"""
    return any(layer.layer_role == "head" for layer in plan.spec.layers())
