"""The spec of a user's module, read off the module by running it once, and the checks of the model contract."""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from parallelrun.base import user_code
from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.base.registry import has
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import torch_private
from parallelrun.models import layers
from parallelrun.models.module import network, slices, source
from parallelrun.models.module.measuring import flops_of, saved_tensors
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
    patterns, where = config.model.blocks, builder.title(config)
    with torch.device(device or "meta"):
        module = source.build(config, vocab)
        if (config.pp or 1) > 1 and not patterns:
            message = f"pp={config.pp} cuts between blocks, and model.blocks names none of {where}"
            raise _undefined(message, network.suggested_blocks(module))
        source.apply_roles(module, config, torch.float32)
    module.eval()
    names = network.block_names(module, patterns, where) if patterns else [""]
    kind, shape = _samples(config, module)
    width = BYTES[TABLE[config.precision.name].compute]
    if device:
        blocks, boundary, output = _measure(module, names, network.inputs(kind, shape, 1, device), width)
    else:
        blocks, boundary, output = _estimate(module, names, kind, shape, vocab)
    if len(output) < 2 or output[-1] < vocab:
        message = (
            f"{where} gives shape {output} for one sample; logits (1, [seq,] vocab) with vocab >= {vocab} are needed"
        )
        raise ConfigError(
            Problem(message, "model.source", "take vocab as an argument of the function", kind="arithmetic")
        )
    is_small = sum(block.num_parameters for block in blocks) <= CHECKED_PARAMETERS
    if patterns and is_small:
        _check_chain(config, vocab, names, kind, shape)
    if device:
        _check_split(device, config, vocab, kind, shape)
    if _asks_for_slices(config) and kind == "tokens" and is_small:
        slices.check(config, vocab, shape[0])
    norms = (part.kind for part in module.modules() if isinstance(part, layers.HiddenNorm))
    heads = _number(module, "heads")
    return ModelSpec(
        name=config.model.preset,
        kind=kind,
        blocks=blocks,
        sample_shape=shape,
        boundary_shape=boundary,
        targets_per_sample=prod(output[1:-1]),
        vocab=output[-1],
        hidden=boundary[-1],
        heads=heads,
        kv_heads=_number(module, "kv_heads") or heads,
        seq=shape[0] if kind == "tokens" else 0,
        norm=next(norms, "layernorm"),  # decides the norms' traffic under a grid; the first where they differ
        tied=_tied(module),
        mask_token=_attribute(module, "mask_token"),
    )


def _undefined(what: str, fix: str = "", where: str = "model.blocks") -> ConfigError:
    return ConfigError(Problem(what, where, fix, kind="undefined"))


def _samples(config: Config, module: nn.Module) -> tuple[str, Sizes]:
    """(kind, shape of one sample): token ids for a module that embeds, else images if it has 3 dims, else features."""
    if any(isinstance(part, (nn.Embedding, layers.TokenEmbedding)) for part in module.modules()):
        return "tokens", (config.model.seq,)
    shape = _attribute(module, "sample_shape")
    if shape is None or callable(shape):  # a method of that name is no size
        return "features", (config.model.hidden,)
    if not isinstance(shape, (tuple, list)) or not shape or not all(type(size) is int and size > 0 for size in shape):
        message = f"sample_shape={shape!r} of {source.builder_of(config).title(config)} is no shape of a sample, such as (3, 32, 32)"
        raise ConfigError(Problem(message, "model.source", "sample_shape = (channels, height, width), or (features,)"))
    return "images" if len(shape) == 3 else "features", tuple(shape)


def _attribute(module: nn.Module, name: str) -> Any:
    """The value of an attribute of the user's module; None if it has none, or reading it fails."""
    try:
        return getattr(module, name, None)
    except Exception:  # a property of the user's may raise anything
        return None


def _number(module: nn.Module, name: str) -> int:
    """An attribute that is a positive whole number; 0 if it is none: the user may call anything `heads`."""
    value = _attribute(module, name)
    return value if type(value) is int and value > 0 else 0


