"""LoRA adapters of a model: merged into its weights, or as peft stores them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.precision import BYTES
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.checkpoint.files import Entry, write_json, write_safetensors
from parallelrun.checkpoint.index import DTYPES
from parallelrun.checkpoint.storage import dtype_name, tensor_bytes
from parallelrun.models.module import lora
from parallelrun.planner.model import definitions

FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_TASK_TYPES = {"causal_lm": "CAUSAL_LM"}  # of peft; others need none


def merged(source: StoredModel, name: str, parameter: Tensor, layer: nn.Module) -> Tensor:
    """Return the parameter `name` of a layer, with the layer's adapter in it if it has one."""
    weight = source.weights.whole(name, parameter.shape)
    first, second = (name.removesuffix("weight") + f"{factor}.weight" for factor in lora.NAMES)
    if first not in source.spec.parameters:
        return weight
    update = lora.scale_of(source.config) * (_read(source, second) @ _read(source, first))
    return weight + (update.t() if lora.is_transposed(layer) else update)


def write(source: StoredModel, out: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Write the files that `peft.PeftModel.from_pretrained` reads. Raises ConfigError for a model without adapters."""
    names = [name for name, parameter in source.spec.parameters.items() if parameter.is_adapter]
    prefix = definitions.model(source.config).their_prefix
    if not names or prefix is None:
        message = "there are no adapters" if not names else f"peft loads no model={source.config.model.preset}"
        fix = "--format hf, or model.lora.rank=8 in training" if not names else "--format safetensors"
        raise ConfigError(Problem(f"{source.path}: {message}", "--format", fix))
    tensors = {f"base_model.model.{name.removeprefix(prefix)}": _read(source, name) for name in names}
    kind = dtype_name(dtype or next(iter(tensors.values())).dtype)
    code, size = DTYPES[kind][0], BYTES[kind]
    entries = [Entry(key, code, tuple(tensor.shape), size * tensor.numel()) for key, tensor in tensors.items()]
    contents = (tensor_bytes(tensor.to(getattr(torch, kind)).contiguous()) for tensor in tensors.values())
    write_safetensors(out / FILE, entries, contents, {"format": "pt"})
    builder = registry.load("models", source.config.model.name, "builder")
    with torch.device("meta"):
        module = builder.make_module(source.config, source.spec.vocab)
    layers = sorted({name.removeprefix(prefix).rpartition(".lora_")[0] for name in names})
    settings, model = source.config.model.lora, source.config.model
    fields = {
        "peft_type": "LORA",
        "task_type": _TASK_TYPES.get(builder.task_of(source.config, source.spec.vocab)),
        "base_model_name_or_path": str(source.config.init.weights or model.path),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": layers,
        "fan_in_fan_out": any(lora.is_transposed(module.get_submodule(name)) for name in layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(out / CONFIG_FILE, fields)


def _read(source: StoredModel, name: str) -> Tensor:
    return source.weights.whole(name, source.spec.parameters[name].shape)
