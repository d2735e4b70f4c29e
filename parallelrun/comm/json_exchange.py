"""Small facts between ranks as JSON text in byte tensors: nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from parallelrun import comm
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import WORLD


def gather_json(value: Any, mesh: Mesh) -> list[Any]:
    """Every rank's `value` (JSON-ready), by rank, on every rank. Collective over the world."""
    group = mesh.group(WORLD)
    if group.size == 1:
        return [json.loads(json.dumps(value))]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(mesh.device)
    length = torch.tensor([data.numel()], device=mesh.device)
    lengths = comm.all_gather(length, group, "control").tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=mesh.device)
    padded[: data.numel()] = data
    rows = comm.all_gather(padded, group, "control").view(group.size, -1).cpu()
    return [json.loads(bytes(row[:count].tolist())) for row, count in zip(rows, lengths)]
