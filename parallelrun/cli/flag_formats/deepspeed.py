"""DeepSpeed: the JSON configuration (its documentation: "DeepSpeed Configuration JSON")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallelrun.cli.flag_formats.settings import (
    Counterpart,
    Same,
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
# DeepSpeed's own values for what is not given (FusedAdam, torch's SGD, deepspeed/runtime/lr_schedules.py).
DEFAULTS: Mapping[str, Any] = {"gradient_clipping": 0, "zero_optimization.stage": 0}
_ADAM = {"optimizer.params.lr": 1e-3, "optimizer.params.betas": [0.9, 0.999], "optimizer.params.weight_decay": 0}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "sgd": {"optimizer.params.lr": 1e-3, "optimizer.params.momentum": 0, "optimizer.params.weight_decay": 0},
}
_WARM = {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {**_WARM, "scheduler.params.warmup_max_lr": 1e-3},
    "WarmupDecayLR": {**_WARM, "scheduler.params.warmup_max_lr": 1e-3},
    "WarmupCosineLR": {**_WARM, "scheduler.params.cos_min_ratio": 1e-4},
}
_KEYS = {  # of settings that are translated together with others
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "zero_optimization.stage": "strategy",
    "optimizer.type": "optimizer",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.betas",
    "scheduler.type": "optimizer.schedule",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "microbatches",
    "sequence_parallel_size": "cp",
}
_OFFLOAD, _LOGGING = "nothing is offloaded to the host", "parallelrun logs in its own form"
TABLE: Table = {
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
    "fp16.loss_scale": Same(0, "the loss scale is dynamic"),
    "scheduler.params.warmup_min_lr": Same(0, "the warm-up begins at 0"),
    "scheduler.params.warmup_min_ratio": Same(0, "the warm-up begins at 0"),
    "scheduler.params.warmup_type": Same("linear", "the warm-up is linear"),
    "activation_checkpointing.partition_activations": "recompute= says what is recomputed",
    "activation_checkpointing.cpu_checkpointing": _OFFLOAD,
    "steps_per_print": _LOGGING,
    "wall_clock_breakdown": _LOGGING,
}


def translate(settings: Sequence[Setting]) -> Translation:
    """The recipe for these settings. The model is not part of them."""
    found = Translation()
    given = {setting.name: setting.value for setting in settings}
    kind, schedule = (str(given.get(f"{section}.type", "")) for section in ("optimizer", "scheduler"))
    defaults = {**DEFAULTS, **OPTIMIZERS.get(kind.lower(), {}), **SCHEDULERS.get(schedule, {})}
    every = Settings(settings, defaults, found, {**_KEYS, **keys_of(TABLE)})
    _precision(every)
    zero(every, every.take("zero_optimization.stage", choice(STAGES)))
    if optimizer := every.take("optimizer.type", choice({"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"})):
        found.choose("optimizer", optimizer[1], optimizer[0])
    elif not every.names & {"optimizer.type"}:
        found.leave_open("optimizer", Setting("optimizer", "not given"), "set by the program")
    every.move("optimizer.params.betas", _pair, "optimizer.betas")
    _schedule(every)
    _batch(every)
    if (split := every.take("sequence_parallel_size", whole)) and split[1] > 1:
        found.put("cp", split[1], split[0])
        found.put("strategy.context.kind", "ulysses", split[0])
    every.track("tensorboard.enabled", "tensorboard")
    every.track("wandb.enabled", "wandb")
    every.translate(TABLE)
    return found


def keys_of(table: Table) -> dict[str, str]:
    """The key for each setting of a table that has one."""
    return {name: rule.key for name, rule in table.items() if isinstance(rule, Counterpart)}


def zero(every: Settings, stage: tuple[Setting, Any] | None) -> None:
    """Choose the data strategy by the stage of ZeRO."""
    if stage:
        every.found.choose("strategy", stage[1], stage[0])
    else:
        every.found.groups["strategy"] = "ddp"


def _precision(every: Settings) -> None:
    """bf16, fp16 or, with neither, fp32. The loss scale is read for fp16 only."""
    found = every.found
    for name in ("bf16", "fp16"):
        if (enabled := every.take(f"{name}.enabled", flag)) and enabled[1]:
            found.choose("precision", name, enabled[0])
    if found.groups.get("precision") != "fp16":
        for name in ("fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.loss_scale"):
            every.value(name, number)
    if "precision" not in found.groups and not every.autos & {"bf16.enabled", "fp16.enabled"}:
        found.choose("precision", "fp32", Setting("bf16.enabled", False))


def _schedule(every: Settings) -> None:
    """The scheduler. WarmupLR and WarmupDecayLR end their warm-up at a rate of their own, whatever the optimizer's."""
    found = every.found
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    schedule = every.take("scheduler.type", choice(kinds))
    lr, peak = (every.take(name, number) for name in ("optimizer.params.lr", "scheduler.params.warmup_max_lr"))
    for rate in (lr, peak):
        if rate and rate is (peak or lr):
            found.put("optimizer.lr", rate[1], rate[0])
        elif rate and rate[0].where:
            found.drop(rate[0], "the scheduler sets its own: scheduler.params.warmup_max_lr")
    if not schedule:
        if not every.names & {"scheduler.type"}:
            found.leave_open("optimizer.schedule", Setting("scheduler", "not given"), "set by the program, or constant")
        return
    found.put("optimizer.schedule", schedule[1], schedule[0])
    if schedule[1] == "linear":
        found.put("optimizer.min_lr_ratio", 0, schedule[0])


def _batch(every: Settings) -> None:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp: any of them may lack."""
    found = every.found
    total, accumulated = every.take("train_batch_size", whole), every.take("gradient_accumulation_steps", whole)
    micro = every.take("train_micro_batch_size_per_gpu", whole)
    once = Setting("gradient_accumulation_steps", 1), 1  # DeepSpeed's default where at most one of the others is given
    if not accumulated and bool(total) != bool(micro) and not every.autos & {once[0].name}:
        accumulated = once
    if micro:
        found.put("micro_batch", micro[1], micro[0])
    if total:
        found.put("global_batch", total[1], total[0])
        if accumulated and not micro:
            found.put("microbatches", accumulated[1], accumulated[0])
        elif accumulated and micro:
            dp, rest = divmod(total[1], max(1, accumulated[1] * micro[1]))
            if rest or not dp:
                found.fault(total[0], f"not a multiple of {micro[0].text} times {accumulated[0].text}")
            else:
                found.put("dp", dp, total[0])
    elif micro and accumulated:
        found.put("local_batch", micro[1] * accumulated[1], accumulated[0])
    elif accumulated:
        found.put("microbatches", accumulated[1], accumulated[0])


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not two numbers")
    return [number(one) for one in value]
