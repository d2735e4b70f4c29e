"""The base class of the data strategies' runtimes, which the training loop calls. It is itself the runtime of dp=1.

A strategy's runtime is a subclass in `strategies/data/<kind>/runtime.py`, which names it `RUNTIME`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parallelrun.base import registry
from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.parameters import HeldParameter, LocalParameter, held_parameters
from parallelrun.planner.contract.plan import Plan

if TYPE_CHECKING:
    from parallelrun.training.loop.build import Training

Pair = tuple[HeldParameter, nn.Parameter]


def data_runtime(plan: Plan) -> type[DataRuntime]:
    """The runtime class of the plan's data strategy. Raises ConfigError for a plug-in without one."""
    module = registry.load("strategies", f"data.{plan.data.kind}", "runtime")
    runtime = getattr(module, "RUNTIME", None)
    if isinstance(runtime, type) and issubclass(runtime, DataRuntime):
        return runtime
    cause = f"{module.__name__} of the strategy data.{plan.data.kind} has no RUNTIME that is a subclass of DataRuntime"
    fix = f"write RUNTIME = <the subclass of {DataRuntime.__module__}.DataRuntime> at the end of it"
    raise ConfigError(Problem(cause, "strategy.data.kind", fix))


def match(model_parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> list[Pair]:
    """Pair each parameter that the plan says this rank holds with the module's Parameter, in the plan's order."""
    pp_rank = mesh.coordinate.get("pp", 0)
    part_of = {stage.index: part for stage, part in zip(plan.stages_of(pp_rank), model_parts, strict=True)}
    pairs = [(held, part_of[held.stage].get_parameter(held.name)) for held in held_parameters(plan, pp_rank)]
    matched = {id(parameter) for _, parameter in pairs}
    unknown = [name for part in model_parts for name, value in part.named_parameters() if id(value) not in matched]
    assert not unknown, f"not in the plan's spec: {unknown}"
    assert len(matched) == len(pairs), "two logical parameters are one tensor"
    return pairs


def complete_gradients(tensors: Iterable[Tensor]) -> None:
    """Give zeros to tensors for which backward has computed no gradient, so that all plans apply weight decay.

    The gradients become contiguous: torch's fused optimizers on CPU assume the strides of the weight, but a split
    backward (zero bubble) gives the gradient the strides of a matrix product.
    """
    for tensor in tensors:
        gradient = tensor.grad
        if gradient is None:
            tensor.grad = torch.zeros_like(tensor)
        elif not gradient.is_contiguous():
            tensor.grad = gradient.contiguous()


def by_axis(buffers: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Group flat buffers by the axis over which each is summed."""
    buffers_of: dict[str, list[Tensor]] = {}
    for axis, buffer in buffers:
        buffers_of.setdefault(axis, []).append(buffer)
    return buffers_of


def trained(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that the optimizer updates."""
    return [pair for pair in pairs if not pair[0].spec.frozen]


class DataRuntime:
    """The steps of a data strategy, in the order in which the loop calls them. The defaults suit dp=1.

    parameters: the tensors that the optimizer updates. frozen: all other parameters, complete on every rank of dp
    unless the strategy shards weights. kept: additional tensors for checkpoints, by kind, equal on all replicas
    (DiLoCo's outer state) or sharded over them. flat_gradients: flat buffers by the axis over which gradients are
    summed (`replica_axis`).
    After `finish_gradients` the buffers of an axis hold the gradients of all its `parameters`, padded with zeros; an
    axis without buffers is absent. loss_scale: the factor of this step's gradients.
    """

    flat_gradients: Mapping[str, Sequence[Tensor]] = MappingProxyType({})
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({})
    loss_scale: float = 1.0
    _kept_before: Sequence[Tensor] = ()  # copies of `kept` as before a step that has begun, if that can be undone

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        local = [LocalParameter(held.name, p, held.spec, held.layout, held.shared) for held, p in pairs]
        self.parameters = [parameter for parameter in local if not parameter.spec.frozen]
        self.frozen = [parameter for parameter in local if parameter.spec.frozen]
        self._plan, self._mesh = plan, mesh

    @classmethod
    def run_rank(cls, config: Config, plan: Plan, context: WorkerContext) -> int | None:
        """Run `config.verb` on this rank and return the exit code, if ranks have different tasks (parameter server).

        None: the launcher runs the usual loop.
        """
        return None

    @classmethod
    def shard(cls, model_parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
        """Shard the stages' weights on the meta device, in place. The default keeps them complete."""

    @classmethod
    def attach(cls, model_parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        """Return the runtime over materialised weights."""
        runtime = cls if plan.num_data_ranks > 1 else DataRuntime
        return runtime(match(model_parts, plan, mesh), plan, mesh)

    def begin_run(self, training: Training, context: WorkerContext, start: int) -> None:
        """Called on all ranks before step `start` + 1, after a checkpoint has been loaded if there is one."""

    def begin_step(self) -> None:
        """Clear the gradients of the last step."""
        for parameter in self.parameters:
            parameter.tensor.grad = None

    def begin_kept(self) -> None:
        """Copy `kept`, if it is of a compression that can undo a step, as it was after the last applied step."""
        self._undo_kept()
        if self._plan.data.exchange_form(self._plan).can_undo:
            self._kept_before = [tensor.clone() for tensor in self._kept_tensors()]

    def _kept_tensors(self) -> list[Tensor]:
        return [parameter.tensor for parameters in self.kept.values() for parameter in parameters]

    @torch.no_grad()
    def _undo_kept(self) -> None:
        if self._kept_before:
            torch_private.copy_all(self._kept_tensors(), [*self._kept_before])
        self._kept_before = ()

    def drop_step(self) -> None:
        """Forget a step that has begun: its gradients are not applied."""
        self.begin_step()

    def launch_gradients(self) -> None:
        """Start every exchange that has not started, without waiting. Called after the last backward pass."""

    def finish_gradients(self) -> None:
        """Complete the gradients of all `parameters`."""
        complete_gradients([parameter.tensor for parameter in self.parameters])

    def finish_update(self) -> None:
        """Copy the optimizer's update into the module's weights. Also called after a checkpoint has been loaded."""
        self._kept_before = ()

    def after_load(self, kept: Sequence[str]) -> None:
        """Called after a checkpoint has been loaded. kept: the kinds of additional tensors that it contains."""

    def after_step(self, step: int) -> None:
        """Called on all ranks at the end of step `step` (from 1), whether or not an update was applied."""
        self._undo_kept()
