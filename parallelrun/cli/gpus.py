"""The number of GPUs that this process would see, without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path


def visible_gpus(environment: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """The GPUs that torch would count: the driver's, limited by CUDA_VISIBLE_DEVICES; 0 if torch is built for CPU."""
    environment = os.environ if environment is None else environment
    try:
        present = sum(1 for path in devices.iterdir() if re.fullmatch(r"nvidia\d+", path.name))
    except OSError:
        return 0
    if not present or _torch_is_cpu_only():
        return 0
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    entries = [entry.strip() for entry in chosen.split(",")]
    listed = takewhile(lambda entry: entry and not entry.startswith("-"), entries)  # CUDA stops at an invalid entry
    return min(len(list(listed)), present)


def _torch_is_cpu_only() -> bool:
    from importlib import metadata  # imported late: only hosts with GPUs need it

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True
