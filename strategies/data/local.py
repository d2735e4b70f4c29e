"""What every data strategy's runtime starts from: the stage modules' parameters matched to the plan, and the case
dp=1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.mesh import Mesh
from parallelrun.plan.parameters import HeldParameter, LocalParameter, held_parameters
from parallelrun.plan.structure import Plan

Pair = tuple[HeldParameter, nn.Parameter]


def match(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> list[Pair]:
    """(what the plan says is held, the module's Parameter), in the plan's order. Every Parameter is in exactly one."""
    pp_rank = mesh.coordinate.get("pp", 0)
    part_of = {stage.index: part for stage, part in zip(plan.stages_of(pp_rank), parts, strict=True)}
    pairs = [(held, part_of[held.stage].get_parameter(held.name)) for held in held_parameters(plan, pp_rank)]
    known = {id(parameter) for _, parameter in pairs}
    strangers = [name for part in parts for name, value in part.named_parameters() if id(value) not in known]
    assert not strangers, f"not in the plan's spec: {strangers}"
    assert len(known) == len(pairs), "two logical parameters are one tensor"
    return pairs


def set_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Give a local tensor its gradient; one that backward did not reach gets zeros, so that all plans decay alike.

    A split backward (zero bubble) leaves what the product gives, in any strides, and torch's fused optimizers on CPU
    read it as if it lay like the weight.
    """
    tensor.grad = torch.zeros_like(tensor) if gradient is None else gradient.contiguous()


def by_axis(buffers: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Flat buffers by the axis that each is summed over."""
    found: dict[str, list[Tensor]] = {}
    for axis, buffer in buffers:
        found.setdefault(axis, []).append(buffer)
    return found


def trained(pairs: Sequence[Pair]) -> list[Pair]:
    """Those that the optimizer updates."""
    return [pair for pair in pairs if not pair[0].spec.frozen]


def frozen(pairs: Sequence[Pair]) -> list[Pair]:
    """Those that keep their values."""
    return [pair for pair in pairs if pair[0].spec.frozen]


class LocalRuntime:
    """The DataRuntime of a data axis of degree 1: gradients are final as backward leaves them.

    parameters: what is updated. frozen: what is not, whole on every rank of dp unless the way splits weights.
    kept: what else checkpoints hold, by kind, alike on all replicas (diloco: its outer state).
    flat_gradients: by the axis that they are summed over (`replica_axis`), buffers that hold the gradients of all
    `parameters` of that axis after `finish_gradients`, and else only zeros. Axes that are not there have none.
    """

    flat_gradients: Mapping[str, Sequence[Tensor]] = MappingProxyType({})
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({})

    def __init__(self, pairs: Sequence[Pair]):
        self.parameters = [_whole(*pair) for pair in trained(pairs)]
        self.frozen = [_whole(*pair) for pair in frozen(pairs)]

    def begin_run(self, training: Any, context: Any, start: int) -> None:
        """Called on all ranks before step `start` + 1, when a checkpoint has been loaded if there is one.

        training: `train.build.Training`. context: `context.WorkerContext`.
        """

    def end_run(self) -> None:
        """Called after the last step, and when the run fails."""

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for parameter in self.parameters:
            parameter.tensor.grad = None

    def launch_gradients(self) -> None:
        """Backward is over: start every exchange that has not begun, without waiting for any."""

    def finish_gradients(self) -> None:
        """Every gradient is there, zeros included."""
        for parameter in self.parameters:
            set_gradient(parameter.tensor, parameter.tensor.grad)

    def finish_update(self) -> None:
        """The weights are what was updated."""

    def after_load(self, kept: Sequence[str]) -> None:
        """Called when a checkpoint has been loaded, with the kinds of `kept` that it was saved with."""

    def after_step(self, step: int) -> None:
        """Called on all ranks at the end of step `step` (from 1), whether or not an update was applied."""


def _whole(held: HeldParameter, parameter: nn.Parameter) -> LocalParameter:
    return LocalParameter(held.name, parameter, held.spec, held.layout, held.shared)
