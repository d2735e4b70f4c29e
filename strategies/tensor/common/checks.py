"""Checks that tensor strategies share: sizes that divide, and layers of a user's module that lack a role."""

from __future__ import annotations

import re
import shlex

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import ModelSpec

_ROOT = "module."  # prefix of the layers of a user's module in their names


def wrong_role(message: str, request: Request, layer: str, role: str) -> Problem:
    """Return the problem of a layer; the fix is `model.roles={...}` as a shell takes it (the roles that are given, and
    `role` for that layer) where the layer can have that role."""
    fits = any(spec.name == layer and role in spec.possible_roles for spec in request.spec.layers())
    roles = {**request.config.model.roles, layer.removeprefix(_ROOT): role}
    entries = ", ".join(f"{_key(name)}: {layer_role}" for name, layer_role in roles.items())
    fix = f"{shlex.quote(f'model.roles={{{entries}}}')} or tp=1" if fits else "tp=1"
    return Problem(message, "model.roles", fix, kind="undefined")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w.*]+", name) else f'"{name}"'


def legal_sizes(key: str, size: int, parts: int, spec: ModelSpec) -> list[int]:
    """Return values of the size at `key` that divide by `parts`, as far as the rest of the model allows them."""
    if key == "model.heads" and not spec.latent:
        groups = spec.kv_heads if spec.kv_heads != spec.heads else 1  # as many as heads: they follow
        possible = multiples(size, parts) if spec.head_dim else divisors(spec.hidden)
        return [heads for heads in possible if heads % parts == 0 and heads % groups == 0]
    if key == "model.kv_heads":
        return [heads for heads in divisors(spec.heads) if heads % parts == 0]
    return multiples(size, parts) if key.startswith("model.") else []


def multiples(size: int, step: int) -> list[int]:
    """Return the multiples of `step` around `size`."""
    below = size // step * step
    return [n for n in (below, below + step) if n > 0]
