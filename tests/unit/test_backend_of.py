"""What a run records as its backend is what carries its collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallelrun.distributed import comm


def mesh(device: str, process_group: object) -> Any:
    group = SimpleNamespace(process_group=process_group)
    return SimpleNamespace(device=torch.device(device), group=lambda _: group)


@pytest.mark.parametrize(
    ("device", "backend"), [("cuda", "nccl"), ("cuda:1", "nccl"), ("xpu", "xccl"), ("cpu", "gloo")]
)
def test_each_kind_of_device_has_its_backend(device: str, backend: str) -> None:
    assert comm.backend_of(mesh(device, object())) == backend


def test_a_single_rank_has_none() -> None:
    assert comm.backend_of(mesh("cuda", None)) is None
