"""The parameters that a rank holds and updates, by one-device name, each with its layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.model.model_spec import ParameterSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeldParameter:
    """One parameter that a pp rank holds, as its stage's module stores it before a data strategy shards it.

    name: its name in the module (a tied copy's own name). spec: its logical parameter. stage: index into plan.stages.
    layout: its module_layout. shared: a tied copy on another pp rank than its original, which counts it.
    """

    name: str
    spec: ParameterSpec
    stage: int
    block: str
    layout: Layout
    shared: bool = False


@dataclass(frozen=True)
class LocalParameter:
    """This rank's part of one logical parameter, as the optimizer updates it.

    tensor: a leaf whose `.grad` the data strategy sets. It shares storage with the module's parameter, or
    `DataRuntime.finish_update` copies it there. layout: the data strategy's state_layout, with the axes over which its
    gradient is partial.
    """

    name: str
    tensor: Tensor
    spec: ParameterSpec
    layout: Layout
    shared: bool = False


def module_layout(spec: ParameterSpec, plan: Plan) -> Layout:
    """The layout of a parameter in a stage's modules before a data strategy shards it.

    It is the tensor strategy's layout; expert weights are also sharded over ep on dim 0.
    """
    layout = plan.tensor.layout(spec, plan)
    if spec.layer_role != "expert" or plan.mesh.size("ep") == 1:
        return layout
    return replace(layout, dims=(("ep", *layout.dims[0]), *layout.dims[1:]))


def element_bytes(spec: ParameterSpec, plan: Plan, layout: Layout | None = None) -> int:
    """Bytes of an element of a parameter in a stage's modules, and of its gradient. layout: its `module_layout`, if it
    is known already."""
    if spec.stored or not plan.data.rounds_weights:
        return BYTES[spec.stored or plan.precision.stored]
    return BYTES[plan.data.weight_dtype(spec, layout or module_layout(spec, plan), plan)]


@cached("weights_cache")
def uses_rounded(plan: Plan) -> bool:
    """Whether any weight is rounded to the compute dtype, or widened, where it is used."""
    dtypes = {spec.stored or plan.precision.stored for spec in plan.spec.parameters.values()}
    return dtypes != {plan.precision.compute}


def block_dtypes(name: str, plan: Plan) -> tuple[str, ...]:
    """The dtypes of a block's parameters in the modules, to be part of a cache key; () where all are as stored."""
    if not plan.data.rounds_weights:
        return ()
    pairs = zip(plan.spec.block(name).parameters, block_layouts(name, plan))
    return tuple(plan.data.weight_dtype(spec, layout, plan) for spec, layout in pairs)


@cached("weights_cache")
def held_parameters(plan: Plan, pp_rank: int) -> tuple[HeldParameter, ...]:
    """The parameters of a pp rank in the order of stages, blocks and layers.

    A tied copy follows its block's own parameters. A copy on the same pp rank as its original is the same tensor and is
    not listed.
    """
    stages = plan.stages_of(pp_rank)
    return tuple(p for stage in stages for name in stage.blocks for p in _of_block(plan, stage.index, name))


@cached("weights_cache")
def distinct_parameters(plan: Plan, pp_rank: int) -> list[tuple[HeldParameter, int]]:
    """(parameter, count) of a pp rank: equal blocks of a stage are counted instead of listed."""
    parameters: list[tuple[HeldParameter, int]] = []
    for stage in plan.stages_of(pp_rank):
        counts = Counter(plan.spec.first_alike[name] for name in stage.blocks)
        first = {plan.spec.first_alike[name]: name for name in reversed(stage.blocks)}
        for kind, count in counts.items():
            parameters += [(parameter, count) for parameter in _of_block(plan, stage.index, first[kind])]
    return parameters


def block_layouts(name: str, plan: Plan) -> list[Layout]:
    """The `module_layout` of every parameter of a block, computed once for equal blocks."""
    parameters, key = plan.spec.block(name).parameters, ("layouts", plan.spec.first_alike[name])
    return once(plan.blocks_cache, key, lambda: [module_layout(spec, plan) for spec in parameters])


def _of_block(plan: Plan, stage: int, name: str) -> Iterator[HeldParameter]:
    """The parameters of a block."""
    block = plan.spec.block(name)
    for spec, layout in zip(block.parameters, block_layouts(name, plan)):
        yield HeldParameter(spec.name, spec, stage, name, layout)
    copies = {original: copy for copy, original in plan.tied_copies}
    tied = dict.fromkeys(layer.tied for layer in block.layers if layer.tied in copies)
    for original in (weight for weight in tied if weight and plan.spec.readers[weight] == name):
        spec = plan.spec.parameters[original]
        yield HeldParameter(copies[original], spec, stage, name, module_layout(spec, plan), shared=True)


def owns(layout: Layout, shape: MeshShape, coordinate: Mapping[str, int]) -> bool:
    """True on exactly one of the ranks that hold the same part of a tensor of one pipeline stage.

    It is the rank with coordinate 0 on every mesh dim over which the tensor is replicated. pp is excluded: other stages
    hold other tensors.
    """
    covered = {mesh_dim for axis in layout.axes for mesh_dim in shape.mesh_dims_of(axis)}
    return all(
        coordinate.get(mesh_dim, 0) == 0
        for mesh_dim in shape.mesh_dim_names
        if mesh_dim != "pp" and mesh_dim not in covered
    )
