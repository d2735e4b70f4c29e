"""`model.from_hf`: the values of `model` that a config.json of Hugging Face transformers stands for.

The registry finds the module `hugging_face` of a model, which knows the fields of its classes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Set
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.model_schema import ModelConfig, RouterConfig
from parallelrun.config.stored_tensors import differ

CONFIG_FILE = "config.json"
_MODULE = "hugging_face"
_MAX_BYTES = 2**22


def families_of(name: str) -> tuple[Any, ...]:
    """The families (`models.hugging_face.Family`) of a model; none if transformers has nothing that corresponds."""
    if registry.is_plug_in("models", name) or not registry.has_submodule("models", name, _MODULE):
        return ()
    families: tuple[Any, ...] = registry.load("models", name, _MODULE).FAMILIES
    return families


def family_at(path: str | Path) -> tuple[str, Any, dict[str, Any], Path]:
    """(our model, its family, the content, the file) of a config.json or of a directory with one.

    Raises ConfigError, naming the file.
    """
    file = Path(os.path.abspath(Path(path).expanduser()))
    file = file / CONFIG_FILE if file.is_dir() else file
    try:
        status = file.stat()
        if not S_ISREG(status.st_mode):
            raise ValueError("it is no file")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(Problem(f"cannot read {file}: {error.strerror}", "model.from_hf")) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem(f"{file} is not JSON: {error}", "model.from_hf")) from error
    families = [(name, family) for name in registry.MODELS for family in families_of(name)]
    by_type = {kind: (name, family) for name, family in families for kind in (family.model_type, *family.also)}
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in by_type:
        cause = f"{file}: model_type is {kind!r:.100}, and known are {', '.join(by_type)}"
        raise ConfigError(Problem(cause, "model.from_hf"))
    name, family = by_type[kind]
    return name, family, content, file


def filled(model: ModelConfig, user_keys: Set[str] = frozenset()) -> ModelConfig:
    """The model of the config.json `model.from_hf`, with our defaults for what it does not say.

    given: the keys that the user or a recipe has set; they keep their values. Raises ConfigError.
    """
    if model.from_hf is None:
        return model
    name, family, content, file = family_at(model.from_hf)
    values = {"name": name, "preset": family.model_type, **family.model_values(content, str(file))}
    if values.get("tied_embeddings") and family.copies and "model.tied_embeddings" not in user_keys:
        values["tied_embeddings"] = not _is_untied(family, file)
    routing = values.pop("router", None)
    own = {key.partition(".")[2] for key in user_keys if key.startswith("model.")}
    router = replace(RouterConfig(), **{**(routing or {}), **_kept(model.router, own, "router.")})
    values |= {"router": router, "own_router": routing is not None, "from_hf": str(file)}
    return replace(ModelConfig(), **{**values, **_kept(model, own - {"from_hf"}, "")})


@lru_cache(maxsize=64)  # the warning is printed once, and the tensors are read once
def _is_untied(family: Any, file: Path) -> bool:
    """Whether the output layer, which config.json ties to the embedding, has values of its own; if so, warn."""
    copy, original = family.copies[0]
    if not differ(file.parent, copy, family.spellings(original)):
        return False
    said = f"{file} says tie_word_embeddings, but {copy} differs from {original}"
    print(f"warning: {said}: they are not tied (model.tied_embeddings=false)", file=sys.stderr)
    return True


def _kept(section: Any, names: Set[str], prefix: str) -> dict[str, Any]:
    return {item.name: getattr(section, item.name) for item in fields(section) if f"{prefix}{item.name}" in names}
