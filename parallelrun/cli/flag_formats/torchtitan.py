"""torchtitan: a job's TOML (torchtitan/config/job_config.py), or the Python functions that build a Trainer.Config."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli.flag_formats.settings import (
    Counterpart,
    Setting,
    Settings,
    Table,
    Translation,
    choice,
    flag,
    number,
    text,
    whole,
)

_MODELS = {  # (name, flavor) -> our preset of the same model
    ("llama3", "8B"): "llama3_8b",
    ("llama3", "70B"): "llama3_70b",
    ("deepseek_v3", "16B"): "deepseek_v2_lite",
    ("deepseek_v3", "671B"): "deepseek_v3",
}
_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "zero_bubble",
    "ZBVZeroBubble": "zbv",
}
_SPEED, _LOGGING = "it changes speed, not what is computed", "parallelrun logs in its own form"
SPELLINGS = {  # of older versions, and of the Python configs
    "training.batch_size": "training.local_batch_size",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "training.compile": "compile.enable",
    "validator.freq": "validation.freq",
    "validator.steps": "validation.steps",
    "dataloader.dataset": "training.dataset",
    "dataloader.dataset_path": "training.dataset_path",
}
DEFAULTS: Mapping[str, Any] = {
    "optimizer.lr": 8e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10000,
    "training.mixed_precision_param": "bfloat16",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "activation_checkpoint.mode": "selective",
    "validation.enable": False,
}
_VALIDATION = {"validation.freq": 10, "validation.steps": -1}  # read where validation is on
TABLE: Table = {
    "training.seq_len": Counterpart("model.seq", whole),
    "training.max_norm": Counterpart("optimizer.clip", number),
    "training.steps": Counterpart("steps", whole),
    "training.seed": Counterpart("seed", whole),
    "compile.enable": Counterpart("compile", flag),
    "optimizer.lr": Counterpart("optimizer.lr", number),
    "optimizer.eps": Counterpart("optimizer.eps", number),
    "optimizer.weight_decay": Counterpart("optimizer.weight_decay", number),
    "lr_scheduler.warmup_steps": Counterpart("optimizer.warmup", whole),
    "lr_scheduler.decay_type": Counterpart("optimizer.schedule", choice({"linear": "linear", "cosine": "cosine"})),
    "lr_scheduler.min_lr_factor": Counterpart("optimizer.min_lr_ratio", number),
    "parallelism.expert_parallel_degree": Counterpart("ep", whole),
    "activation_checkpoint.mode": Counterpart("recompute", choice({"none": "none", "selective": "selective",
                                                                   "full": "full"})),
    "checkpoint.keep_latest_k": Counterpart("checkpoint.keep", whole),
    # no counterpart
    "lr_scheduler.decay_ratio": "the learning rate decays from the end of the warm-up",
    "training.dataset_path": "the dataset's name says how it is read: give dataset= and path=",
    "training.enable_cpu_offload": "nothing is offloaded to the host",
    "parallelism.enable_async_tensor_parallel": _SPEED,
    "parallelism.disable_loss_parallel": "the loss is always computed on the shards of the vocabulary",
    "parallelism.pipeline_parallel_split_points": "stages are cut by cost; strategy.pipeline.split cuts by hand",
    "parallelism.module_fqns_per_model_part": "stages are cut by cost; strategy.pipeline.split cuts by hand",
    "parallelism.pipeline_parallel_layers_per_stage": "stages are cut by cost; give virtual_stages=",
    "activation_checkpoint.selective_ac_option": "selective recomputation is that of attention",
    "optimizer.implementation": _SPEED,
    "compile.components": "the whole model is compiled",
    "model.hf_assets_path": "a tokenizer's file belongs to the dataset",
    "model.tokenizer_path": "a tokenizer's file belongs to the dataset",
    "hf_assets_path": "a tokenizer's file belongs to the dataset",
    "model.converters": "numbers below 16 bits are not computed with",
    "checkpoint.folder": "a run writes into its own directory below runs=",
    "checkpoint.initial_load_path": "checkpoints of torchtitan are not read; init.from= reads Hugging Face directories",
    "job.dump_folder": "a run writes into its own directory below runs=",
    "job.description": "a text",
    "metrics.log_freq": _LOGGING,
}  # fmt: skip


def of_python(source: str, file: str, name: str | None) -> list[Setting]:
    """The settings in the `return ...Config(...)` of the function `name`, which may be left out if there is one.

    The code is read, not run: values that are no literals are left out. Raises ConfigError.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(Problem(f"not Python: {error.msg}", f"{file}:{error.lineno}")) from error
    functions = {one.name: call for one in tree.body if isinstance(one, ast.FunctionDef) and (call := _returned(one))}
    if name is None and len(functions) == 1:
        name = next(iter(functions))
    if name not in functions:
        what = f"{file} has {len(functions)} functions that build a configuration" if name is None else (
            f"{file} has no function {name} that returns a configuration")  # fmt: skip
        raise ConfigError(Problem(what, "--config", " or ".join(f"--config {one}" for one in functions)))
    found = []
    for keyword in functions[name].keywords:
        section, value = keyword.arg or "", keyword.value
        if section == "model_spec" and isinstance(value, ast.Call) and value.args:
            flavor = _literal(value.args[0])
            found.append(Setting("model.flavor", flavor, f"{file}:{value.lineno}"))
        elif isinstance(value, ast.Call):
            found += [_setting(f"{section}.{one.arg}", one.value, file) for one in value.keywords]
        else:
            found.append(_setting(section, value, file))
    family = name.partition("_")[0] if name.partition("_")[0] in ("llama3", "llama4", "qwen3") else None
    family = "deepseek_v3" if name.startswith("deepseek") else family
    return [*found, *([Setting("model.name", family, file)] if family else [])]


