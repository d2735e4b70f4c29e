"""The reference rules of compressed sums: the result of n workers' gradients, one tensor after the other.

They share with the runtime only the arithmetic of one matrix and the choice of factored tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.parameters import HeldParameter, held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.training.verify.replay import ReplayRule

from ..bucketed_plan import BucketedAllReduce
from .plan import HalfPrecision, PowerSGD, matrix_sizes
from .powersgd import first_right_factor, next_right_factor, orthonormal

Tensors = dict[str, Tensor]
StoredPart = tuple[HeldParameter, tuple[int, ...], tuple[slice, ...]]


def rule(config: Config, plan: Plan) -> ReplayRule:
    """The rule of a strategy whose gradients are compressed sums, over dp or over a process set."""
    compression = BucketedAllReduce.of(plan).compression
    if isinstance(compression, HalfPrecision):
        return HalfSumRule(plan, getattr(torch, compression.sent_dtype))
    return PowerSGDRule(plan, compression) if isinstance(compression, PowerSGD) else ReplayRule()


class HalfSumRule(ReplayRule):
    """Rounds gradients and sums to 16 bits, but for experts without copies."""

    def __init__(self, plan: Plan, dtype: torch.dtype):
        self._plan, self._dtype = plan, dtype
        self._layouts = {name: next(iter(parts.values()))[0].layout for name, parts in stored_parts(plan).items()}

    def gradients(self, step: int, local: list[Tensors]) -> list[Tensors]:
        """Sums of rounded gradients, in the order of the workers."""
        total: Tensors = {}
        for name, layout in self._layouts.items():
            first, *others = of_senders([replica[name] for replica in local], layout, self._plan)
            summed = first.to(self._dtype) if has_copies(layout, self._plan) else first
            for gradient in others:
                summed = summed + gradient.to(self._dtype)
            total[name] = summed.to(first.dtype)
        return [{name: value.clone() for name, value in total.items()} for _ in local]


class PowerSGDRule(ReplayRule):
    """Replaces matrices by P Q^T; a worker adds the error of its own P Q^T to its next gradient."""

    def __init__(self, plan: Plan, compression: PowerSGD):
        self._rank = compression.rank
        self._parts = stored_parts(plan)
        self._factored = {
            (name, key)
            for name, places in self._parts.items()
            for key, (parameter, shape, _) in places.items()
            if compression.is_factored(parameter, shape, plan) and has_copies(parameter.layout, plan)
        }
        self._plan = plan
        self._errors: dict[tuple[str, str, int], list[Tensor]] = {}
        self._right: dict[tuple[str, str, int], Tensor] = {}

    def gradients(self, step: int, local: list[Tensors]) -> list[Tensors]:
        """Sums of the tensors that are not factored, approximations of the others."""
        out = super().gradients(step, local)
        for name, key in sorted(self._factored):
            parameter, shape, place = self._parts[name][key]
            senders = of_senders([replica[name][place] for replica in local], parameter.layout, self._plan)
            stacks = zip(*(gradient.reshape(matrix_sizes(parameter, shape)) for gradient in senders))
            each = [self._approximate((name, key, number), matrix) for number, matrix in enumerate(stacks)]
            approximation = torch.stack(each).reshape(shape)
            for replica in out:
                replica[name][place] = approximation
        return out

    def _approximate(self, key: tuple[str, str, int], gradients: Sequence[Tensor]) -> Tensor:
        """P Q^T of a matrix, from each sender's gradient of it. key: the parameter, its part, number of the matrix."""
        errors = self._errors.get(key) or [torch.zeros_like(gradient) for gradient in gradients]
        first = first_right_factor(key[0], gradients[0].shape[1], self._rank).to(gradients[0])
        right = self._right.get(key, first)
        corrected = [gradient + error for gradient, error in zip(gradients, errors)]
        left = orthonormal(sum((matrix @ right for matrix in corrected), torch.zeros_like(corrected[0] @ right)))
        answers = [matrix.T @ left for matrix in corrected]
        self._errors[key] = [matrix - left @ answer.T for matrix, answer in zip(corrected, answers)]
        summed = torch.stack(answers).sum(0)
        self._right[key] = next_right_factor(summed, first)
        return left @ summed.T


def has_copies(layout: Layout, plan: Plan) -> bool:
    """Whether a gradient is sent: not that of experts where ep is all of dp."""
    return plan.mesh.size(replica_axis(layout, plan)) > 1


def of_senders(gradients: list[Tensor], layout: Layout, plan: Plan) -> list[Tensor]:
    """The gradients of those who send one: each worker, or each group of ep, whose experts see the tokens of it all."""
    span = plan.num_replicas // plan.mesh.size(replica_axis(layout, plan))
    return [torch.stack(gradients[first : first + span]).sum(0) for first in range(0, len(gradients), span)]


def stored_parts(plan: Plan) -> dict[str, dict[str, StoredPart]]:
    """Per trained parameter, by a key of its place: (HeldParameter, local shape, place) of each part that ranks store
    before any data strategy."""
    out: dict[str, dict[str, StoredPart]] = {}
    for rank in range(plan.num_workers):
        coordinate = plan.mesh.coordinate(rank)
        for parameter in held_parameters(plan, coordinate["pp"]):
            if not parameter.shared and not parameter.spec.frozen:
                ranges = parameter.layout.ranges(parameter.spec.shape, plan.mesh.sizes, coordinate)
                shape = tuple(stop - start for start, stop in ranges)
                slices = tuple(slice(start, stop) for start, stop in ranges)
                out.setdefault(parameter.name, {})[str(ranges)] = (parameter, shape, slices)
    return out
