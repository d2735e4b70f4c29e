"""fsdp at run time: torch's FSDP2 wraps every block; here are its units, when it reduces, and its local tensors.

FSDP2 averages gradients by default, on every module separately, so summing is asked of each module. It reduces in the
last microbatch only: at pp=1 under that microbatch's backward, else when the schedule is done with the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from parallelrun import torch_private
from parallelrun.mesh.runtime import Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.parameters import HeldParameter, LocalParameter

from ..local import LocalRuntime, frozen, match, set_gradient, trained
from .units import ROOT, TIED, Unit, shard_axis, units

HOLDERS = "_parallelrun_tied_weights"  # on a stage: a list, so that it is no submodule


def shard(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Wrap the units of this rank's stages, on meta: from now on a rank holds its shards only."""
    if mesh.group("dp").size == 1:
        return
    device_mesh = _device_mesh(plan, mesh)
    position = mesh.coordinate.get("pp", 0)
    part_of = {stage.index: part for stage, part in zip(plan.stages_of(position), parts, strict=True)}
    own = units(plan, position)
    shared = _shard_tied([u for u in own if u.kind == TIED], part_of, plan, device_mesh)
    for stage, part in part_of.items():
        blocks = [
            _fully_shard(part.get_submodule(unit.block), unit, plan, device_mesh, shared)
            for unit in own
            if unit.stage == stage and unit.kind == "block"
        ]
        left = next((u for u in own if u.stage == stage and u.kind == ROOT), Unit(ROOT, stage, "", (), False, False))
        _prefetch_backward(_fully_shard(part, left, plan, device_mesh, shared), blocks)
    for module in _wrapped(parts):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """The DataRuntime over materialised weights."""
    if mesh.group("dp").size == 1:
        return LocalRuntime(match(parts, plan, mesh))
    return FsdpRuntime(parts, plan, mesh)


class FsdpRuntime(LocalRuntime):
    """The optimizer updates local tensors that share storage with FSDP's sharded parameters."""

    def __init__(self, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh):
        self._plan = plan
        self._modules = list(_wrapped(parts))
        self._holders = [holder for part in parts for holder in getattr(part, HOLDERS, [])]
        self._roots = [part for part in (*parts, *self._holders) if isinstance(part, FSDPModule)]
        for holder in self._holders:
            _tie_again(holder)
        for root in self._roots:
            torch_private.fsdp_initialise(root)  # may move shards into padded storage: before we take them
        pairs = match(parts, plan, mesh)
        self._sharded = [parameter for _, parameter in trained(pairs)]
        with torch.no_grad():
            self.parameters = [_part(held, weight, plan) for held, weight in trained(pairs)]
            self.frozen = [_part(held, weight, plan) for held, weight in frozen(pairs)]
        self._num_forwards = 0
        self._reduces: bool | None = None  # not said yet
        self._left_gathered = False
        # Then every backward is a last one, and nothing need be said again: saying it walks all modules.
        self._always_last = plan.pipeline.kind == "none" and plan.batch.microbatches == 1
        for part in parts:
            part.register_forward_pre_hook(self._before_forward, prepend=True)

    def begin_step(self) -> None:
        """No gradients, no weights gathered (an evaluation leaves old ones), and no reduction before its time."""
        if self._left_gathered or not self._always_last:
            for module in self._modules:
                module.reshard()
        self._left_gathered = False
        for parameter, sharded in zip(self.parameters, self._sharded):
            parameter.tensor.grad = sharded.grad = None
        self._num_forwards = 0
        self._set_last(self._always_last)

    def finish_gradients(self) -> None:
        """Reduce what backward has not, and hand the shards' gradients over."""
        if not self._reduces:
            self._set_last(True)
            for root in self._roots:
                torch_private.fsdp_reduce(root)
        with torch.no_grad():
            for parameter, sharded in zip(self.parameters, self._sharded):
                set_gradient(parameter.tensor, None if sharded.grad is None else _local(sharded.grad))

    def _before_forward(self, part: nn.Module, _: object) -> None:
        """A weight of two stages is gathered. At pp=1 microbatches alternate forward and backward, so from the last
        one's forward on, backward may reduce."""
        for holder in self._holders:
            holder.unshard()
        if not torch.is_grad_enabled():
            self._left_gathered = True
        elif self._plan.pipeline.kind == "none":
            self._num_forwards += 1
            if self._num_forwards == self._plan.batch.microbatches:
                self._set_last(True)

    def _set_last(self, last: bool) -> None:
        """Whether the backward passes from now on reduce. Weights that are kept go when it is done."""
        if last == self._reduces:
            return
        self._reduces = last
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last or self._plan.data.reshard_after_forward)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage (outside autograd)."""
    assert isinstance(tensor, DTensor), "FSDP shards are DTensors"
    return tensor.to_local()


def _part(held: HeldParameter, weight: Tensor, plan: Plan) -> LocalParameter:
    layout = held.layout.split(0, shard_axis(plan))
    return LocalParameter(held.name, _local(weight), held.spec, layout, held.shared)


def _device_mesh(plan: Plan, mesh: Mesh) -> DeviceMesh:
    axis = shard_axis(plan)
    return mesh.device_mesh(axis) if axis == "dp" else mesh.device_mesh("dp_replicate", axis)


def _fully_shard(module: nn.Module, unit: Unit, plan: Plan, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> FSDPModule:
    """Wrap one unit. Inputs and outputs are not cast: the layers do it themselves, alike under every data way."""
    precision = plan.precision
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if unit.rounded else None,
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=False,
    )
    return fully_shard(
        module, mesh=mesh, reshard_after_forward=unit.reshard, mp_policy=policy, ignored_params=ignored or None
    )


class _Holder(nn.Module):
    """Keeps the layers of several stages that share one weight. Never called."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)


def _shard_tied(tied: list[Unit], parts: dict[int, nn.Module], plan: Plan, mesh: DeviceMesh) -> set[nn.Parameter]:
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
            _fully_shard(holder, unit, plan, mesh, set())
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


def _prefetch_backward(root: FSDPModule, blocks: list[FSDPModule]) -> None:
    """In backward, gather each block while the one after it computes.

    Said explicitly, because FSDP's own guess takes the block that ran before, which may be of another microbatch; the
    first block names itself, which does nothing.
    """
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch([blocks[max(0, index - 1)]])
    if blocks:
        root.set_modules_to_backward_prefetch([blocks[-1]])


def _wrapped(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    """Every FSDP module of the stages, those of shared weights included."""
    for part in parts:
        yield from (module for module in part.modules() if isinstance(module, FSDPModule))
        yield from getattr(part, HOLDERS, [])
