"""The input of the checks that strategies run before the plan exists."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import BatchSizes
from parallelrun.planner.model.model_spec import ModelSpec


@dataclass(frozen=True)
class Request:
    """The filled degrees and batch, before they are known to be legal. batch: None if it is not divisible.

    servers: ranks in addition to the pp x dp x cp x tp workers.
    """

    config: Config
    spec: ModelSpec
    pp: int
    dp: int
    tp: int
    virtual_stages: int
    batch: BatchSizes | None
    servers: int = 0
    ep: int = 1
    cp: int = 1

    @property
    def num_data_ranks(self) -> int:
        """The ranks over which gradients are summed: the replicas of the data, and the parts of their sequences."""
        return self.dp * self.cp

    @property
    def ep_data_ranks(self) -> int:
        """The ranks of dp x cp that a group of ep covers, of which each has complete experts where ep spans tp, too."""
        return self.ep // self.tp if self.config.strategy.expert.tp == 1 < self.ep else self.ep

    @property
    def ep_replicas(self) -> int:
        """The replicas of the data (ranks of dp) that a group of ep covers, and whose experts it has."""
        return max(1, self.ep_data_ranks // self.cp)
