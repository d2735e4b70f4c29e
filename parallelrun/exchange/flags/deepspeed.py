"""DeepSpeed: the JSON configuration (its documentation: "DeepSpeed Configuration JSON")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallelrun.exchange.flags.settings import (
    Counterpart,
    Setting,
    Settings,
    Table,
    Translation,
    choice,
    flag,
    number,
    whole,
)

MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}
_OFFLOAD, _LOGGING = "nothing is offloaded to the host", "parallelrun logs in its own form"
TABLE: Table = {
    "optimizer.params.lr": Counterpart("optimizer.lr", number),
    "optimizer.params.eps": Counterpart("optimizer.eps", number),
    "optimizer.params.weight_decay": Counterpart("optimizer.weight_decay", number),
    "optimizer.params.momentum": Counterpart("optimizer.momentum", number),
    "scheduler.params.warmup_num_steps": Counterpart("optimizer.warmup", whole),
    "scheduler.params.total_num_steps": Counterpart("steps", whole),
    "scheduler.params.cos_min_ratio": Counterpart("optimizer.min_lr_ratio", number),
    "gradient_clipping": Counterpart("optimizer.clip", number),
    "fp16.loss_scale_window": Counterpart("precision.scale_window", whole),
    "fp16.initial_scale_power": Counterpart("precision.loss_scale", lambda value: 2.0 ** whole(value)),
    "tensor_parallel.autotp_size": Counterpart("tp", whole),
    "tensor_parallel.tp.tp_size": Counterpart("tp", whole),
    "seed": Counterpart("seed", whole),
    # no counterpart
    "zero_optimization.offload_optimizer.device": _OFFLOAD,
    "zero_optimization.offload_param.device": _OFFLOAD,
    "zero_optimization.overlap_comm": "communication overlaps where it can",
    "zero_optimization.reduce_bucket_size": "buckets are sized by strategy.data.bucket_mb",
    "zero_optimization.allgather_bucket_size": "buckets are sized by strategy.data.bucket_mb",
    "zero_optimization.contiguous_gradients": "it changes speed, not what is computed",
    "scheduler.params.warmup_max_lr": "the warm-up ends at optimizer.lr",
    "scheduler.params.warmup_min_lr": "the warm-up begins at 0",
    "fp16.loss_scale": "the loss scale is dynamic",
    "sequence_parallel_size": "a sequence is not split over ranks",
    "activation_checkpointing.partition_activations": "recompute= says what is recomputed",
    "activation_checkpointing.cpu_checkpointing": _OFFLOAD,
    "steps_per_print": _LOGGING,
    "wall_clock_breakdown": _LOGGING,
}


def translate(settings: Sequence[Setting]) -> Translation:
    """The recipe for these settings. The model is not part of them."""
    found = Translation()
    defaults = {} if any(one.name == "gradient_clipping" for one in settings) else {"gradient_clipping": 0}
    every = Settings([one for one in settings if one.value != "auto"], defaults, found)  # auto: the trainer says it
    for name, option in (("bf16", "bf16"), ("fp16", "fp16")):
        if (enabled := every.take(f"{name}.enabled", flag)) and enabled[1]:
            found.choose("precision", option, enabled[0])
    if found.groups.get("precision") != "fp16":
        for name in ("fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.loss_scale"):
            every.value(name, number)
    zero(every, every.take("zero_optimization.stage", choice(STAGES)))
    if kind := every.take("optimizer.type", choice({"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"})):
        found.choose("optimizer", kind[1], kind[0])
    every.move("optimizer.params.betas", _pair, "optimizer.betas")
    schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if schedule := every.take("scheduler.type", choice(schedules)):
        found.put("optimizer.schedule", schedule[1], schedule[0])
        if schedule[1] == "linear":
            found.put("optimizer.min_lr_ratio", 0, schedule[0])
    _batch(every)
    every.track("tensorboard.enabled", "tensorboard")
    every.track("wandb.enabled", "wandb")
    every.translate(TABLE)
    return found


def zero(every: Settings, stage: tuple[Setting, Any] | None) -> None:
    """Choose the data strategy by the stage of ZeRO."""
    if stage:
        every.found.choose("strategy", stage[1], stage[0])
    else:
        every.found.groups["strategy"] = "ddp"


def _batch(every: Settings) -> None:
    found = every.found
    total, accumulated = every.take("train_batch_size", whole), every.take("gradient_accumulation_steps", whole)
    micro = every.take("train_micro_batch_size_per_gpu", whole)
    if micro:
        found.put("micro_batch", micro[1], micro[0])
    if total:
        found.put("global_batch", total[1], total[0])
        if accumulated and not micro:
            found.put("microbatches", accumulated[1], accumulated[0])
    elif micro:
        found.put("local_batch", micro[1] * (accumulated[1] if accumulated else 1), accumulated[0] if accumulated else
                  micro[0])  # fmt: skip


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not two numbers")
    return [number(one) for one in value]
