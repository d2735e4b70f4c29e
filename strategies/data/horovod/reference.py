"""The reference rules of horovod: means within process sets, and Adasum in pairs of workers."""

from __future__ import annotations

import torch
from torch import Tensor

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.verify.replay import OwnGradientsRule, ReplayRule, Tensors

from ..common.compression.reference import rule as rule_of_sum
from ..common.compression.reference import stored_parts
from .checks import ADASUM
from .plan import Horovod


def rule(config: Config, plan: Plan) -> ReplayRule:
    strategy = Horovod.of(plan)
    sets = list(strategy.worker_sets) or [tuple(range(plan.num_replicas))]
    if strategy.reduction == ADASUM:
        return AdasumRule(plan, sets, getattr(torch, strategy.update_dtype(plan)))
    if strategy.process_sets:
        return ProcessSetRule({members: rule_of_sum(config, plan) for members in sets})
    return rule_of_sum(config, plan)


class ProcessSetRule(ReplayRule):
    """Averages the gradients within each process set. rules: of the sums of each set."""

    def __init__(self, rules: dict[tuple[int, ...], ReplayRule]):
        self._rules = rules

    def gradients(self, step: int, local: list[Tensors]) -> list[Tensors]:
        """Return the mean over its process set for each worker."""
        out: list[Tensors] = [{} for _ in local]
        for members, rule in self._rules.items():
            for worker, summed in zip(members, rule.gradients(step, [local[member] for member in members])):
                out[worker] = {name: value / len(members) for name, value in summed.items()}
        return out


class AdasumRule(OwnGradientsRule):
    """Every worker steps by its own gradient; then the workers' updates are combined, in pairs and pairs of pairs."""

    def __init__(self, plan: Plan, sets: list[tuple[int, ...]], dtype: torch.dtype):
        self._parts = stored_parts(plan)
        self._sets, self._dtype = sets, dtype
        self._before: list[Tensors] = []

    def begin(self, weights: list[Tensors]) -> None:
        """Keep a copy of the weights from which the first update starts."""
        self._before = [{name: value.clone() for name, value in tensors.items()} for tensors in weights]

    def after_update(self, step: int, weights: list[Tensors]) -> None:
        """Set the weights to those before the update plus the combination of the updates of the set's workers."""
        for members in self._sets:
            for name, parts in self._parts.items():
                for _, _, place in parts.values():
                    before = self._before[members[0]][name][place]
                    updates = [weights[member][name][place] - self._before[member][name][place] for member in members]
                    combined = self._combine([update.to(self._dtype) for update in updates])
                    for member in members:
                        weights[member][name][place] = before + combined.to(before.dtype)
        self.begin(weights)

    def _combine(self, updates: list[Tensor]) -> Tensor:
        while len(updates) > 1:
            updates = [self._pair(a, b) for a, b in zip(updates[::2], updates[1::2])]
        return updates[0]

    def _pair(self, a: Tensor, b: Tensor) -> Tensor:
        """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b; a vector of zeros changes nothing."""
        dot = float((a.double() * b.double()).sum())
        squares = [float(vector.double().square().sum()) for vector in (a, b)]
        of_a, of_b = (1 - dot / (2 * square) if square else 1.0 for square in squares)
        wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
        return (a.to(wide) * of_a + b.to(wide) * of_b).to(a.dtype)
