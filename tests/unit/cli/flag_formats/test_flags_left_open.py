"""`parallelrun import-flags`: a setting is translated or listed as left open; no demonstration plan fills it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import parallelrun as pr
from parallelrun.cli.main import main
from tests.other_runners import dropped, of_words, translated

MEGATRON_WORDS = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32"


def file_name(text: str) -> str:
    ending = {"{": "json", "[": "toml", "d": "yaml", "p": "sh"}[text[0]]
    return f"a.{ending}"


def left_open(found) -> list[str]:
    return dict(found.lists())["left open, so that parallelrun's own default applies until you give it"]


@pytest.mark.parametrize(
    ("name", "text", "axes"),
    [
        ("a.sh", f"pretrain_gpt.py {MEGATRON_WORDS} --micro-batch-size 3", {"tp": 1, "pp": 1}),
        ("a.json", '{"train_batch_size": 3, "zero_optimization": {"stage": 1}}', {}),
        ("a.toml", '[training]\nlocal_batch_size = 3\n[model]\nname = "llama3"\nflavor = "8B"', {"tp": 1, "pp": 1}),
        ("a.yaml", "distributed_type: MEGATRON_LM\n", {"tp": 1, "pp": 1}),
        ("a.yaml", "distributed_type: FSDP\n", {}),
    ],
)
def test_no_demonstration_fills_what_a_file_leaves_out(tmp_path, monkeypatch, capsys, name, text, axes):
    monkeypatch.chdir(tmp_path)
    found = translated(Path(name), text)
    assert {key: found.values[key] for key in ("tp", "pp", "dp", "world") if key in found.values} == axes
    assert "world: the file does not say: give world= or dp=" in left_open(found)
    assert main(["import-flags", name]) == 0  # 3 samples are no batch of a demonstration on 2 ranks
    about = yaml.safe_load(capsys.readouterr().out)["about"]
    assert "devices" not in about and "=" not in about["purpose"]
    assert main(["import-flags", name, "dp=3"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["about"]["devices"] == 3 and "world: the file" not in printed


def test_every_auto_is_named_with_the_key_to_give(tmp_path):
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": "auto"}
    content = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    }  # fmt: skip
    found = translated(tmp_path / "ds.json", json.dumps(content))
    keys = {setting.name: key for key, setting, _ in found.left_open}
    assert keys == {
        "train_batch_size": "global_batch", "train_micro_batch_size_per_gpu": "micro_batch",
        "gradient_accumulation_steps": "microbatches", "gradient_clipping": "optimizer.clip",
        "bf16.enabled": "precision", "zero_optimization.reduce_bucket_size": "",
        "zero_optimization.stage3_max_live_parameters": "", "optimizer.params.lr": "optimizer.lr",
        "optimizer.params.betas": "optimizer.betas", "optimizer.params.eps": "optimizer.eps",
        "scheduler.params.warmup_num_steps": "optimizer.warmup", "scheduler.params.warmup_max_lr": "optimizer.lr",
    }  # fmt: skip
    assert found.groups == {"strategy": "fsdp", "optimizer": "adamw"}
    assert found.values == {"optimizer.schedule": "constant", "optimizer.weight_decay": 0}
    assert "bf16.enabled = auto: set by the Trainer: give precision=" in left_open(found)
    text = "distributed_type: DEEPSPEED\nmixed_precision: auto\ndeepspeed_config:\n  zero_stage: auto\n"
    found = translated(tmp_path / "a.yaml", text + "  gradient_clipping: auto\n")
    assert [key for key, _, _ in found.left_open] == ["precision", "strategy", "optimizer.clip"]
    assert found.values == {} and found.groups == {"strategy": "ddp"}


STATED = {  # the other runners' own defaults, where ours differ
    f"pretrain_gpt.py {MEGATRON_WORDS} --micro-batch-size 3 --fp16 --data-path x --group-query-attention": {
        "local_batch": 3, "micro_batch": 3, "optimizer.schedule": "linear", "optimizer.warmup": 0,
        "optimizer.min_lr_ratio": 0, "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.01,
        "precision.loss_scale": 2.0**32, "model.kv_heads": 1, "dropout": 0.1,
    },
    '{"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupCosineLR"}}': {
        "local_batch": 3, "micro_batch": 3, "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0, "optimizer.clip": 0, "optimizer.warmup": 1000, "optimizer.min_lr_ratio": 1e-4,
        "optimizer.schedule": "cosine",
    },
    '{"train_batch_size": 6, "optimizer": {"type": "SGD"}}': {
        "global_batch": 6, "microbatches": 1, "optimizer.lr": 1e-3, "optimizer.momentum": 0,
        "optimizer.weight_decay": 0, "optimizer.clip": 0,
    },
    "[training]\nsteps = 10": {
        "steps": 10, "local_batch": 8, "micro_batch": 8, "eval.every": 0, "optimizer.schedule": "linear",
        "optimizer.min_lr_ratio": 0, "optimizer.warmup": 200, "model.seq": 2048, "recompute": "selective",
    },
    "distributed_type: MEGATRON_LM\nnum_processes: 4": {"world": 4, "tp": 1, "pp": 1, "microbatches": 1},
}  # fmt: skip


@pytest.mark.parametrize("text", STATED)
def test_the_default_of_a_format_is_stated_where_ours_differs(tmp_path, text):
    found = translated(tmp_path / file_name(text), text)
    assert {key: found.values.get(key) for key in STATED[text]} == STATED[text] and not found.problems
    given = next((group for group in ("fp16", "[training]") if group in text), None)
    assert found.groups.get("precision") == {"fp16": "fp16", "[training]": "bf16"}.get(given, "fp32")


@pytest.mark.parametrize(
    ("text", "wanted", "lost"),
    [
        # DeepSpeed's equation: the total is micro x accumulation x dp
        ('{"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}',
         {"global_batch": 48, "micro_batch": 2, "dp": 8}, set()),
        ('{"train_batch_size": 8, "sequence_parallel_size": 2, "fp16": {"loss_scale": 128}}',
         {"cp": 2, "strategy.context.kind": "ulysses"}, set()),
        ('{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 128}}', {}, {"fp16.loss_scale"}),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: a.json",
         {"world": 2}, set()),
        ("distributed_type: FSDP\ndeepspeed_config:\n  zero_stage: 3", {}, {"deepspeed_config.zero_stage"}),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  offload_optimizer_device: cpu",
         {"optimizer.offload": True}, set()),
        ('{"train_batch_size": 8, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', {},
         {"zero_optimization.offload_optimizer.device"}),
        ("distributed_type: XLA\nnum_processes: 2", {"world": 2}, {"distributed_type"}),
        ("distributed_type: FSDP\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
         "  parallelism_config_sp_size: 2\n  parallelism_config_dp_replicate_size: 2\n"
         "  parallelism_config_dp_shard_size: 3", {"cp": 2, "dp": 6, "strategy.data.shard": 6},
         {"parallelism_config.parallelism_config_sp_size"}),
        ("[parallelism]\npipeline_parallel_schedule = 'GPipe'", {"pp": 1}, {"parallelism.pipeline_parallel_schedule"}),
        ("[validation]\nenable = true\nfreq = 7\n[training]", {"eval.every": 7}, set()),
        ("[validation]\nfreq = 7\n[training]", {"eval.every": 0}, {"validation.freq"}),
    ],
)  # fmt: skip
def test_no_setting_is_translated_by_half(tmp_path, text, wanted, lost):
    found = translated(tmp_path / file_name(text), text)
    assert {key: found.values.get(key) for key in wanted} == wanted and not found.problems
    assert dropped(found) == lost


def test_batches_that_contradict_each_other_are_a_fault(tmp_path):
    text = '{"train_batch_size": 50, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}'
    assert "not a multiple of" in translated(tmp_path / "a.json", text).problems[0].what


def megatron_values(words: str) -> dict[str, object]:
    return of_words(f"{MEGATRON_WORDS} {words}").values


def test_the_warm_up_of_megatron_is_a_share_of_the_decay():
    """optimizer_param_scheduler: lr_warmup_fraction x lr_decay_iters, which are train_iters if they are not given."""
    plain = "--train-iters 100 --lr-warmup-fraction 0.1"
    assert megatron_values(plain)["optimizer.warmup"] == 10
    assert megatron_values(f"{plain} --lr-decay-iters 60")["optimizer.warmup"] == 6
    found = of_words("--lr-warmup-fraction 0.1 --num-layers 2")
    assert "optimizer.warmup" not in found.values and "optimizer.warmup" in [key for key, _, _ in found.left_open]


def test_megatron_drops_the_biases_of_linear_layers_only():
    words = ["model=gpt", "model.layers=2", "dataset=synthetic", "strategy=single"]
    values = megatron_values("--disable-bias-linear")
    names = pr.plan(*words, *(f"{key}={value}" for key, value in values.items() if "bias" in key)).plan.spec.parameters
    assert {name for name in names if name.endswith(".bias")} == {
        "layers.0.attention_norm.bias", "layers.0.mlp_norm.bias", "layers.1.attention_norm.bias",
        "layers.1.mlp_norm.bias", "head.norm.bias",
    }  # fmt: skip
    assert "model.norm_bias" not in megatron_values("--disable-bias-linear --normalization RMSNorm")


def test_the_balancing_loss_of_megatron_is_that_of_a_microbatch():
    words = "--micro-batch-size 4 --num-experts 8 --moe-aux-loss-coeff 0.01"
    values = megatron_values(words)
    assert values["model.router.group_samples"] == 4 and values["model.router.aux_coefficient"] == 0.01
    assert "model.router.group_samples" not in megatron_values(f"{words} --moe-router-load-balancing-type seq_aux_loss")
    assert megatron_values(f"{words} --moe-router-load-balancing-type none")["model.router.aux_coefficient"] == 0


def test_deepspeed_under_accelerate_has_the_stage_of_its_plugin(tmp_path):
    found = translated(tmp_path / "a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 2")
    assert found.groups["strategy"] == "zero2"  # DeepSpeedPlugin.zero_stage


def test_the_ranks_of_torchrun_are_those_of_its_own_defaults():
    launched = "torchrun {} pretrain_gpt.py --tensor-model-parallel-size 2 " + MEGATRON_WORDS
    for words, dp in (("--nnodes 4", 2), ("--nproc-per-node 8", 4), ("--nnodes 2 --nproc_per_node 8", 8)):
        assert of_words(launched.format(words)).values["dp"] == dp


def test_sequence_parallelism_is_dropped_where_megatron_turns_it_off():
    key = "strategy.tensor.sequence_parallel"
    assert key not in megatron_values("--sequence-parallel")
    assert megatron_values("--sequence-parallel --tensor-model-parallel-size 2")[key] is True
