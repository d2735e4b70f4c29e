"""The runtime of fsdp: torch's FSDP2 wraps every unit; this module decides when it reduces.

FSDP2 averages gradients by default, on every module separately, so summing is asked of each module. It reduces in every
backward pass, or in the last one of each stage only (`reduce_each_microbatch=false`, which keeps unsharded gradients
until then); HSDP sums the shards over the replicas in the last one. Under schedules that split backward, all of it
follows the schedule. FSDP2 ignores parameters that are in no unit (`units.is_whole`); buckets sum their gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from parallelrun import torch_private
from parallelrun.mesh import Mesh
from parallelrun.plan.parameters import HeldParameter, LocalParameter, held_parameters
from parallelrun.plan.structure import Plan
from parallelrun.train.data_runtime import DataRuntime, match, set_gradient, trained

from ..common.buckets import shard_dim, shard_layout
from ..common.reducer import BucketedRuntime
from .plan import FSDP
from .units import BLOCK, EXPERTS, ROOT, ROUTER, TIED, Unit, is_whole, shard_axis

HOLDERS = "_parallelrun_tied_weights"  # on a stage: a list, so that it is no submodule
REPLICATE = "dp_replicate"
Meshes = dict[str, DeviceMesh]  # by the axis that splits weights


def _shard(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Wrap the units of this rank's stages on the meta device, so that a rank only ever holds its shards."""
    if mesh.group("dp").size == 1:
        return
    pp_rank = mesh.coordinate.get("pp", 0)
    part_of = {stage.index: part for stage, part in zip(plan.stages_of(pp_rank), parts, strict=True)}
    own = FSDP.of(plan).units(plan, pp_rank)
    axes = dict.fromkeys([shard_axis(plan), *(unit.axis for unit in own)])
    copies = (REPLICATE,) if mesh.group(REPLICATE).size > 1 else ()  # HSDP: dim 0 of a mesh
    meshes = {axis: mesh.device_mesh(*copies, axis) for axis in axes}
    held = [p for p in held_parameters(plan, pp_rank) if is_whole(p, plan)]
    whole = {part_of[p.stage].get_parameter(p.name) for p in held}
    shared = _shard_tied([u for u in own if u.kind == TIED], part_of, plan, meshes)
    for stage, part in part_of.items():
        of_stage = [unit for unit in own if unit.stage == stage and unit.block]
        blocks = [
            _shard_block([u for u in of_stage if u.block == name], part, plan, meshes, shared | whole)
            for name in dict.fromkeys(unit.block for unit in of_stage)
        ]
        nothing = Unit(ROOT, stage, "", (), False, False, shard_axis(plan))
        left = next((unit for unit in own if unit.stage == stage and unit.kind == ROOT), nothing)
        _prefetch(_fully_shard(part, left, plan, meshes, shared | whole), blocks)
    for module in _wrapped(parts):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class FSDPRuntime(DataRuntime):
    """The optimizer updates local tensors that share storage with FSDP's sharded parameters."""

    @classmethod
    def shard(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
        """Wrap the units of this rank's stages."""
        _shard(parts, plan, mesh)

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        return cls(parts, plan, mesh) if plan.mesh.size("dp") > 1 else super().attach(parts, plan, mesh)

    def __init__(self, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh):
        self._plan, self._strategy = plan, FSDP.of(plan)
        self._modules = list(_wrapped(parts))
        self._holders = [holder for part in parts for holder in getattr(part, HOLDERS, [])]
        self._roots = [part for part in (*parts, *self._holders) if isinstance(part, FSDPModule)]
        for holder in self._holders:
            _tie_again(holder)
        for root in self._roots:
            torch_private.fsdp_initialise(root)  # may move shards into padded storage: before we take them
        pairs = match(parts, plan, mesh)
        self._whole = BucketedRuntime([pair for pair in pairs if is_whole(pair[0], plan)], plan, mesh)
        with torch.no_grad():
            parameters = {held.name: _part(held, weight, plan) for held, weight in pairs if not is_whole(held, plan)}
        parameters |= {p.name: p for p in (*self._whole.parameters, *self._whole.frozen)}
        self.parameters = [parameters[held.name] for held, _ in trained(pairs)]
        self.frozen = [parameters[held.name] for held, _ in pairs if held.spec.frozen]
        self._sharded = [(parameters[held.name], w) for held, w in trained(pairs) if not is_whole(held, plan)]
        self.flat_gradients = self._whole.flat_gradients
        self._num_backwards = dict.fromkeys(parts, 0)
        self._is_last: dict[object, bool] = {}  # what each root has been told
        self._left_gathered = False
        # Then every backward is a last one, and nothing need be said again: saying it walks all modules.
        self._always_last = plan.pipeline.kind == "none" and plan.batch.microbatches == 1
        for part in parts:
            part.register_forward_pre_hook(self._before_forward, prepend=True)
            part.register_forward_hook(self._after_forward)

    def begin_step(self) -> None:
        """Clear gradients, and free weights that an evaluation left gathered."""
        if self._left_gathered or not self._always_last:
            for module in self._modules:
                module.reshard()
        self._left_gathered = False
        for parameter, sharded in self._sharded:
            parameter.tensor.grad = sharded.grad = None
        self._whole.begin_step()
        self._num_backwards = dict.fromkeys(self._num_backwards, 0)
        for root in self._roots:
            self._set_last(root, self._always_last)

    def launch_gradients(self) -> None:
        """Start the sums of the parameters that are in no unit."""
        self._whole.launch_gradients()

    def finish_gradients(self) -> None:
        """Reduce the remaining gradients, and give the optimizer the gradients of the shards."""
        for root in self._roots:
            if not self._is_last[root]:
                self._set_last(root, True)
                torch_private.fsdp_reduce(root)
        with torch.no_grad():
            for parameter, sharded in self._sharded:
                set_gradient(parameter.tensor, None if sharded.grad is None else _local(sharded.grad))
        self._whole.finish_gradients()

    def _before_forward(self, part: nn.Module, _: object) -> None:
        """Gather a weight of two stages."""
        for holder in self._holders:
            holder.unshard()
        if not torch.is_grad_enabled():
            self._left_gathered = True

    def _after_forward(self, part: nn.Module, _: object, output: Tensor) -> None:
        """Notice when the last backward pass of a stage begins: with the gradient of that stage's output."""
        if self._always_last or self._plan.pipeline.splits_backward or not output.requires_grad:
            return
        assert isinstance(part, FSDPModule), "every stage is a root of FSDP"

        def backward_begins(_: Tensor) -> None:
            self._num_backwards[part] += 1
            if self._num_backwards[part] == self._plan.batch.microbatches:
                self._set_last(part, True)

        output.register_hook(backward_begins)

    def _set_last(self, root: FSDPModule, last: bool) -> None:
        """Tell a root whether its next backward pass is the last of the step: it then reduces all that is left
        and frees the weights that were kept."""
        if self._is_last.get(root) == last:
            return
        self._is_last[root] = last
        root.set_requires_gradient_sync(last or self._strategy.reduce_each_microbatch)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or self._strategy.reshard_after_forward)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage (outside autograd)."""
    assert isinstance(tensor, DTensor), "FSDP shards are DTensors"
    return tensor.to_local()


def _part(held: HeldParameter, weight: Tensor, plan: Plan) -> LocalParameter:
    layout = shard_layout(held.spec, held.layout, shard_axis(plan, held.layout), plan)
    return LocalParameter(held.name, _local(weight), held.spec, layout, held.shared)


def _shard_block(
    own: list[Unit], part: nn.Module, plan: Plan, meshes: Meshes, ignored: set[nn.Parameter]
) -> list[FSDPModule]:
    """Wrap the units of one block, the block first in what is returned.

    Experts last: their unit's module holds the router too, which by then is sharded with the block, or by itself.
    """
    modules = {unit.kind: part.get_submodule(unit.module) for unit in own}
    experts = {part.get_parameter(p.name) for unit in own if unit.kind == EXPERTS for p in unit.parameters}
    if experts:  # blocks add what their layers give out of place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    made = {}
    for unit in sorted(own, key=lambda unit: (ROUTER, BLOCK, EXPERTS).index(unit.kind)):
        others = set(modules[EXPERTS].parameters()) - experts if unit.kind == EXPERTS else experts
        dims = _dims(unit, part, plan)
        made[unit.kind] = _fully_shard(modules[unit.kind], unit, plan, meshes, ignored | others, dims)
    return [made[unit.kind] for unit in own]


def _dims(unit: Unit, part: nn.Module, plan: Plan) -> dict[nn.Parameter, int]:
    """Along which dim those of a unit's weights are split that are not split along dim 0."""
    dims = {part.get_parameter(p.name): shard_dim(p.spec, p.layout, unit.axis, plan) for p in unit.parameters}
    return {weight: dim for weight, dim in dims.items() if dim}


