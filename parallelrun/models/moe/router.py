"""The router of a layer with experts: logits in at least fp32, random choices by hash, statistics by microbatch."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.models import documents, dropout
from parallelrun.models.functions import accurate_dtype
from parallelrun.models.layers import RoleLayer
from parallelrun.models.local_tokens import ALL
from parallelrun.models.moe.routing import Routing, draws_second, route
from parallelrun.planner.model.model_spec.router import RouterSpec


class HeldDecisions(Protocol):
    """Replaces the scores by which a router decides: `verify` makes two trainings take the same decisions."""

    def scores(self, site: str, training: bool, sample_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: the router's own, of sample_ids (batch,): (batch, seq, num_experts), which is the result's shape."""
        ...


class RoutingOverRanks(Protocol):
    """Routing groups whose tokens several ranks hold."""

    def gathered(self, logits: Tensor) -> Tensor:
        """(batch, own tokens, experts) -> (batch, seq, experts)."""
        ...

    def own(self, routing: Routing) -> Routing:
        """The routing of own tokens out of that of all."""
        ...


class Router(RoleLayer):
    """x (batch, seq, hidden) -> Routing of its tokens, in groups of spec.group_samples samples. Padding behind packed
    documents is routed nowhere.

    local_tokens: the tokens of a sample that x has: all of them, or over_ranks routes those of other ranks too.
    sample_part: (index, count) of the equal part of the microbatch's samples held here; set by the tensor strategy.

    Parameters `weight` (num_experts, hidden), maybe `bias` (num_experts,) and, if spec.bias_rate > 0, the frozen
    `selection_bias` (num_experts,).
    The weight is not rounded to the compute dtype: a router in low precision is unstable (Fedus et al. 2021, 2.4).
    Jitter and the second expert are drawn by hash of seed, site, the sample ids of `dropout.scope` and the token's
    index.
    """

    layer_role = "router"
    uncompiled: ClassVar[tuple[str, ...]] = ("forward",)
    __call__: Any

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        spec: RouterSpec,
        seed: int,
        site: str,
        compute_dtype: torch.dtype,
        has_bias: bool = False,
    ):
        super().__init__(compute_dtype)
        self.spec, self.site = spec, site
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(num_experts)) if has_bias else None
        bias = nn.Parameter(torch.empty(num_experts), requires_grad=False) if spec.bias_rate > 0.0 else None
        self.selection_bias = bias
        self._jitter_key = dropout.site_key(seed, f"{site}.jitter")
        self._second_key = dropout.site_key(seed, f"{site}.second")
        self.decisions: HeldDecisions | None = None
        self.local_tokens, self.sample_part = ALL, (0, 1)
        self.over_ranks: RoutingOverRanks | None = None
        self._seen: dict[int, Tensor] = {}  # by microbatch: recomputation overwrites its own

    def forward(self, x: Tensor) -> Routing:
        spec, batch = self.spec, x.size(0)
        assert batch % spec.group_samples == 0, f"{batch} samples in groups of {spec.group_samples} at {self.site}"
        wide = accurate_dtype(self.compute_dtype)
        x = self._jittered(x.to(wide)) if self.training and spec.jitter > 0.0 else x.to(wide)
        logits = functional.linear(x, self.weight.to(wide), None if self.bias is None else self.bias.to(wide))
        if self.over_ranks is not None:
            logits = self.over_ranks.gathered(logits)
        seq = logits.size(1)
        groups = (batch // spec.group_samples, spec.group_samples * seq)
        packed = documents.SCOPE.documents
        padded = packed.part(*self.sample_part).is_token if packed is not None else None
        uniform = None
        if draws_second(spec, self.training):
            uniform = self._draws(self._second_key, batch, ALL.indices(seq, x.device), 1).view(groups)
        routing = route(
            logits.view(*groups, -1),
            spec,
            training=self.training,
            selection_bias=self.selection_bias,
            uniform=uniform,
            is_token=None if padded is None else padded.view(groups),
            decide=partial(self._decide, batch) if self.decisions is not None else None,
        )
        if self.training:
            ids = dropout.current_sample_ids()
            self._seen[0 if ids is None else ids.data_ptr()] = routing.statistics
        return routing if self.over_ranks is None else self.over_ranks.own(routing)

    def _decide(self, batch: int, scores: Tensor) -> Tensor:
        assert self.decisions is not None
        by_sample = scores.view(batch, -1, scores.size(-1))
        chosen_by = self.decisions.scores(self.site, self.training, self._sample_ids(batch), by_sample)
        return chosen_by.view_as(scores)

    def take_statistics(self) -> Tensor | None:
        """The summed statistics (fp64, see `plan.routing_statistics`) of all microbatches trained on since the last
        call; None if there were none. A recomputed microbatch counts once."""
        seen = list(self._seen.values())
        self._seen.clear()
        return torch.stack(seen).sum(0) if seen else None

    def _jittered(self, x: Tensor) -> Tensor:
        """x times uniform(1 - jitter, 1 + jitter), by element (Fedus et al. 2021)."""
        tokens = self.local_tokens.indices(x.size(1), x.device)
        draws = self._draws(self._jitter_key, x.size(0), tokens, x.size(2))
        return x * (1.0 - self.spec.jitter + 2.0 * self.spec.jitter * draws.to(x.dtype))

    def _draws(self, key: int, batch: int, tokens: Tensor, columns: int) -> Tensor:
        """Uniform numbers in [0, 1) for tokens of each sample, by their global indices: (batch, tokens, columns)."""
        return dropout.uniform(key, self._sample_ids(batch), tokens, ALL.indices(columns, tokens.device))

    def _sample_ids(self, batch: int) -> Tensor:
        return dropout.sample_ids_at(f"the router at {self.site}", batch, self.sample_part)