def _measure(
    module: nn.Module, names: list[str], batch: Tensor, width: int
) -> tuple[tuple[BlockSpec, ...], Sizes, Sizes]:
    """(blocks with FLOPs and saved elements of `width` bytes, boundary shape, output shape) from a batch of one."""
    x = batch
    network.let_gradients_through(module)  # plans that need it keep the most activations
    listed: set[int] = set()
    blocks, boundaries = [], []
    for name in names:
        block = module.get_submodule(name)
        with FlopCounterMode(display=False) as counter, saved_tensors(block) as saved, torch_private.fused_on_meta():
            x = _call(name or "module", block, x)
        found = tuple(_layers(module, name, listed))
        elements = saved.elements((batch, *block.parameters(), *block.buffers())) + saved.masks / width
        blocks.append(
            BlockSpec(
                _full(name), MEASURED, found, float(counter.get_total_flops()), elements,
                saves_after_sum=saved.after_sum, convolution_flops=flops_of(counter, "conv"),
                attention_flops=flops_of(counter, "bmm", "attention"),
            )
        )  # fmt: skip
        boundaries.append(tuple(x.shape[1:]))
    for name, boundary in zip(names[:-1], boundaries):
        if boundary != boundaries[0] or not boundary:
            first = f"block {names[0]} gives {boundaries[0]}"
            raise _undefined(f"block {name} gives {boundary} per sample, {first}: stages pass one shape")
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in listed]
    if missing:
        message = f"parameter {missing[0]} belongs to none of the blocks {', '.join(names)}"
        raise _undefined(message, network.suggested_blocks(module))
    return tuple(blocks), boundaries[0], tuple(x.shape)


def _estimate(
    module: nn.Module, names: list[str], kind: str, shape: Sizes, vocab: int
) -> tuple[tuple[BlockSpec, ...], Sizes, Sizes]:
    """As `_measure` without a run: each parameter is multiplied once by each position, and nothing is known to be saved."""
    listed: set[int] = set()
    positions = shape[0] if kind == "tokens" else 1
    blocks = []
    for name in names:
        parts = tuple(_layers(module, name, listed))
        numel = sum(parameter.numel for layer in parts for parameter in layer.parameters)
        blocks.append(BlockSpec(_full(name), MEASURED, parts, 2.0 * positions * numel, 0.0))
    hidden = next(iter(module.parameters())).shape[-1]
    output = (1, *shape, vocab) if kind == "tokens" else (1, vocab)
    return tuple(blocks), (*(shape if kind == "tokens" else ()), hidden), output


def _call(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """block(x). Raises ConfigError naming the block."""
    try:
        out = block(x)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        message = f"block {name} fails on an input of shape {tuple(x.shape)}: {user_code.reason(error)}"
        raise ConfigError(Problem(message, " <- ".join(reversed(user_code.frames(error))) or "model.source")) from error
    if not isinstance(out, Tensor):
        message = f"block {name} gives {with_article(type(out).__name__)}; a block maps one tensor to one tensor"
        raise _undefined(message)
    return out


def _layers(module: nn.Module, block: str, listed: set[int]) -> list[LayerSpec]:
    """The layers of one block that hold parameters or have a role, in module order. Adds the ids of their parameters to
    `listed`; a parameter that is in it already is tied."""
    found = []
    first = _first_names(module)
    for inner, part in module.get_submodule(block).named_modules():
        name = _full(".".join(filter(None, (block, inner))))
        role = layers.role_of(part)
        parameters, tied = [], None
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) in listed:
                tied = first[id(parameter)]
                continue
            listed.add(id(parameter))
            frozen = not parameter.requires_grad
            parameters.append(ParameterSpec(f"{name}.{key}", tuple(parameter.shape), OWN, role, frozen=frozen))
        if parameters or tied or role:
            weight = next((tuple(p.shape) for p in part.parameters(recurse=False) if p.dim() == 2), (0, 0))
            sizes = weight if role == "embedding" else weight[::-1]
            possible = tuple(other for other, kinds in source.ROLES.items() if isinstance(part, kinds))
            found.append(LayerSpec(name, role, sizes[0], sizes[1], tuple(parameters), tied, possible))
    return found


