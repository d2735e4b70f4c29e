"""Small jobs of other runners, written for the tests of `parallelrun import-flags` and of the commands in the docs."""

from __future__ import annotations

import json
from pathlib import Path

from parallelrun.cli.flag_formats import sources
from parallelrun.cli.flag_formats.table import Translation

SCRIPT = """#!/bin/bash
GPUS=4
NODES=2    # hosts
if [ -z "$STEPS" ]; then
  STEPS=7
fi
LAYERS=8; CKPT=$1
LAUNCH="--nproc_per_node $GPUS --nnodes $NODES"
MODEL=(
    --num-layers ${LAYERS} --hidden-size 64   # width
    --num-attention-heads 4
    --group-query-attention --num-query-groups 2
    --seq-length 32 --max-position-embeddings 32
    --swiglu --normalization RMSNorm --disable-bias-linear
    --hidden-dropout 0 --vocab-size '512'
)
TRAIN="
    --micro-batch-size 2 \\
    --global-batch-size 32 --train-iters 100
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction .1
    --bf16 --use-distributed-optimizer --sequence-parallel --frobnicate 3
"
OMP_NUM_THREADS=1 torchrun $LAUNCH pretrain_gpt.py "${MODEL[@]}" $TRAIN \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --num-layers-per-virtual-pipeline-stage 2 --data-path ${DATA:-$2} --save $CKPT --tensorboard-dir $CKPT
"""
TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
steps = 1_000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
context_parallel_degree = 2
[lr_scheduler]
decay_ratio = 0.5
[checkpoint]
enable = true
[metrics]
enable_tensorboard = true
enable_wandb = true
"""
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "tensor_parallel": {"autotp_size": 2},
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""


def write(folder: Path) -> None:
    """Write them under the names that docs/exchange.md uses."""
    texts = {"train_gpt.sh": SCRIPT, "llama3_8b.toml": TOML, "ds_config.json": json.dumps(DEEPSPEED),
             "default_config.yaml": ACCELERATE}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)


def translated(path: Path, text: str) -> Translation:
    path.write_text(text)
    return Translation(*sources.of_file(path))


def of_words(words: str) -> Translation:
    return Translation(sources.SCRIPT, sources.of_words(words.split()))


def dropped(found: Translation) -> set[str]:
    """The settings that have no counterpart."""
    return {setting.name for setting, _ in found.dropped}
