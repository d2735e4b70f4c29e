"""The keys of `strategy.context` with kind=ulysses. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.run_schema import ContextConfig


@dataclass
class UlyssesContextConfig(ContextConfig):
    """Keys of `strategy.context` with kind=ulysses: each rank attends to complete sequences, in their order."""

    kind: str = "ulysses"
