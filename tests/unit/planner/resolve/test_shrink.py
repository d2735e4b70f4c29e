"""The smallest plan with the structure of a large one: what makes plans differ stays, on at most 16 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import parallelrun as pr
from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.config import compose, overrides
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve import shrink
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.shrink import MOST_RANKS, features, shrunk
from tests.matrix import every

LARGE = {
    "gpt_1t on 3072 ranks": "model=gpt_1t strategy=ptdp tp=8 pp=64 dp=6 global_batch=3072 microbatches=512",
    "kv heads on several ranks, uneven stages": "model=llama3_70b strategy=ptdp tp=16 pp=4 dp=16 global_batch=1024",
    "interleaved": "model=gpt3_175b tp=8 pp=12 dp=4 global_batch=1536 schedule=interleaved virtual_stages=4",
    "2d": "model=llama3_70b strategy=tp2d tp=32 grid=4x8",
    "2.5d": "model=llama3_70b strategy=tp25d tp=32 depth=2",
    "3d": "model=gpt3_13b strategy=tp3d tp=8 dp=16",
    "experts in stages": "model=deepseek_v3 strategy=gshard ep=64 dp=128 pp=16 global_batch=4096",
    "latent attention, groups of experts, tp": "model=deepseek_v3 strategy=dropless ep=64 dp=128 tp=4 "
    "global_batch=4096 model.rope_scaling=yarn model.rope_factor=40 model.rope_mscale_all_dim=1",
    "latent keys and values alone": "model=deepseek_v2_lite strategy=zero1 dp=8 tp=2 global_batch=64",
    "experts and tp": "model=mixtral_8x7b strategy=dropless ep=8 dp=16 tp=4",
    "wide heads with norms, 2d": "model=qwen3_8b tp=4 layout=2d dp=4 model.head_dim=256",
    "a window over cp": "model=mistral_7b cp=4 tp=2 dp=2",
    "experts with biases, sinks, windows in turn": "model=gpt_oss_120b strategy=dropless ep=8 dp=8 tp=2 model.seq=4096",
    "hsdp": "model=llama3_8b strategy=hsdp dp=64 global_batch=64 strategy.data.shard=8",
    "hierarchical": "model=llama3_8b strategy=ring dp=64 global_batch=64 strategy.data.algorithm=hierarchical "
    "strategy.data.group_size=8",
    "cp, fsdp, tp": "model=llama3_8b strategy=fsdp cp=8 dp=4 tp=2 model.seq=32768",
    "usp in stages": "model=llama3_8b cp=8 pp=4 strategy.context.kind=usp strategy.context.ulysses=4 model.seq=32768",
    "experts over cp": "model=mixtral_8x7b strategy=dropless ep=8 dp=4 cp=4 global_batch=64",
    "servers": "model=gpt2_1.5b strategy=ps world=10 servers=2",
    "bert, zero1, full recomputation": "model=bert_large strategy=zero1 dp=16 tp=4 recompute=full",
}


def planned(words: str) -> tuple[Config, Plan]:
    found, _ = overrides.read(words.split(), False, "plan")
    composed, _ = compose.compose_once(compose.prepare(found, (), "plan", False))
    return composed.config, resolve(composed.config, given=composed.given)


@pytest.mark.parametrize("words", every(2, LARGE.values()), ids=every(2, LARGE))
def test_the_structure_stays_on_few_ranks(words):
    config, plan = planned(words)
    found = shrunk(config, plan)
    assert found.lost == () and features(found.plan) == features(plan)
    assert found.plan.world <= MOST_RANKS and found.plan.spec.num_parameters < 200_000
    for axis, degree in plan.mesh.sizes.items():
        assert (found.plan.mesh.size(axis) >= 2) == (degree >= 2), axis
    assert resolve(found.config).degrees == found.plan.degrees  # as the ranks read it


def test_what_needs_more_ranks_is_named():
    config, plan = planned("model=llama3_70b strategy=tp25d tp=32 depth=2 pp=4 dp=4 schedule=1f1b")
    found = shrunk(config, plan)
    assert found.lost and set(found.lost) < set(features(plan)) and found.plan.world <= MOST_RANKS


def test_features_tell_plans_apart():
    """Each change shows, so that a shrunk plan without it would not count as alike."""
    _, plan = planned("model=llama3_8b tp=2 pp=2 dp=2 global_batch=24")
    for words in (
        "tp=16 dp=1 pp=1", "tp=2 pp=2 dp=2 schedule=gpipe", "tp=2 pp=2 dp=2 microbatches=2",
        "tp=2 pp=2 dp=2 strategy.pipeline.partition=uniform",
        "tp=2 pp=2 dp=2 recompute=full", "tp=2 pp=2 dp=2 strategy.tensor.sequence_parallel=true",
        "tp=2 pp=2 dp=2 model.vocab=1001", "tp=2 pp=2 dp=2 strategy=zero1",
    ):  # fmt: skip
        _, other = planned(f"model=llama3_8b global_batch=24 {words}")
        assert features(other) != features(plan), words


def test_a_model_of_images_is_refused():
    with pytest.raises(ConfigError, match="only models of transformer layers"):
        shrunk(*planned("model=resnet50 dp=2"))


def test_a_structure_without_a_small_plan_is_refused(monkeypatch):
    config, plan = planned("model=llama3_8b tp=2")
    monkeypatch.setattr(shrink, "_candidates", lambda config, plan: iter([replace(config, tp=7)]))
    with pytest.raises(ConfigError, match="no legal plan on at most 16 ranks"):
        shrunk(config, plan)


def test_the_command_says_what_became_smaller(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "model=gpt_1t", "tp=8", "pp=64", "dp=6", "global_batch=3072", "shrink=true"]) == 0
    out, err = capsys.readouterr()
    assert "8 ranks" in out and "note: shrink: pp 64 -> 2, dp 6 -> 2, tp 8 -> 2, layers 128 -> 2" in err
    assert main(["plan", "-m", "model=gpt_1t", "tp=8", "pp=64", "dp=6", "global_batch=3072", "shrink=true,false"]) == 0
    assert "dp=2 tp=2 pp=2" in (shown := capsys.readouterr().out) and "dp=6 tp=8 pp=64" in shown
    planned = pr.plan("model=gpt_1t", "tp=8", "pp=64", "dp=6", "global_batch=3072", "shrink=true")
    assert (planned.world, planned.config.shrink) == (8, False)
    capsys.readouterr()
    assert main(["model=gpt_1t", "tp=8", "pp=64", "dp=6", "global_batch=3072", "shrink=true"]) == 2
    assert "shrink=true is for verify and plan, and run runs the plan as it is" in capsys.readouterr().err
