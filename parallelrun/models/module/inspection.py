"""The spec of a user's module, read off the module by running it once, and the checks of the model contract."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.base.registry import has
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import torch_private
from parallelrun.models import documents as packed
from parallelrun.models import layers
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.module import checks, lora, network, samples, slices, source
from parallelrun.models.module.measuring import BlockMeasure, FirstReads
from parallelrun.models.module.outputs import call, undefined
from parallelrun.models.module.own_forward import ROOT, WHOLE, OwnForward
from parallelrun.models.module.own_loss import LossBatch
from parallelrun.models.moe import own_experts
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.model.model_spec import MEASURED, BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec

OWN = Initialiser("own")
RUN_PARAMETERS = 300_000_000  # larger modules are not built to run one sample through them
CHECKED_PARAMETERS = 20_000_000  # larger modules are not run on real numbers: that would take seconds
Sizes = tuple[int, ...]


def read_spec(config: Config, vocab: int) -> ModelSpec:
    """The spec of the module that is built over `vocab` token ids or classes. Raises ConfigError naming the layer or
    block that breaks the model contract.

    The module is measured on the meta device. One whose forward reads values of tensors is measured by one real
    sample; one that is too large for that is not measured, and what it computes is estimated from its parameters.
    """
    try:
        return _read_on("meta", config, vocab)
    except ConfigError as error:
        if _num_parameters(config, vocab) <= RUN_PARAMETERS:
            return _read_on("cpu", config, vocab)
        if "meta" not in str(error):
            raise
    return _read_on("", config, vocab)


def _num_parameters(config: Config, vocab: int) -> int:
    """The number of the module's parameters; 0 if only a real device can build it."""
    with suppress(ConfigError), torch.device("meta"):
        return sum(parameter.numel() for parameter in source.build(config, vocab).parameters())
    return 0


def _read_on(device: str, config: Config, vocab: int) -> ModelSpec:
    """The spec, by running the module on `device`; by no run if that is empty."""
    builder = source.builder_of(config)
    module = _built(device, config, vocab)
    how = network.own_forward(config, module)
    if (config.pp or 1) > 1:
        if how is WHOLE:
            message = f"pp={config.pp} cuts between blocks, and model.blocks names none of {builder.title(config)}"
            raise undefined(message, network.suggested_blocks(module))
        checks.check_useful_cut(module, how.names)
    kind, shape = samples.kind_and_shape(config, module)
    experts, choices = own_experts.watched(module)
    blocks, boundary, output = _computed(device, config, vocab, module, how)
    is_small = sum(block.num_parameters for block in blocks) <= CHECKED_PARAMETERS
    heads = samples.positive_attribute(module, "heads")
    if device and heads % (config.tp or 1) == 0:  # else the tensor strategy refuses, with the nearest legal degrees
        checks.check_split(device, config, vocab, kind, shape)
    tensor = config.strategy.tensor.kind
    is_built_in = has("strategies", f"tensor.{tensor}")
    if is_built_in and tensor_strategy(tensor).asks_for_slices(config) and kind == "tokens" and is_small:
        slices.check(config, vocab, shape[0])
    for pair in (tied := _tied(module)):
        outside = [name for name in pair if not any(name.startswith(f"{block.name}.") for block in blocks)]
        if len(outside) == 1:
            raise undefined(
                f"parameter {outside[0]} is in no block, and tied to one of a block", "leave model.blocks out"
            )
    norms = (part.kind for part in module.modules() if isinstance(part, layers.HiddenNorm))
    spec = ModelSpec(
        name=config.model.preset,
        kind=kind,
        blocks=lora.stored_blocks(blocks, config),
        sample_shape=shape,
        boundary_shape=boundary,
        targets_per_sample=prod(output[1:-1]),
        vocab=output[-1],
        hidden=boundary[-1],
        heads=heads,
        kv_heads=samples.positive_attribute(module, "kv_heads") or heads,
        seq=shape[0] if kind == "tokens" else 0,
        norm=next(norms, "layernorm"),  # decides the norms' traffic under a grid; the first where they differ
        tied=tied,
        own_loss=config.model.loss is not None,
        experts=experts,
        router=own_experts.router_spec(choices),
    )
    if how is not WHOLE and (device or is_small):
        checks.check_cuts(config, spec, "cpu" if is_small else device)
    return spec


