"""Shard a one-device network: cut its parameters, replace its layers. On the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ParameterSpec


class TakesOver(nn.Module):
    """Mixin of a layer that replaces another. It takes over the layer's attributes and its sharded parameters, and
    has `more` attributes.

    Sizes among the attributes stay those of the whole layer; the local ones are those of the parameters.
    """

    def __init__(self, source: nn.Module, **more: Any):
        nn.Module.__init__(self)
        for name, value in vars(source).items():
            self.__dict__[name] = value.copy() if isinstance(value, dict) else value
        self.__dict__.update(more)


def shard_parameters(network: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Give every Parameter its local shape (uninitialised); one that several modules share stays shared."""
    originals = {copy: plan.spec.parameters[original] for copy, original in plan.spec.tied}
    specs: dict[str, ParameterSpec] = {**plan.spec.parameters, **originals}
    local: dict[int, nn.Parameter] = {}
    for name, parameter in list(network.named_parameters(remove_duplicate=False)):
        if id(parameter) not in local:
            layout = plan.tensor.layout(specs[name], plan)
            shape = layout.local_shape(tuple(parameter.shape), plan.mesh.sizes, mesh.coordinate)
            local[id(parameter)] = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
        module, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(module), attribute, local[id(parameter)])


@dataclass(frozen=True)
class EvenSlice:
    """Part `index` of the `count` equal parts into which several axes split a dim."""

    index: int
    count: int

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this part of a tensor that is whole along `dim`: a view."""
        size, rest = divmod(tensor.size(dim), self.count)
        assert rest == 0, f"dim {dim} of {tuple(tensor.shape)} is not divisible by {self.count}"
        return tensor.narrow(dim, self.index * size, size)


WHOLE = EvenSlice(0, 1)


def slice_of(axes: tuple[str, ...], mesh: Mesh) -> EvenSlice:
    """Return this rank's part of a dim that `axes` split, major first."""
    index, count = 0, 1
    for axis in axes:
        degree = mesh.shape.size(axis)
        index, count = index * degree + mesh.coordinate.get(axis, 0), count * degree
    return EvenSlice(index, count)


def first_row(length: int, axes: tuple[str, ...], mesh: Mesh) -> int:
    """Return where this rank's part of a dim of `length` begins that `axes` split (a vocabulary: maybe unevenly)."""
    return Layout((axes,)).ranges((length,), mesh.shape.sizes, mesh.coordinate)[0][0]


def has_vocab_head(plan: Plan) -> bool:
    """Return whether logits come from a head, whose outputs a tensor strategy splits."""
    return any(layer.layer_role == "head" for layer in plan.spec.layers())
