"""accelerate: the YAML that `accelerate config` writes, with FSDP, DeepSpeed, Megatron-LM or parallelism sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallelrun.cli.flag_formats.deepspeed import STAGES, keys_of, zero
from parallelrun.cli.flag_formats.settings import (
    Counterpart,
    NoCounterpart,
    Setting,
    Settings,
    Table,
    Translation,
    choice,
    flag,
    number,
    whole,
)

MARKS = ("distributed_type", "compute_environment", "num_processes")
_PART, _MEGATRON = "parallelism_config.parallelism_config_", "megatron_lm_config.megatron_lm_"
_FSDP = {"FULL_SHARD": "fsdp", "1": "fsdp", "SHARD_GRAD_OP": "zero2", "2": "zero2", "NO_SHARD": "ddp", "3": "ddp",
         "HYBRID_SHARD": "hsdp", "4": "hsdp"}  # fmt: skip
_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
_DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
_DEFAULTS = {  # accelerate's own for what is not given (accelerate/utils/dataclasses.py)
    "DEEPSPEED": {"deepspeed_config.zero_stage": 2},
    "MEGATRON_LM": {f"{_MEGATRON}tp_degree": 1, f"{_MEGATRON}pp_degree": 1, f"{_MEGATRON}num_micro_batches": 1},
}
_KEYS = {  # of settings that are translated together with others
    "mixed_precision": "precision",
    "deepspeed_config.zero_stage": "strategy",
    "num_processes": "world",
}
_LAUNCH, _OFFLOAD = "it says how processes are started, not what they compute", "nothing is offloaded to the host"
TABLE: Table = {
    f"{_PART}tp_size": Counterpart("tp", whole),
    f"{_MEGATRON}tp_degree": Counterpart("tp", whole),
    f"{_MEGATRON}pp_degree": Counterpart("pp", whole),
    f"{_MEGATRON}num_micro_batches": Counterpart("microbatches", whole),
    f"{_MEGATRON}sequence_parallelism": Counterpart("strategy.tensor.sequence_parallel", flag),
    f"{_MEGATRON}recompute_activations": Counterpart("recompute", lambda on: "selective" if flag(on) else "none"),
    f"{_MEGATRON}gradient_clipping": Counterpart("optimizer.clip", number),
    "deepspeed_config.gradient_clipping": Counterpart("optimizer.clip", number),
    "deepspeed_config.gradient_accumulation_steps": Counterpart("microbatches", whole),
    "gradient_accumulation_steps": Counterpart("microbatches", whole),
    "fsdp_config.fsdp_activation_checkpointing": Counterpart("recompute", lambda on: "full" if flag(on) else "none"),
    # no counterpart
    "deepspeed_config.offload_optimizer_device": _OFFLOAD,
    "deepspeed_config.offload_param_device": _OFFLOAD,
    "deepspeed_config.zero3_init_flag": "no rank ever holds more than its part",
    "deepspeed_config.zero3_save_16bit_model": "`parallelrun export` writes whole weights",
    "fsdp_config.fsdp_offload_params": _OFFLOAD,
    "fsdp_config.fsdp_auto_wrap_policy": "every block of a model is wrapped",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "every block of a model is wrapped",
    "fsdp_config.fsdp_state_dict_type": "checkpoints are sharded, and load under any plan",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "no rank ever holds more than its part",
    "fsdp_config.fsdp_sync_module_states": "all ranks draw the same weights",
    "fsdp_config.fsdp_use_orig_params": "FSDP2 has no other parameters",
    "fsdp_config.fsdp_version": "FSDP2 is used",
    "fsdp_config.fsdp_backward_prefetch": "it changes speed, not what is computed",
    "fsdp_config.fsdp_forward_prefetch": "it changes speed, not what is computed",
    **dict.fromkeys(
        ("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "num_machines",
         "main_process_ip",
         "main_process_port", "main_training_function", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster",
         "tpu_use_sudo", "gpu_ids"),
        _LAUNCH,
    ),
}  # fmt: skip


def translate(settings: Sequence[Setting]) -> Translation:
    """The recipe for these settings. The model, the optimizer and the batch are not part of them."""
    found = Translation()
    given = {setting.name: setting.value for setting in settings}
    kind = str(given.get("distributed_type", "NO")).upper()
    defaults = {"mixed_precision": "no", "distributed_type": "NO", **_DEFAULTS.get(kind, {})}
    from_file = given.get(_DEEPSPEED_FILE)
    if from_file:
        defaults = {}
    every = Settings([one for one in settings if one.value != []], defaults, found, {**_KEYS, **keys_of(TABLE)})
    if from_file:
        setting = every.pop(_DEEPSPEED_FILE) or Setting(_DEEPSPEED_FILE, from_file)
        found.leave_open("strategy", setting, "translate that file by itself")
    formats = choice({"no": "fp32", "bf16": "bf16", "fp16": "fp16"})
    if precision := every.take("mixed_precision", formats):
        found.choose("precision", precision[1], precision[0])
    if (cpu := every.take("use_cpu", flag)) and cpu[1]:
        found.put("device", "cpu", cpu[0])
    if (compiler := every.take("dynamo_config.dynamo_backend", str)) and compiler[1].lower() != "no":
        found.put("compile", True, compiler[0])
    cp = every.move(f"{_PART}cp_size", whole, "cp") or 1
    _data_strategy(every, cp)
    _world(every, cp)
    every.translate({name: rule for name, rule in TABLE.items() if _section(name) in ("", kind)})
    return found


def _section(name: str) -> str:
    """The distributed_type whose section a setting is in: another's is not read."""
    return _SECTIONS.get(name.partition(".")[0], "")


