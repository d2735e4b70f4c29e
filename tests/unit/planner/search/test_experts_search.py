"""What a search of models with experts finds on the machines on which they were trained."""

from __future__ import annotations

import pytest

from parallelrun.planner.search.fastest_plans import search
from tests.matrix import FULL
from tests.unit.config.test_presets import composed


def best_of(*words: str, world: int):
    config = composed(*words, "precision=bf16").config
    return search(config, frozenset(word.partition("=")[0] for word in words), world, keep=1).best[0]


def test_mixtral_on_64_h100_has_an_expert_a_rank():
    found = best_of("model=mixtral_8x7b", "model.seq=4096", "cluster=h100_dgx", "global_batch=128", world=64)
    assert "ep=8" in found.overrides and 0.3 < found.time.mfu < 0.5


@pytest.mark.skipif(not FULL, reason="takes ten seconds")
def test_deepseek_v3_on_2048_h800_spreads_its_experts_and_reaches_what_was_published():
    """38.9 % of the peak by DeepSeek's count of 2025, about half of that in its report of 2024."""
    found = best_of("model=deepseek_v3", "cluster=h800", "global_batch=15360", "stack=megatron_core", world=2048)
    ep = next(int(word.partition("=")[2]) for word in found.overrides if word.startswith("ep="))
    assert ep >= 16 and 0.25 < found.time.mfu < 0.45
