"""The safetensors files of a directory, and their checked headers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.checkpoint.files import write_bytes
from parallelrun.checkpoint.schema import read_header
from parallelrun.config.stored_tensors import SHARD_INDEX, SINGLE_FILE

_MAX_INDEX_BYTES = 2**28


def damaged(path: Path, cause: str) -> CheckpointError:
    """The error for a file that is not what its name says."""
    return CheckpointError(Problem(f"{path} is damaged: {cause}"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new file and wait until it is on the disk. Raises OSError."""
    write_bytes(path, json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n")


def files_of_keys(path: Path) -> dict[str, Path]:
    """The safetensors file of every key of a directory: one file, or shards with an index. Raises CheckpointError."""
    index = path / SHARD_INDEX
    if not index.is_file():
        file = path / SINGLE_FILE
        return dict.fromkeys(read_entries(file), file)
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = dict(weight_map)
        if wrong := [name for name in names.values() if not isinstance(name, str) or name != os.path.basename(name)]:
            raise ValueError(f"{wrong[0]!r:.100} is no file of the same directory")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(index, f"it is no index of safetensors files ({error})") from error
    return {key: path / name for key, name in names.items()}


def read_entries(file: Path) -> dict[str, Any]:
    """The checked header of a safetensors file, without its metadata. Raises CheckpointError."""
    try:
        header, num_bytes = read_header(file)
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        for key, entry in entries.items():
            shape, (start, stop) = entry["shape"], entry["data_offsets"]
            if any(type(size) is not int or size < 0 for size in shape) or not 0 <= start <= stop <= num_bytes:
                raise ValueError(f"{key} has the shape {shape} at bytes {start} to {stop} of {num_bytes}")
        return entries
    except FileNotFoundError as error:
        raise CheckpointError(Problem(f"there is no {file}")) from error
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {file}: {error.strerror}")) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file, f"it is no safetensors file ({error})") from error
