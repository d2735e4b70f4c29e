"""The runtime of fsdp: torch's FSDP2 wraps every unit; this module decides when it reduces.

FSDP2 averages gradients by default, so each module is told to sum. It reduces in every backward pass, or in the last
one of each stage (`reduce_each_microbatch=false`); HSDP sums the shards over the replicas in the last one. Under
schedules that split backward, it reduces after the pass of weight gradients, or after the schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.parameters import LocalParameter, held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.data_runtime import DataRuntime, complete_gradients, match, trained
from parallelrun.training.loop.flat_tensors import bucket_pairs, sum_buckets

from ..common.buckets import shard_dim
from .units import BLOCK, EXPERTS, ROOT, ROUTER, TIED, Unit, UnitSharding, is_unsharded, shard_axis

torch_private.import_compiler()  # or DTensor would, in each rank instead of once before they are forked
HOLDERS = "_parallelrun_tied_weights"  # on a stage: a list, so that it is no submodule
REPLICATE = "dp_replicate"


class FSDPRuntime(DataRuntime):
    """The optimizer updates local tensors that share storage with FSDP's sharded parameters."""

    @classmethod
    def shard(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
        """Wrap the units of this rank's stages on the meta device, so that a rank only ever holds its shards."""
        if plan.num_data_ranks > 1:
            UnitWrapper(parts, plan, mesh).wrap()

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        return cls(parts, plan, mesh) if plan.num_data_ranks > 1 else super().attach(parts, plan, mesh)

    def __init__(self, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh):
        self._plan, self._strategy = plan, UnitSharding.of(plan)
        self._modules = _wrapped(parts)
        self._holders = [holder for part in parts for holder in getattr(part, HOLDERS, [])]
        self._roots = [part for part in (*parts, *self._holders) if isinstance(part, FSDPModule)]
        for holder in self._holders:
            _tie_again(holder)
        for root in self._roots:
            torch_private.fsdp_initialise(root)  # may move shards into padded storage: before we take them
        pairs = match(parts, plan, mesh)
        with torch.no_grad():
            local = [
                LocalParameter(p.name, _local(w), p.spec, plan.data.state_layout(p.spec, p.layout, plan), p.shared)
                for p, w in pairs
            ]
        self.parameters = [parameter for parameter in local if not parameter.spec.frozen]
        self.frozen = [parameter for parameter in local if parameter.spec.frozen]
        both = zip(self.parameters, trained(pairs))
        self._sharded = [(parameter, weight) for parameter, (_, weight) in both if parameter.tensor is not weight]
        # What is in no unit FSDP2 ignores: its gradients are summed over its copies, if there are any.
        self._unsharded = [weight for parameter, weight in trained(pairs) if is_unsharded(parameter, plan)]
        self._summed = [(mesh.group(axis), [weight for _, weight in own]) for axis, own in bucket_pairs(pairs, plan)[0]]
        self._num_backwards = dict.fromkeys(parts, 0)
        self._is_last: dict[object, bool] = {}  # what each root has been told
        self._left_gathered = False
        # Then every backward pass is the last one of its step, and the modules are told once.
        self._always_last = plan.mesh.size("pp") == 1 and plan.batch.microbatches == 1
        for part in parts:
            part.register_forward_pre_hook(self._before_forward, prepend=True)
            part.register_forward_hook(lambda m, _, x: self._after_forward(m, x if isinstance(x, Tensor) else x[-1]))
            if plan.pipeline.splits_backward and self._strategy.reduce_each_microbatch:
                part.after_weight_gradients = partial(self._reduce_microbatch, part)  # type: ignore[assignment]

    def begin_step(self) -> None:
        """Clear gradients, and free weights that an evaluation left gathered."""
        if self._left_gathered or not self._always_last:
            for module in self._modules:
                module.reshard()
        self._left_gathered = False
        for parameter, sharded in self._sharded:
            parameter.tensor.grad = sharded.grad = None
        for weight in self._unsharded:
            weight.grad = None
        self._num_backwards = dict.fromkeys(self._num_backwards, 0)
        for root in self._roots:
            self._set_last(root, self._always_last)

    def finish_gradients(self) -> None:
        """Reduce the remaining gradients, and give the optimizer the gradients of the shards."""
        for root in self._roots:
            if not self._is_last[root]:
                self._set_last(root, True)
                torch_private.fsdp_reduce(root)
        with torch.no_grad():
            for parameter, sharded in self._sharded:
                parameter.tensor.grad = None if sharded.grad is None else _local(sharded.grad)
            complete_gradients([*(parameter.tensor for parameter, _ in self._sharded), *self._unsharded])
        for group, weights in self._summed:
            sum_buckets([[weight.grad for weight in weights if weight.grad is not None]], group, "gradients")

    def _before_forward(self, part: nn.Module, _: object) -> None:
        """Gather a weight of two stages."""
        for holder in self._holders:
            holder.unshard()
        if not torch.is_grad_enabled():
            self._left_gathered = True

    def _after_forward(self, part: nn.Module, output: Tensor) -> None:
        """Notice when the last backward pass of a stage begins: with the gradient of that stage's (last) output."""
        if self._always_last or self._plan.pipeline.splits_backward or not output.requires_grad:
            return
        assert isinstance(part, FSDPModule), "every stage is a root of FSDP"

        def backward_begins(_: Tensor) -> None:
            self._num_backwards[part] += 1
            if self._num_backwards[part] == self._plan.batch.microbatches:
                self._set_last(part, True)

        output.register_hook(backward_begins)

    def _reduce_microbatch(self, part: nn.Module) -> None:
        """Reduce a microbatch's gradients once its weight gradients are computed: hooks of backward do not see them."""
        assert isinstance(part, FSDPModule), "every stage is a root of FSDP"
        self._num_backwards[part] += 1
        part.set_requires_gradient_sync(True)
        part.set_requires_all_reduce(False)
        if self._num_backwards[part] == self._plan.batch.microbatches:
            self._set_last(part, True)
        torch_private.fsdp_reduce(part)
        part.set_requires_gradient_sync(False)

    def _set_last(self, root: FSDPModule, last: bool) -> None:
        """Tell a root whether its next backward pass is the last of the step: it then reduces all gradients that remain
        and frees all gathered weights."""
        if self._is_last.get(root) == last:
            return
        self._is_last[root] = last
        in_backward = self._strategy.reduce_each_microbatch and not self._plan.pipeline.splits_backward
        root.set_requires_gradient_sync(last or in_backward)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or self._strategy.reshard_after_forward)