def _returned(function: ast.FunctionDef) -> ast.Call | None:
    """The call in the function's last `return`, if it is one with names."""
    last = function.body[-1]
    call = last.value if isinstance(last, ast.Return) else None
    return call if isinstance(call, ast.Call) and call.keywords else None


def _setting(name: str, value: ast.expr, file: str) -> Setting:
    return Setting(SPELLINGS.get(name, name), _literal(value), f"{file}:{value.lineno}")


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)[:80]


def translate(settings: Sequence[Setting]) -> Translation:
    """The recipe for these settings."""
    found = Translation()
    every = Settings(settings, DEFAULTS, found)
    _model(every)
    _precision_and_optimizer(every)
    _parallelism(every)
    _validation(every)
    dataset = every.take("training.dataset", text)
    if dataset:
        found.leave_open("dataset", dataset[0], "datasets are not downloaded")
    if every.value("checkpoint.enable", flag) or (every.value("checkpoint.interval", whole) and not every.names & {
            "checkpoint.enable"}):  # fmt: skip
        _checkpoint(every, settings)
    every.track("metrics.enable_tensorboard", "tensorboard")
    every.track("metrics.enable_wandb", "wandb")
    every.translate(TABLE)
    found.groups.setdefault("dataset", "synthetic")
    return found


def _validation(every: Settings) -> None:
    """Evaluation, which torchtitan leaves out unless it is asked for."""
    found = every.found
    asked = every.take("validation.enable", flag)
    periods = [every.take(name, whole) or (Setting(name, value), value) for name, value in _VALIDATION.items()]
    if not asked or not asked[1]:
        found.put("eval.every", 0, asked[0] if asked else Setting("validation.enable", False))
        for period in [setting for setting, _ in periods if setting.where]:
            found.drop(period, "validation.enable is off")
        return
    found.put("eval.every", periods[0][1], periods[0][0])
    if periods[1][1] > 0:
        found.put("eval.batches", periods[1][1], periods[1][0])
    else:
        found.leave_open("eval.batches", periods[1][0], "all of the validation set")


