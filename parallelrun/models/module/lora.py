"""LoRA (Hu et al. 2021): adapters beside the linear layers of a module that is frozen otherwise.

A layer with weights W keeps its name and gains `lora_A` (rank, in) and `lora_B` (out, rank), as peft calls them; it
gives W x + alpha / rank * B (A x). Under tensor parallelism both are layers of their own: beside a column-parallel
layer A is replicated and B column parallel, beside a row-parallel one A is row parallel and B replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.base.precision import TABLE
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import layers
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE, BlockSpec, Initialiser, LayerSpec

KEY = "model.lora.targets"
NAMES = ("lora_A", "lora_B")
ROLE = "adapter"  # of a replicated factor
_SHOWN = 12  # names of layers in a message


class Factor(nn.Linear):
    """`lora_A` or `lora_B` of a layer: a linear layer without bias."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)


def add(module: nn.Module, config: Config, vocab: int, title: str) -> None:
    """Freeze the parameters of `module` and add adapters to its target layers, in place; nothing without a rank.

    Raises ConfigError for a target that names no linear layer, or one whose weight is tied.
    """
    rank = config.model.lora.rank
    if rank is None:
        return
    targets = _targets(module, config.model.lora.targets, vocab, title)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for layer in targets.values():
        sizes = layer.weight.shape if is_transposed(layer) else layer.weight.shape[::-1]
        _attach(layer, Factor(sizes[0], rank), Factor(rank, sizes[1]), scale_of(config))


def stored_blocks(blocks: tuple[BlockSpec, ...], config: Config) -> tuple[BlockSpec, ...]:
    """The blocks with frozen weights in `model.lora.base_dtype`; statistics of BatchNorm, which move, are none."""
    if config.model.lora.base_dtype is None:
        return blocks
    dtype = TABLE[config.model.lora.base_dtype].compute

    def stored(layer: LayerSpec) -> LayerSpec:
        if layer.layer_role == SAMPLE_SET_ROLE:
            return layer
        parameters = (replace(p, stored=dtype) if p.frozen else p for p in layer.parameters)
        return replace(layer, parameters=tuple(parameters))

    return tuple(replace(block, layers=tuple(map(stored, block.layers))) for block in blocks)


def scale_of(config: Config) -> float:
    """alpha / rank."""
    assert config.model.lora.rank is not None
    return config.model.lora.alpha / config.model.lora.rank


def is_transposed(layer: nn.Module) -> bool:
    """Whether a target is a Conv1D of transformers (GPT-2), whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D"


def carry(
    layer: nn.Module, replaced: nn.Module, role: str, config: Config, split: Callable[[nn.Module], nn.Module]
) -> None:
    """Give the role layer that takes the place of `layer` the adapter of that one. split: gives the factor on the side
    that the role splits the same role."""
    if not is_target(layer) or layer is replaced:
        return
    factors = {name: layer.get_submodule(name) for name in NAMES}
    side = NAMES[role != "row_parallel"]
    factors[side] = split(factors[side])
    for factor in factors.values():
        if isinstance(factor, Factor):
            layers.mark_role(factor, ROLE)
    _attach(replaced, factors[NAMES[0]], factors[NAMES[1]], scale_of(config))


def is_target(layer: nn.Module) -> bool:
    """Whether a layer has an adapter."""
    return any(isinstance(getattr(layer, name, None), Factor) for name in NAMES)  # a role splits the other one


def initialiser(layer: nn.Module, name: str) -> Initialiser | None:
    """That of the weight of a factor, as in peft: A is uniform with the deviation of nn.Linear, B is zero; None for
    other layers."""
    source: Any = layer
    if name.rpartition(".")[2] not in NAMES or not isinstance(layer, (Factor, layers.RoleLayer)):
        return None
    return Initialiser("uniform", source.in_features**-0.5) if name.endswith(NAMES[0]) else Initialiser("zeros")


def _attach(layer: nn.Module, first: nn.Module, second: nn.Module, scale: float) -> None:
    layer.add_module(NAMES[0], first)
    layer.add_module(NAMES[1], second)
    layer.register_forward_hook(partial(_add_update, scale))


def _add_update(scale: float, layer: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    update: Tensor = layer.lora_B(scale * layer.lora_A(inputs[0]))
    # What a parallel layer returns may be a view, which autograd does not let us change.
    return update.add_(out) if isinstance(layer.lora_B, Factor) else out + update


def _targets(module: nn.Module, patterns: list[str], vocab: int, title: str) -> dict[str, Any]:
    """The target layers by name; without patterns all linear layers but the output layer, as peft's `all-linear`."""
    named = {name: part for name, part in module.named_modules() if name}
    linear = {name: part for name, part in named.items() if _is_linear(part)}
    if not patterns:
        output = _output_layer(module, linear, vocab)
        chosen = {name: part for name, part in linear.items() if part is not output}
    else:
        chosen = {}
        for pattern in patterns:
            hits = {name: part for name, part in linear.items() if _matches(name, pattern)}
            if not hits:
                raise _unmatched(pattern, named, linear, title)
            chosen |= hits
    if not chosen:
        raise ConfigError(Problem(f"{title} has no linear layer that LoRA could adapt", "model.lora.rank"))
    shared = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    for name, part in chosen.items():
        if shared.count(id(part.weight)) > 1:
            message = f"{KEY}: the weight of {name} is tied to another layer's, which merging would change too"
            raise ConfigError(Problem(message, KEY, kind="undefined"))
    return chosen


def _is_linear(part: nn.Module) -> bool:
    """Whether a layer is linear and is called: torch's attention only reads the weights of its output layer."""
    return is_transposed(part) or (
        isinstance(part, nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
    )


def _matches(name: str, pattern: str) -> bool:
    """Whether `pattern` is the layer's name, or the end of it behind a dot; `*` stands for anything."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _unmatched(pattern: str, named: Mapping[str, nn.Module], linear: Mapping[str, Any], title: str) -> ConfigError:
    other = next((part for name, part in named.items() if _matches(name, pattern)), None)
    kind = f" is {with_article(type(other).__name__)}, not a linear layer" if other else " is in no layer's name"
    ends = {name: name.rpartition(".")[2] for name in linear}
    names = list(dict.fromkeys(name if end.isdigit() else end for name, end in ends.items()))
    more = ", ..." if len(names) > _SHOWN else ""
    message = f"{KEY}: {pattern!r}{kind} of {title}; its linear layers: {', '.join(names[:_SHOWN])}{more}"
    return ConfigError(Problem(message, KEY, f"'{KEY}=[{','.join(names[:2])}]'"))


def _output_layer(module: Any, linear: Mapping[str, Any], vocab: int) -> nn.Module | None:
    """The layer that gives the logits: as transformers tells, else the last one if it has as many outputs."""
    output: nn.Module | None = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if output is not None:
        return output
    last = list(linear.values())[-1] if linear else None
    return last if last is not None and getattr(last, "out_features", 0) == vocab else None