def _built(device: str, config: Config, vocab: int) -> nn.Module:
    """The module with the layer roles and the compute dtype of the run, so that what its forward widens is measured:
    not on a CPU, which may lack operations in 16 bit."""
    compute: torch.dtype = getattr(torch, TABLE[config.precision.name].compute)
    dtype = compute if device != "cpu" and compute != torch.float64 else torch.float32
    module = source.build_with_roles(config, vocab, device or "meta", dtype).eval()
    for part in module.modules():
        network.compute_in(part, dtype)
    return module.to(dtype)


def _computed(
    device: str, config: Config, vocab: int, module: nn.Module, how: OwnForward
) -> tuple[tuple[BlockSpec, ...], Sizes, Sizes]:
    """(blocks, boundary shape, output shape), measured on `device`, or estimated without one."""
    kind, shape = samples.kind_and_shape(config, module)
    width = BYTES[TABLE[config.precision.name].compute]
    if device:
        batch = samples.example(config, kind, shape, device)
        documents = None
        if config.dataset.pack:
            documents = DocumentBounds([shape[:1]], torch.zeros(1, shape[0], dtype=torch.int64, device=device))
        with packed.scope(documents):
            blocks, boundary, output = _measure(module, how, batch, width)
            if config.tp != 1 and not config.model.loss:
                blocks = _with_replicated(blocks, _built(device, config, vocab), how, batch, width)
    else:
        blocks, boundary, output = _estimate(module, how, kind, shape, vocab)
    if config.model.loss:
        return blocks, (1,), (1, vocab)
    builder = source.builder_of(config)
    if len(output) < 2 or output[-1] < vocab:
        needed = f"logits (1, [seq,] vocab) with vocab >= {vocab} are needed"
        message = f"{builder.title(config)} gives shape {output} for one sample; {needed}"
        raise ConfigError(Problem(message, builder.KEY, builder.VOCAB_FIX, kind="arithmetic"))
    if kind == "tokens" and len(boundary) == 1:  # a class of a text: its layers compute on all tokens
        boundary = (*shape, next(iter(module.parameters())).shape[-1])
    return blocks, boundary, output


def _measure(module: nn.Module, how: OwnForward, batch: Any, width: int) -> tuple[tuple[BlockSpec, ...], Sizes, Sizes]:
    """(blocks with FLOPs and saved elements of `width` bytes, boundary shape, output shape), all of one sample."""
    network.let_gradients_through(module)  # plans that need it keep the most activations
    dtype = next(module.parameters()).dtype
    measured = {name: BlockMeasure(module.get_submodule(name), batch, dtype) for name in how.names}
    with torch_private.fused_on_meta(), FirstReads(_own_parameters(module, how), measured) as reads:
        x = call("module", module, batch)
    sent = {name: measured[name].shape for name, later in pairwise(how.names) if later not in how.followers}
    first, shape = next(iter(sent.items()), ("", measured[how.names[0]].shape))
    for name, boundary in sent.items():
        if boundary != shape or not boundary:
            given = f"block {first} gives {shape}"
            raise undefined(f"block {name} gives {boundary} per sample, {given}: stages pass one shape")
    listed: set[int] = set()
    counted: set[int] = set()
    blocks = []
    each = 1 / (len(batch) if isinstance(batch, LossBatch) else 1)  # the part of one sample
    for name, measure in measured.items():
        outside = [path for path, block in reads.block_of.items() if block == name]
        specs = (*_outside(module, outside), *_layers(module, name, listed, measure))
        blocks.append(
            BlockSpec(
                _full(name), MEASURED, specs, each * measure.flops(), each * measure.saved_elements(width, counted),
                saves_after_sum=measure.after_sum, convolution_flops=each * measure.flops("conv"),
                attention_flops=each * measure.flops("bmm", "attention"),
                follows=name in how.followers,
                num_outputs=measure.num_outputs,
                output_shape=None if measure.output_shape == (1, *shape) else measure.output_shape,
            )
        )  # fmt: skip
    return tuple(blocks), shape, tuple(x.shape)


def _with_replicated(
    blocks: tuple[BlockSpec, ...], halved: nn.Module, how: OwnForward, batch: Any, width: int
) -> tuple[BlockSpec, ...]:
    """`blocks` with the elements that every tensor-parallel rank saves, by a measurement of `halved`, the whole module,
    as one of two ranks has it; without them if it cannot be split so."""
    roles = {layers.role_of(part) for part in halved.modules()}
    if not roles & set(checks.SPLIT_ROLES) or not all(checks.divide(part, 2) for part in halved.modules()):
        return blocks
    try:
        halves, _, _ = _measure(halved, how, batch, width)
    except ConfigError:
        return blocks
    saved = [(block.saved_elements or 0.0, half.saved_elements or 0.0) for block, half in zip(blocks, halves)]
    return tuple(
        replace(block, replicated_elements=max(0.0, 2 * half - whole)) for block, (whole, half) in zip(blocks, saved)
    )