def _checkpoint(every: Settings, settings: Sequence[Setting]) -> None:
    interval = next((one for one in settings if one.name == "checkpoint.interval"), Setting("checkpoint.interval", 500))
    every.take("checkpoint.interval", whole)
    every.found.put("checkpoint.every", whole(interval.value), interval)


def _model(every: Settings) -> None:
    found = every.found
    name, flavor = every.take("model.name", text), every.take("model.flavor", text)
    if name and not flavor:
        flavor = Setting("model.flavor", "debugmodel"), "debugmodel"  # torchtitan's default
    if not flavor:
        return
    key = (name[1] if name else "llama3", flavor[1])
    if key in _MODELS:
        found.choose("model", _MODELS[key], flavor[0])
    else:
        known = " or ".join(f"model={preset}" for preset in _MODELS.values())
        what = f"{flavor[0].text}: there is no preset of {' '.join(key)}"
        found.needed["model"] = Problem(what, flavor[0].where, known, "parallelrun ls models")


def _precision_and_optimizer(every: Settings) -> None:
    found = every.found
    if kind := every.take("optimizer.name", choice({"AdamW": "adamw", "Adam": "adamw"})):
        found.choose("optimizer", kind[1], kind[0])
    first, second = every.take("optimizer.beta1", number), every.take("optimizer.beta2", number)
    if first and second:
        found.put("optimizer.betas", [first[1], second[1]], second[0])
    formats = choice({"bfloat16": "bf16", "float32": "fp32"})
    if kind := every.take("training.mixed_precision_param", formats):
        found.choose("precision", kind[1], kind[0])


def _parallelism(every: Settings) -> None:
    found = every.found
    replicas = every.take("parallelism.data_parallel_replicate_degree", whole)
    shards = every.take("parallelism.data_parallel_shard_degree", whole)
    cp = every.move("parallelism.context_parallel_degree", whole, "cp") or 1
    copies, parts = replicas[1] if replicas else 1, shards[1] if shards else -1
    found.groups["strategy"] = "ddp" if parts == 1 else "hsdp" if copies > 1 else "fsdp"
    if parts > 0 and shards:
        found.put("dp", copies * parts, shards[0])
    if parts > 1 and copies > 1 and shards:
        found.put("strategy.data.shard", parts * cp, shards[0])  # they shard over cp too
    elif parts < 0 and copies > 1 and replicas:
        found.fault(replicas[0], "how many ranks share a copy is not known: data_parallel_shard_degree is -1")
    reshard = choice({"default": None, "always": True, "never": False})
    if (policy := every.take("parallelism.fsdp_reshard_after_forward", reshard)) and policy[1] is not None:
        found.put("strategy.data.reshard_after_forward", policy[1], policy[0])
    if tp := every.take("parallelism.tensor_parallel_degree", whole):
        found.put("tp", tp[1], tp[0])
        if tp[1] > 1:
            found.put("strategy.tensor.sequence_parallel", True, tp[0])
    pp = every.move("parallelism.pipeline_parallel_degree", whole, "pp") or 1
    schedule = every.take("parallelism.pipeline_parallel_schedule", choice(_SCHEDULES))
    if pp > 1 and schedule:
        found.put("strategy.pipeline.kind", schedule[1], schedule[0])
    local, whole_batch = every.take("training.local_batch_size", whole), every.take("training.global_batch_size", whole)
    if whole_batch and whole_batch[1] > 0:
        found.put("global_batch", whole_batch[1], whole_batch[0])
    elif local:
        found.put("local_batch", local[1], local[0])
    micro = every.take("parallelism.pipeline_parallel_microbatch_size", whole)
    for unread in (schedule, micro):
        if unread and unread[0].where and pp == 1:
            found.drop(unread[0], "it means nothing with pp=1")
    if pp > 1 and micro:
        found.put("micro_batch", micro[1], micro[0])
    elif pp == 1 and local:
        found.put("micro_batch", local[1], local[0])