def _data_strategy(every: Settings, cp: int) -> None:
    found = every.found
    copies, parts = every.take(f"{_PART}dp_replicate_size", whole), every.take(f"{_PART}dp_shard_size", whole)
    kind = every.take("distributed_type", _known_type)
    name = kind[1] if kind else ""
    if name == "DEEPSPEED":
        zero(every, every.take("deepspeed_config.zero_stage", choice(STAGES)))
    elif name == "MEGATRON_LM":
        found.groups["strategy"] = "ptdp"
        optimizer = every.take(f"{_MEGATRON}use_distributed_optimizer", flag)
        if optimizer and optimizer[1]:
            found.put("strategy.data.kind", "zero1", optimizer[0])
    elif name == "FSDP" and kind:
        _fsdp(every, kind[0])
    elif kind:
        found.choose("strategy", "single" if name == "NO" else "ddp", kind[0])
    if parts and parts[1] > 1 and copies and copies[1] > 1:
        found.choose("strategy", "hsdp", parts[0])
        found.put("strategy.data.shard", parts[1] * cp, parts[0])  # they shard over cp too
    if stated := parts or copies:
        product = (parts[1] if parts else 1) * (copies[1] if copies else 1)
        if product > 1:
            found.put("dp", product, stated[0])


def _known_type(value: Any) -> str:
    name = str(value).upper()
    if name not in ("NO", *_SECTIONS.values()) and not name.startswith("MULTI_"):
        raise NoCounterpart("only NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED and MEGATRON_LM can be translated")
    return name


def _fsdp(every: Settings, kind: Setting) -> None:
    found = every.found
    sharding = every.take("fsdp_config.fsdp_sharding_strategy", choice(_FSDP))
    reshard = every.take("fsdp_config.fsdp_reshard_after_forward", choice({"true": True, "false": False, **_FSDP}))
    if reshard and isinstance(reshard[1], str):  # version 1 of FSDP has the strategy's name here
        sharding, reshard = sharding or reshard, None
    found.choose("strategy", sharding[1] if sharding else "fsdp", (sharding or (kind, ""))[0])
    if reshard:
        found.put("strategy.data.reshard_after_forward", reshard[1], reshard[0])


def _world(every: Settings, cp: int) -> None:
    """dp from the number of processes, where no section gives it."""
    found = every.found
    sp = every.take(f"{_PART}sp_size", whole)  # DeepSpeed's Ulysses
    if sp and sp[1] > 1 and cp == 1:
        found.put("cp", sp[1], sp[0])
        found.put("strategy.context.kind", "ulysses", sp[0])
    elif sp and sp[1] > 1:
        found.drop(sp[0], "a sequence is split over cp in one way")
    processes = every.take("num_processes", whole)
    if processes and "dp" not in found.values:
        found.put("world", processes[1], processes[0])
