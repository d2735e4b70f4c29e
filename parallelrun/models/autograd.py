"""Typed calls of `torch.autograd.Function.apply`, which torch leaves untyped."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Tensor:
    """Apply a function of one result."""
    out: Tensor = function.apply(*arguments)
    return out


def apply_to_all(function: type[Function], *arguments: Any) -> tuple[Tensor, ...]:
    """Apply a function of several results."""
    out: tuple[Tensor, ...] = function.apply(*arguments)
    return out
