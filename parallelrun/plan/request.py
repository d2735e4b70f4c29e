"""What a strategy is asked about before the plan exists. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.plan.structure import Batch


@dataclass(frozen=True)
class Request:
    """The degrees and batch as filled, before they are known to be legal. batch is None if it does not divide.

    servers: ranks beside the dp x tp x pp workers.
    """

    config: Config
    spec: ModelSpec
    pp: int
    dp: int
    tp: int
    virtual_stages: int
    batch: Batch | None
    servers: int = 0
    ep: int = 1
