"""From `model.path`, `model.hf` and `model.task` to a module of Hugging Face transformers, and its layer roles."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.base.user_functions import failed
from parallelrun.base.wording import closest
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.hf import text_inputs
from parallelrun.models.module import network
from parallelrun.models.module.source import unfit
from parallelrun.models.moe import own_experts
from parallelrun.planner.model.model_spec.text import HALVES, LABELLED, TextSamples

KEY = "model.path"  # of messages
VOCAB_FIX = "model.hf.vocab_size=N, or a model whose vocabulary is as large"
TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_CLASSES = {"ForCausalLM": "causal_lm", "LMHeadModel": "causal_lm", "ForMaskedLM": "masked_lm",
            "ForImageClassification": "image_classification", "ForSequenceClassification": "sequence_classification",
            "ForConditionalGeneration": "seq2seq"}  # fmt: skip
# From the words of `_tp_plan` to our layer roles. A column-parallel layer whose outputs are gathered, or a
# row-parallel one whose input every rank has, stays replicated: its ranks would compute the same as one device.
_ROLES = {
    "colwise": "column_parallel",
    "rowwise": "row_parallel",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "per_head",
}


def make_module(config: Config, vocab: int) -> nn.Module:
    """Return the module that transformers builds, on the current device. Raises ConfigError.

    Dropout that `model.hf` does not set is 0: of probabilities of attention, and by functions, it would depend on the
    plan.
    """
    settings = settings_of(config, vocab)
    task = _task(config, settings)
    if config.precision.name == "fp64":  # torch has no grouped products of doubles
        settings._experts_implementation = "eager"
    auto = getattr(transformers, TASKS[task])
    if config.dataset.pack and (reason := text_inputs.unpackable(auto, pickle.dumps(settings))):
        message = f"dataset.pack=true with {title(config)}: {reason}"
        raise ConfigError(Problem(message, "dataset.pack", "leave dataset.pack out, or model=gpt", kind="not_built"))
    try:
        module: Any = auto.from_config(settings, dtype=torch.float32)
    except (ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise failed(f"transformers builds no {task} from {title(config)}", error) from error
    if config.dataset.pack:
        text_inputs.restart_positions(module)
    text = settings.get_text_config()
    # Every rank needs whole groups of heads: the class's attention has no copies of kv heads.
    module.heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    if task == "sequence_classification":
        text_inputs.mask_padding(module, _pad_token(settings))
    elif task == "seq2seq":
        text_inputs.halve(module)
    elif task == "image_classification":
        size = settings.image_size
        module.sample_shape = (settings.num_channels, *(size if isinstance(size, (list, tuple)) else (size, size)))
    built: nn.Module = module
    return built


def samples_of(config: Config, vocab: int) -> dict[str, Any]:
    """Return the fields of the spec that say what a sample is: of a masked language model `mask_token`, the id of
    [MASK] (`model.mask_token`, else the last one); `text`, if the task is not to predict tokens of one text."""
    settings = settings_of(config, vocab)
    task = _task(config, settings)
    if task == "masked_lm":
        return {"mask_token": settings.vocab_size - 1 if config.model.mask_token is None else config.model.mask_token}
    kind = {"sequence_classification": LABELLED, "seq2seq": HALVES}.get(task)
    if kind is None:
        return {}
    pad_token = _pad_token(settings) if kind == LABELLED else 0
    return {"text": TextSamples(kind, settings.get_text_config().vocab_size, pad_token)}


def _pad_token(settings: Any) -> int:
    token: int | None = settings.get_text_config().pad_token_id
    if token is None:
        message = "model.task=sequence_classification: the configuration has no pad_token_id, which follows short texts"
        raise ConfigError(Problem(message, "model.hf", "model.hf.pad_token_id=0"))
    return token


def trained_module(config: Config, vocab: int, folder: Path) -> nn.Module:
    """Return the module with the weights of a directory, on the CPU. Raises ConfigError if they do not fit."""
    settings = settings_of(config, vocab)
    auto = getattr(transformers, TASKS[_task(config, settings)])
    try:
        module, info = auto.from_pretrained(
            folder, config=settings, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(Problem(f"transformers cannot load {folder}: {error}", "init.from")) from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(Problem(f"{folder} has no {missing[0]}, which {title(config)} needs", "init.from"))
    trained: nn.Module = module
    return trained


def settings_of(config: Config, vocab: int) -> Any:
    """Return the PreTrainedConfig of `model.path`, with the changes of `model.hf`. Raises ConfigError."""
    path = str(config.model.path)
    try:
        if Path(path).expanduser().exists():
            settings = transformers.AutoConfig.from_pretrained(Path(path).expanduser(), local_files_only=True)
        else:
            settings = _class(path).config_class()
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(Problem(f"model.path={path}: {error}", "model.path")) from error
    values = dict(config.model.hf)
    known = settings.to_dict()
    if unknown := [key for key in values if key not in known and not hasattr(settings, key)]:
        message = f"model.hf.{unknown[0]}: {type(settings).__name__} has no such field"
        fix = closest(unknown[0], known)
        raise ConfigError(Problem(message, "model.hf", f"model.hf.{fix[0]}=..." if fix else ""))
    dropouts = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float) and value}
    if _task(config, settings).endswith("_classification"):
        values.setdefault("num_labels", vocab)
    for key, value in ({**dropouts, **values}).items():
        old = getattr(settings, key, None)
        setattr(settings, key, {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value)
    return settings


def roles_of(config: Config, module: nn.Module) -> dict[str, str]:
    """Return the layer roles, by module name: those of the class's own plan where a layer fits, and `model.roles`."""
    plan: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    roles: dict[str, str] = {}
    for name, part in module.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "")
        role = "head" if part is _output_layer(module) and style.startswith("colwise") else _ROLES.get(style, "")
        if role and not unfit(part, role):
            roles[name] = role
        elif own_experts.has_experts(part):
            _give_experts(config, name, part, roles)
    if "head" not in roles.values() or (_is_tied(module) and "embedding" not in roles.values()):
        roles = {name: role for name, role in roles.items() if role not in ("head", "embedding")}
    return {**roles, **config.model.roles}


