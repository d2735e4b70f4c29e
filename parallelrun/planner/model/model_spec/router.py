"""How layers with experts route."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

OWN = "own"  # kind of the router of somebody else's module


@dataclass(frozen=True)
class RouterSpec:
    """How every layer with experts chooses them: the resolved `config.schema.run_schema.RouterConfig` (see there).

    Of a router of kind `own` only top_k is known, and its experts have no capacity.
    """

    kind: str
    top_k: int
    score: str
    renormalise: str
    scaling: float
    capacity_factor: float | None
    eval_capacity_factor: float | None
    min_capacity: int
    drop_policy: str
    second_expert: str
    group_samples: int
    aux_coefficient: float
    z_coefficient: float
    jitter: float
    bias_rate: float
    n_group: int = 1
    topk_group: int = 1

    @property
    def limited(self) -> bool:
        """Whether experts have a capacity; under expert choice they always have."""
        return self.capacity_factor is not None or self.kind == "expert_choice"

    @property
    def is_own(self) -> bool:
        """Whether the router is part of somebody else's module."""
        return self.kind == OWN

    @property
    def choice(self) -> str:
        """How a token gets its experts, such as `top-2 (gshard)`."""
        if self.kind == "expert_choice":
            return f"{self.top_k} per token on average, chosen by the experts"
        kind = {"top_k": "", OWN: " (the model's own router)"}.get(self.kind, f" ({self.kind})")
        return f"top-{self.top_k}{kind}"

    def capacity(self, num_tokens: int, num_experts: int, training: bool = True) -> int:
        """The capacity of an expert for a routing group of `num_tokens`; all of them without a limit.

        top_k x tokens / experts x factor (GShard), rounded up; at least min_capacity, at most num_tokens.
        """
        factor = self.capacity_factor
        if not training and self.eval_capacity_factor is not None:
            factor = self.eval_capacity_factor
        if factor is None and self.kind == "expert_choice":
            factor = 1.0
        if factor is None:
            return num_tokens
        exact = Fraction(str(factor))  # in floats, 50 * 1.1 / 5 is more than 11 and rounds up to 12
        share = ceil(num_tokens * self.top_k * exact / num_experts)
        return min(num_tokens, max(share, self.min_capacity))
