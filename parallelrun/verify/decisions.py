"""The same routing decisions in both trainings that `verify` compares, where rounding may move scores that nearly tie.

Which expert a token goes to jumps: two scores that are equal but for rounding can fall either way, and then gradients
differ by much more than the rounding. So where rounding is part of what is compared (gradients summed in fp16, or a
check in fp32) the reference decides by the scores that the plan's routers had, and the scores themselves are compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallelrun.config.schema import Config
from parallelrun.models.moe.router import Router
from parallelrun.plan.structure import Plan
from parallelrun.train.build import Training

Scores = dict[str, Tensor]  # by site, phase and sample: (seq, num_experts)


def are_held(config: Config, plan: Plan) -> bool:
    """Whether the reference takes the plan's routing decisions."""
    rounds = plan.equivalence.bound is not None or config.verify.precision != "fp64"
    return plan.spec.router is not None and rounds


class RecordedDecisions:
    """Keeps the scores of every router; held: decide by these instead, where given."""

    def __init__(self, held: Scores | None = None):
        self.recorded: Scores = {}
        self._held = held

    def attach(self, training: Training) -> None:
        """Let every router of this rank ask here."""
        for part in training.parts:
            for module in part.modules():
                if isinstance(module, Router):
                    module.decisions = self

    def scores(self, site: str, training: bool, sample_ids: Tensor, scores: Tensor) -> Tensor:
        phase = "training" if training else "validation"
        names = [f"{site}, {phase} sample {number}" for number in sample_ids.tolist()]
        self.recorded |= {name: own.to("cpu", copy=True) for name, own in zip(names, scores, strict=True)}
        if self._held is None:
            return scores
        return torch.stack([self._held[name] for name in names]).to(scores)