def _give_experts(config: Config, name: str, part: nn.Module, roles: dict[str, str]) -> None:
    """Add the role of experts that ranks can divide. Raises ConfigError for others, if `ep` divides them."""
    reason = own_experts.unfit(part)
    if not reason:
        roles[name] = own_experts.ROLE
    elif (config.ep or 1) > 1 or config.strategy.expert.fills:
        message = f"ep cannot divide {name} of {title(config)}, {with_article(type(part).__name__)}: {reason}"
        raise ConfigError(Problem(message, "ep", "ep=1 strategy=fsdp", kind="not_built"))


def cut(config: Config, module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the modules before the blocks, and the blocks: `model.before` and `model.blocks`, else the likely cut. A
    single stage is cut only where the class says that it can be (`base_model_pp_plan`)."""
    base: Any = module.base_model
    if config.model.before or config.model.blocks:
        return config.model.before, config.model.blocks
    can_be = getattr(base.config, "base_model_pp_plan", None) and base is not module and _output_layer(module)
    return network.likely_cut(module) if can_be or (config.pp or 1) > 1 else ([], [])


def task_of(config: Config, vocab: int) -> str:
    """Return what the model does, a key of `TASKS`."""
    return _task(config, settings_of(config, vocab))


def title(config: Config) -> str:
    """Return the name of the model in messages."""
    return f"model.path={config.model.path}"


def _output_layer(module: Any) -> nn.Module | None:
    layer: nn.Module | None = module.get_output_embeddings()
    return layer


def _is_tied(module: Any) -> bool:
    output, table = _output_layer(module), module.get_input_embeddings()
    return getattr(output, "weight", None) is getattr(table, "weight", 0)


def _task(config: Config, settings: Any) -> str:
    """`model.task`; else that of the class which config.json or `model.path` names; else causal_lm."""
    if config.model.task:
        return config.model.task
    names = [*(settings.architectures or ()), str(config.model.path)]
    return next((task for name in names for end, task in _CLASSES.items() if name.endswith(end)), "causal_lm")


def _class(name: str) -> Any:
    found = getattr(transformers, name.removeprefix("transformers."), None)
    if not hasattr(found, "config_class"):
        raise ValueError("it is no directory, no config.json, and no model class of transformers")
    return found