def _estimate(
    module: nn.Module, how: OwnForward, kind: str, shape: Sizes, vocab: int
) -> tuple[tuple[BlockSpec, ...], Sizes, Sizes]:
    """As `_measure`, without a run: each parameter is multiplied by each position; what is saved is not known."""
    listed: set[int] = set()
    positions = shape[0] if kind == "tokens" else 1
    blocks = []
    for name in how.names:
        outside = _outside(module, _own_parameters(module, how) if name == how.names[0] else ())
        parts = (*outside, *_layers(module, name, listed, None))
        numel = sum(parameter.numel for layer in parts for parameter in layer.parameters)
        blocks.append(BlockSpec(_full(name), MEASURED, parts, 2.0 * positions * numel, 0.0))
    hidden = next(iter(module.parameters())).shape[-1]
    output = (1, *shape, vocab) if kind == "tokens" else (1, vocab)
    return tuple(blocks), (*(shape if kind == "tokens" else ()), hidden), output


def _own_parameters(module: nn.Module, how: OwnForward) -> dict[str, nn.Parameter]:
    """The parameters of modules around the blocks, as a class token, which belong to no block."""
    inside = {id(parameter) for name in how.names for parameter in module.get_submodule(name).parameters()}
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in inside}


def _outside(module: nn.Module, names: Iterable[str]) -> list[LayerSpec]:
    """Layers of one parameter each, for those of modules around the blocks."""
    parameters = ((_full(name), module.get_parameter(name)) for name in names)
    specs = (ParameterSpec(name, tuple(p.shape), OWN, "", frozen=not p.requires_grad) for name, p in parameters)
    return [LayerSpec(spec.name, "", 0, 0, (spec,)) for spec in specs]


def _layers(module: nn.Module, block: str, listed: set[int], measure: BlockMeasure | None) -> list[LayerSpec]:
    """The layers of one block that hold parameters or have a role, in module order. Adds the ids of their parameters to
    `listed`; a parameter that is in it already is tied. measure: None if the block was not run."""
    specs = []
    first = _first_names(module)
    widths, gradients = (measure.widths, measure.input_gradients) if measure else ({}, {})
    for inner, part in module.get_submodule(block).named_modules():
        name = _full(".".join(filter(None, (block, inner))))
        role = layers.role_of(part)
        parameters, tied = [], None
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) in listed:
                tied = tied or first[id(parameter)]
                continue
            listed.add(id(parameter))
            frozen = not parameter.requires_grad
            own = lora.initialiser(part, name)
            spec = ParameterSpec(f"{name}.{key}", tuple(parameter.shape), own or OWN, role, frozen=frozen)
            parameters.append(replace(spec, is_adapter=own is not None))
        if parameters or tied or role:
            width = widths.get(id(part), 0)
            weight = next((tuple(p.shape) for p in part.parameters(recurse=False) if p.dim() == 2), (width, width))
            sizes = weight if role == "embedding" else weight[::-1]
            is_free = not isinstance(part, lora.Factor)
            possible = tuple(other for other, kinds in source.ROLES.items() if is_free and isinstance(part, kinds))
            layer = LayerSpec(name, role, sizes[0], sizes[1], tuple(parameters), tied, possible)
            unmeasured = 2 if lora.is_target(part) else 1
            specs.append(replace(layer, input_gradients=gradients.get(id(part), unmeasured)))
    return specs


def _tied(module: nn.Module) -> tuple[tuple[str, str], ...]:
    first = _first_names(module)
    every = module.named_parameters(remove_duplicate=False)
    return tuple((_full(name), first[id(p)]) for name, p in every if _full(name) != first[id(p)])


def _first_names(module: nn.Module) -> dict[int, str]:
    """The name in the network of every parameter, by id; of a tied one the first name."""
    return {id(parameter): _full(name) for name, parameter in module.named_parameters()}


def _full(name: str) -> str:
    """The name in the network of a part that the user's module calls `name`."""
    return f"{ROOT}.{name}" if name else ROOT