class UnitWrapper:
    """Wraps the units of a rank's stages by `fully_shard`. Tied weights and parameters in no unit are ignored."""

    def __init__(self, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh):
        self._plan, pp_rank = plan, mesh.coordinate.get("pp", 0)
        self._units = UnitSharding.of(plan).units(plan, pp_rank)
        self._parts = {stage.index: part for stage, part in zip(plan.stages_of(pp_rank), parts, strict=True)}
        copies = (REPLICATE,) if mesh.group(REPLICATE).size > 1 else ()  # HSDP: dim 0 of a mesh
        axes = dict.fromkeys([shard_axis(plan), *(unit.axis for unit in self._units)])
        self._meshes = {axis: mesh.device_mesh(*copies, axis) for axis in axes}
        unsharded = [parameter for parameter in held_parameters(plan, pp_rank) if is_unsharded(parameter, plan)]
        self._ignored = {self._parts[parameter.stage].get_parameter(parameter.name) for parameter in unsharded}

    def wrap(self) -> None:
        """Wrap shared weights, then every stage's blocks, then the stages."""
        for unit in self._units:
            if unit.kind == TIED:
                self._wrap_tied(unit)
        for stage, part in self._parts.items():
            own = [unit for unit in self._units if unit.stage == stage]
            names = dict.fromkeys(unit.block for unit in own if unit.block)
            blocks = [self._wrap_block([unit for unit in own if unit.block == name], part) for name in names]
            nothing = Unit(ROOT, stage, "", (), False, shard_axis(self._plan))
            root = next((unit for unit in own if unit.kind == ROOT), nothing)
            _prefetch(self._wrap(part, root), blocks)
        for module in _wrapped(list(self._parts.values())):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _wrap_block(self, own: list[Unit], part: nn.Module) -> list[FSDPModule]:
        """Wrap the units of one block, and return the block first.

        Experts are wrapped last: their module contains the router, which is in another unit.
        """
        modules = {unit.kind: part.get_submodule(unit.module) for unit in own}
        experts = {part.get_parameter(p.name) for unit in own if unit.kind == EXPERTS for p in unit.parameters}
        if experts:  # blocks add what their layers give out of place
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        wrapped = {}
        for unit in sorted(own, key=lambda unit: (ROUTER, BLOCK, EXPERTS).index(unit.kind)):
            others = set(modules[EXPERTS].parameters()) - experts if unit.kind == EXPERTS else experts
            wrapped[unit.kind] = self._wrap(modules[unit.kind], unit, others)
        return [wrapped[unit.kind] for unit in own]

    def _wrap_tied(self, unit: Unit) -> None:
        """Wrap the weights that two stages of this rank share.

        FSDP's roots cannot share a unit, so each weight is wrapped in a module of the layers that use it, which is
        never called: the runtime gathers and reduces it.
        """
        for parameter in unit.parameters:
            part = self._parts[parameter.stage]
            weight = part.get_parameter(parameter.name)
            modules = [module for part in self._parts.values() for module in part.modules()]
            holder = nn.Sequential(*(m for m in modules if any(p is weight for p in m.parameters(recurse=False))))
            self._wrap(holder, unit)
            setattr(part, HOLDERS, [*getattr(part, HOLDERS, []), holder])
            self._ignored.add(part.get_parameter(parameter.name))

    def _wrap(self, module: nn.Module, unit: Unit, others: AbstractSet[nn.Parameter] = frozenset()) -> FSDPModule:
        """Wrap one unit. others: parameters of the module that are not in it. Layers cast their inputs themselves."""
        plan, precision = self._plan, self._plan.precision
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, precision.compute) if unit.rounded else None,
            reduce_dtype=getattr(torch, precision.reduce),
            cast_forward_inputs=False,
        )
        part = self._parts[unit.stage]
        dims = {part.get_parameter(p.name): shard_dim(p.spec, p.layout, unit.axis, plan) for p in unit.parameters}
        return fully_shard(
            module,
            mesh=self._meshes[unit.axis],
            reshard_after_forward=unit.reshard,
            shard_placement_fn=(lambda weight: Shard(dims.get(weight, 0))) if any(dims.values()) else None,
            mp_policy=policy,
            ignored_params={*self._ignored, *others} or None,
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of an FSDP shard, sharing its storage (outside autograd); any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tie_again(holder: nn.Module) -> None:
    """Materialising gave each stage its own copy of a weight that two stages share."""
    first, *others = holder.children()
    ((name, weight),) = first.named_parameters(recurse=False)
    for module in others:
        setattr(module, name, weight)


def _prefetch(root: FSDPModule, blocks: list[list[FSDPModule]]) -> None:
    """In backward, gather each block (its units, the block itself first) while the one after it computes; in forward,
    gather its experts while the layers before them compute.

    FSDP's own guess takes the block that ran before, which may be of another microbatch. A module without a
    predecessor names itself, which does nothing.
    """
    for index, (block, *inner) in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[index - 1] if index else [block])
        for unit in inner:
            unit.set_modules_to_backward_prefetch([unit])
        if inner:
            block.set_modules_to_forward_prefetch(inner)
    if blocks:
        root.set_modules_to_backward_prefetch(blocks[-1])


def _wrapped(parts: Sequence[nn.Module]) -> list[FSDPModule]:
    """Every FSDP module of the stages, those of shared weights included."""
    holders = [holder for part in parts for holder in getattr(part, HOLDERS, [])]
    modules = [module for part in parts for module in part.modules()]
    return [module for module in (*modules, *holders) if isinstance(module, FSDPModule)]


RUNTIME = FSDPRuntime