def _tied(module: nn.Module) -> tuple[tuple[str, str], ...]:
    first = _first_names(module)
    every = module.named_parameters(remove_duplicate=False)
    return tuple((_full(name), first[id(p)]) for name, p in every if _full(name) != first[id(p)])


def _first_names(module: nn.Module) -> dict[int, str]:
    """The name in the network of every parameter, by id; of a tied one the first name."""
    return {id(parameter): _full(name) for name, parameter in module.named_parameters()}


def _full(name: str) -> str:
    """The name in the network of a part that the user's module calls `name`."""
    return f"{network.ROOT}.{name}" if name else network.ROOT


def _check_chain(config: Config, vocab: int, names: list[str], kind: str, shape: Sizes) -> None:
    """Raise ConfigError unless the chain of the blocks computes the module's forward, on real numbers."""
    with torch.device("cpu"), torch.no_grad():
        module = source.build(config, vocab).eval()
        x = network.inputs(kind, shape, 2, "cpu")
        expected, chained = _call("module", module, x), x
        for name in names:
            chained = _call(name, module.get_submodule(name), chained)
    if expected.shape != chained.shape or not torch.allclose(expected, chained, rtol=1e-4, atol=1e-5):
        message = (
            f"the blocks {', '.join(names)}, one after the other, do not compute what {source.builder_of(config).title(config)} does"
        )
        raise _undefined(message, "every module of forward, in order")


def _asks_for_slices(config: Config) -> bool:
    kind = config.strategy.tensor.kind
    return has("strategies", f"tensor.{kind}") and tensor_strategy(kind).asks_for_slices(config)


def _check_split(device: str, config: Config, vocab: int, kind: str, shape: Sizes) -> None:
    """Raise ConfigError unless forward works when every column- and row-parallel layer is split, on `device`.

    They are split by tp; by 2 under a grid, which splits features over some of its axes only: a module that works on
    halves works on other parts.
    """
    tensor = config.strategy.tensor.kind
    is_grid = not (has("strategies", f"tensor.{tensor}") and tensor_strategy(tensor).is_one_dimensional)
    tp = 2 if is_grid and config.tp != 1 else config.tp or 2
    if tp == 1 or config.tp is None and not config.model.roles:
        return
    module = source.build_with_roles(config, vocab, device)
    if not {layers.role_of(part) for part in module.modules()} & {"column_parallel", "row_parallel"}:
        return
    inputs = network.inputs(kind, shape, 1, device)
    expected = network.dropout_shapes(module.eval(), inputs)
    entered = [""]
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        if not _split(part, tp):
            return  # does not divide: the tensor strategy refuses it, with the nearest legal degrees
    try:
        shapes = network.dropout_shapes(module, inputs)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        split = f"with its column_parallel and row_parallel layers split by tp={tp}"
        message = f"{split}, {source.builder_of(config).title(config)} fails at or after {entered[-1]}: {error}"
        fix = (
            "no global sizes in forward: heads by unflatten(-1, (-1, head_dim)); only row_parallel layers read what "
            "column_parallel layers give"
        )
        raise _undefined(message, fix, "model.roles") from error
    for name, before in expected.items():
        if before[:-1] != shapes[name][:-1]:
            message = (
                f"dropout {name} acts on something whose rows, not columns, tp={tp} splits ({before} to {shapes[name]})"
            )
            fix = "drop before heads are split or after they are joined; probabilities of attention cannot be dropped"
            raise _undefined(message, fix, "model.roles")


def _split(part: nn.Module, tp: int) -> bool:
    """Cut the weights of a column- or row-parallel layer to a tp-th; False if they do not divide."""
    dim = {"column_parallel": 0, "row_parallel": 1}.get(layers.role_of(part))
    for key, parameter in list(part.named_parameters(recurse=False)):
        if dim is None or parameter.dim() <= dim:
            continue
        if parameter.size(dim) % tp:
            return False
        size = list(parameter.shape)
        size[dim] //= tp
        setattr(part, key, nn.Parameter(torch.zeros(size, device=parameter.device)))
    return True