def _fully_shard(
    module: nn.Module,
    unit: Unit,
    plan: Plan,
    meshes: Meshes,
    ignored: set[nn.Parameter],
    dims: Mapping[nn.Parameter, int] = MappingProxyType({}),
) -> FSDPModule:
    """Wrap one unit. Inputs and outputs are not cast: the layers do it themselves, alike under every data strategy.

    dims: of weights that are not split along dim 0.
    """
    precision = plan.precision
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if unit.rounded else None,
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=False,
    )
    return fully_shard(
        module,
        mesh=meshes[unit.axis],
        reshard_after_forward=unit.reshard,
        shard_placement_fn=(lambda weight: Shard(dims.get(weight, 0))) if dims else None,
        mp_policy=policy,
        ignored_params=ignored or None,
    )


class _Holder(nn.Module):
    """Keeps the layers of several stages that share one weight. Never called."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)


def _shard_tied(tied: list[Unit], parts: dict[int, nn.Module], plan: Plan, meshes: Meshes) -> set[nn.Parameter]:
    """Wrap the weights that two stages of this rank share; return their sharded parameters.

    FSDP lets no two roots share a unit, so each is wrapped apart, in a module of the layers that hold it, which is
    never called: the runtime gathers and reduces it.
    """
    sharded = set()
    for unit in tied:
        for held in unit.parameters:
            weight = parts[held.stage].get_parameter(held.name)
            holders = [
                module
                for part in parts.values()
                for module in part.modules()
                if any(value is weight for value in module.parameters(recurse=False))
            ]
            holder = _Holder(holders)
            _fully_shard(holder, unit, plan, meshes, set())
            part = parts[held.stage]
            setattr(part, HOLDERS, [*getattr(part, HOLDERS, []), holder])
            sharded.add(part.get_parameter(held.name))
    return sharded


def _tie_again(holder: nn.Module) -> None:
    """Materialising gave each stage its own copy of a weight that two stages share."""
    first, *others = holder.children()
    ((name, weight),) = first.named_parameters(recurse=False)
    for module in others:
        setattr(module, name, weight)


def _prefetch(root: FSDPModule, blocks: list[list[FSDPModule]]) -> None:
    """In backward, gather each block (its units, the block itself first) while the one after it computes; in forward,
    gather its experts while what is before them computes.

    Said explicitly, because FSDP's own guess takes the block that ran before, which may be of another microbatch; what
    has nothing to gather names itself, which does nothing.
    """
    for index, (block, *inner) in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[index - 1] if index else [block])
        for one in inner:
            one.set_modules_to_backward_prefetch([one])
        if inner:
            block.set_modules_to_forward_prefetch(inner)
    if blocks:
        root.set_modules_to_backward_prefetch(blocks[-1])


def _wrapped(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    """Every FSDP module of the stages, those of shared weights included."""
    for part in parts:
        yield from (module for module in part.modules() if isinstance(module, FSDPModule))
        yield from getattr(part, HOLDERS, [])


RUNTIME = FSDPRuntime
