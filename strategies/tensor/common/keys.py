"""The keys of `strategy.tensor` by kind."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import TensorStrategyConfig


@dataclass
class MegatronConfig(TensorStrategyConfig):
    kind: str = "megatron"
    sequence_parallel: bool = key(False, "1d: shard the norms and dropout along the sequence")


@dataclass
class GridConfig(TensorStrategyConfig):
    """Keys of every grid, and all keys of kind=3d. A grid that lacks a key has its neutral value as a property."""

    kind: str = "3d"
    save_gathered: bool = key(True, "2d, 2.5d, 3d: save gathered operands for backward instead of gathering them again")

    @property
    def grid(self) -> str | None:
        return None

    @property
    def depth(self) -> int | None:
        return None

    @property
    def form(self) -> str:
        return "auto"


@dataclass
class Grid2DConfig(GridConfig):
    """Of kind=2d."""

    kind: str = "2d"
    grid: str | None = key(None, "2d, 2.5d: rows x columns, such as 2x3; null: a square", of_degrees=True)
    form: str = key(
        "auto", "2d, 2.5d: operand that is not sent; auto: by volume",
        choices=("auto", "stationary_x", "stationary_y", "stationary_w", "summa"),
    )  # fmt: skip


@dataclass
class Grid25DConfig(Grid2DConfig):
    """Of kind=2.5d."""

    kind: str = "2.5d"
    depth: int | None = key(None, "2.5d: number of grids; null: the largest legal number", least=1, of_degrees=True)
