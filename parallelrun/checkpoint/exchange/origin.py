"""The directories from which a model comes, and what they hold beside weights and settings that parallelrun reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parallelrun.base.errors import CheckpointError, ConfigError, Problem
from parallelrun.checkpoint.exchange.paths import absolute
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.checkpoint.files import sync, write_json
from parallelrun.checkpoint.index import INDEX_FILE
from parallelrun.checkpoint.resume import CONFIG_FILE, saved_config
from parallelrun.config import from_hf
from parallelrun.config.kept_model import GENERATION, TOKENIZER
from parallelrun.config.stored_tensors import SHARD_INDEX, SINGLE_FILE

if TYPE_CHECKING:
    from parallelrun.config.schema.run_schema import Config

BASE_CONFIG = "base_config.json"  # the config.json of an imported checkpoint, which is no directory of transformers
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".pkl", ".npz"}
NOT_KEPT = ("quantization_config", "num_nextn_predict_layers", "num_mtp_layers")  # describe weights that are not read
_WRITTEN = {from_hf.CONFIG_FILE, BASE_CONFIG, CONFIG_FILE, INDEX_FILE, SHARD_INDEX, SINGLE_FILE, *TOKENIZER, GENERATION}
_OF_ADAPTERS = "adapter_"  # begins the names of files that would change what the model computes


def directories(source: StoredModel) -> Iterator[Path]:
    """The directory of the model, then the one with whose weights its run started, that run's own start, ...; at the
    end that of its `model.path`."""
    folder, config = source.path, cast("Config | None", source.config)
    passed: set[Path] = set()
    while folder not in passed:
        passed.add(folder)
        yield folder
        started = config.init.weights if config else None
        if started is None:
            break
        folder, config = absolute(started), None
        if not (folder / from_hf.CONFIG_FILE).is_file():
            with suppress(CheckpointError):
                config = next(filter(None, map(saved_config, (folder, *folder.parents[:2]))), None)
    if source.config.model.path is not None and (described := absolute(source.config.model.path)).is_dir():
        yield described


def base_config(source: StoredModel, model_type: str | None = None) -> dict[str, Any]:
    """The fields of the config.json from which the model comes; none if there is none, or if it is of another type.

    Raises ConfigError for a file that is no JSON.
    """
    named = source.config.model.from_hf
    files = [folder / name for folder in directories(source) for name in (from_hf.CONFIG_FILE, BASE_CONFIG)]
    for file in [*files, *([Path(named)] if named else [])]:
        if content := json_object(file):
            return content if model_type in (None, content.get("model_type")) else {}
    return {}


def json_object(file: Path) -> dict[str, Any]:
    """The content of a file; nothing if there is none. Raises ConfigError for a file that is no JSON."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(Problem(f"{file} is not JSON: {error}", str(file))) from error
    return content if isinstance(content, dict) else {}


def write_others(source: StoredModel, out: Path, for_transformers: bool) -> None:
    """Copy into `out` the files that parallelrun does not understand, such as chat_template.jinja and a licence; for a
    directory of our own also the base's config.json, under another name."""
    for name, path in _others(source).items():
        if _is_kept(path):
            copy(path, out / name)
    if not for_transformers and (base := base_config(source)):
        write_json(out / BASE_CONFIG, base)


def copy(path: Path, target: Path) -> None:
    """Copy a file, and wait until it is on the disk."""
    shutil.copyfile(path, target)
    sync(target)


def left_out(source: StoredModel) -> list[str]:
    """Return texts on what is neither read nor copied: folders, weights, adapters, tensors, fields of config.json."""
    paths = [str(path) for path in _others(source).values() if not _is_kept(path)]
    fields = [f"{key} of {from_hf.CONFIG_FILE}" for key in base_config(source) if key in NOT_KEPT]
    notes = [f"left out: {text}" for text in [*paths, *source.weights.unread, *fields]]
    if source.config.model.from_hf and not base_config(source):
        notes.append(f"{source.config.model.from_hf} is gone: its other fields are not in {from_hf.CONFIG_FILE}")
    return notes


def _others(source: StoredModel) -> dict[str, Path]:
    """The files and folders that are neither written anew nor hidden, by name; those of the nearest directory win."""
    paths: dict[str, Path] = {}
    for folder in directories(source):
        if any((folder / name).is_file() for name in (from_hf.CONFIG_FILE, INDEX_FILE, SHARD_INDEX, SINGLE_FILE)):
            paths = {path.name: path for path in sorted(folder.iterdir()) if not _is_written(path)} | paths
    return paths


def _is_written(path: Path) -> bool:
    is_shard = path.suffix == ".safetensors" and path.name.startswith(("model-", "rank_"))
    return path.name.startswith(".") or path.name in _WRITTEN or is_shard


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.suffix not in _WEIGHTS and not path.name.startswith(_OF_ADAPTERS)
