"""The logical parameters of a model, and how they are initialised."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Initialiser:
    """kind: normal(0, std), zeros, ones, uniform(-std, std), or own (a user's module initialises itself, seeded)."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One logical parameter of the one-device model. Logical parameters are never fused (wq, wk, wv are three).

    heads: the number of attention heads in dim 0 (kv heads for wk, wv, and for a norm of all keys), None if it has
    none. frozen: it keeps its initial or resumed values, without gradient and optimizer state. is_adapter: weights
    without adapters have none of it, and it starts with its initial values. stored: its dtype, as named in torch; None:
    that of the precision table.
    """

    name: str
    shape: tuple[int, ...]
    initialiser: Initialiser
    layer_role: str
    heads: int | None = None
    frozen: bool = False
    is_adapter: bool = False
    stored: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def weight_and_bias(
    name: str, shape: tuple[int, ...], initialiser: Initialiser, role: str, bias: bool = True, heads: int | None = None
) -> tuple[ParameterSpec, ...]:
    """The parameters of a layer or of one of its outputs: a weight and, with `bias`, a zero bias over dim 0."""
    weight = ParameterSpec(f"{name}.weight", shape, initialiser, role, heads)
    return (weight, ParameterSpec(f"{name}.bias", shape[:1], Initialiser("zeros"), role, heads)) if bias else (weight,)
