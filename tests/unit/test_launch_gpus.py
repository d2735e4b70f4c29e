"""device=cuda without the GPUs for it: exit 3 with numbers, before any process."""

from __future__ import annotations

import pytest
import torch

from parallelrun.errors import EnvironmentProblem
from parallelrun.launch import preflight
from tests.plans import tiny_config, tiny_plan


@pytest.mark.parametrize(
    ("gpus", "visible", "words"),
    [
        (0, None, "device=cuda, and 0 GPUs are visible"),
        (0, "", r"0 GPUs are visible \(CUDA_VISIBLE_DEVICES=''\)"),
        (2, "0,1", r"4 ranks on this host, one GPU each, and 2 are visible \(CUDA_VISIBLE_DEVICES='0,1'\)"),
        (2, "1,1", "CUDA_VISIBLE_DEVICES='1,1' names a GPU twice"),
    ],
)
def test_missing_gpus_are_refused_with_numbers(monkeypatch, gpus, visible, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = {"dp": 4, "device": "cuda"}
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        preflight.check(tiny_config(wanted), tiny_plan(wanted), None)
    assert caught.value.exit_code == 3
