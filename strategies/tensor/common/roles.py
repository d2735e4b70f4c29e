"""What a user may type where a layer of their own module lacks the role that a tensor strategy needs. Torch-free."""

from __future__ import annotations

import re
import shlex

from parallelrun.config.schema import Config
from parallelrun.model_spec import LayerSpec, ModelSpec

_ROOT = "module."  # prefix of the layers of a user's module in their names


def suggestion(config: Config, layer: str, role: str) -> str:
    """`model.roles={...}` as a shell takes it: the roles that are given, and `role` for that layer."""
    roles = {**config.model.roles, layer.removeprefix(_ROOT): role}
    entries = ", ".join(f"{_key(name)}: {given}" for name, given in roles.items())
    return shlex.quote(f"model.roles={{{entries}}}")


def could_be(spec: ModelSpec, role: str) -> str | None:
    """The first layer without a role that could have that one."""
    return next((layer.name for layer in spec.layers() if not layer.layer_role and fits(layer, role)), None)


def fits(layer: LayerSpec, role: str) -> bool:
    """Whether a module of this layer's kind can have that role."""
    return role in layer.possible_roles


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w.*]+", name) else f'"{name}"'
