"""How many GPUs this process would see, without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environment: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """GPUs that torch would count: the driver's devices cut by CUDA_VISIBLE_DEVICES; 0 with a torch built for CPU."""
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
    listed = 0
    for entry in chosen.split(","):
        entry = entry.strip()
        if not entry or entry.startswith("-"):  # CUDA stops at the first invalid entry
            break
        listed += 1
    return min(listed, present)


def _torch_is_cpu_only() -> bool:
    from importlib import metadata  # here: a host without GPUs never pays for it

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True
