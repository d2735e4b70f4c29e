"""A user's module as a Network: one block, or the blocks that the user names."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import shared_memory, torch_private
from parallelrun.models import layers
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.module import source
from parallelrun.models.module.double import stay_double
from parallelrun.models.module.outputs import undefined
from parallelrun.models.module.own_forward import ROOT, WHOLE, OwnForward, OwnForwardNetwork
from parallelrun.models.module.own_loss import OwnLoss
from parallelrun.models.network import Network, allocate, store
from parallelrun.models.rounding import rounded
from parallelrun.planner.contract.classes import data_strategy
from parallelrun.planner.model.model_spec import ModelSpec


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The network, its parameters on meta. The module itself is built on CPU: its buffers and constants are real.

    Its blocks are the user's module, or modules inside it.
    """
    dtype = getattr(torch, precision.compute)
    module = source.build_with_roles(config, spec.vocab, "cpu", dtype)
    widths = {layer.name: layer.out_features for layer in spec.layers()}
    for name, part in module.named_modules():
        if isinstance(part, HashDropout):  # a mask is by index among the features of one device
            part.hidden = widths.get(f"{ROOT}.{name}", 0)
    allocate(module, torch.device("meta"))
    store(module, precision.stored)
    for name, parameter in module.named_parameters():
        if (stored := spec.parameters[f"{ROOT}.{name}"].stored) is not None:
            parameter.data = parameter.data.to(getattr(torch, stored))
    for part in module.modules():
        compute_in(part, dtype)
    loss = OwnLoss() if config.model.loss else layers.TokenLoss(config.model.label_smoothing)
    how = own_forward(config, module)
    if dtype == torch.float64:
        stay_double(module)
    if how is not WHOLE:
        network: Network = OwnForwardNetwork(spec, loss, module, how)
    else:
        network = Network(spec, loss)
        network.module, network.takes_batch = module, spec.own_loss
    if (config.tp or 1) > 1:
        shared_memory.keep_out_of_graphs()  # of a module that compiles itself
        torch.backends.mha.set_fastpath_enabled(False)  # in which torch's encoder layers read weights of split layers
    shards_weights = data_strategy(config.strategy.data.kind).shards_weights and (config.dp or 1) > 1
    if (config.tp or 1) > 1 or (config.pp or 1) > 1 or shards_weights:
        # the module that it has then: a stage's copy, with the layers of a tensor strategy
        network.before_split = lambda: let_gradients_through(network.get_submodule(ROOT))
    network.own_values = lambda seed: own_values(config, spec.vocab)
    return network


def own_values(config: Config, vocab: int) -> dict[str, Tensor]:
    """The initial values that the module gives itself under `config.seed`, by one-device name."""
    with torch.device("cpu"):
        module = source.build(config, vocab)
    return {f"{ROOT}.{name}": parameter.detach() for name, parameter in module.named_parameters()}


def own_forward(config: Config, module: nn.Module) -> OwnForward:
    """How the module's own forward is divided. Raises ConfigError."""
    builder = source.builder_of(config)
    patterns, blocks = builder.cut(config, module)
    if patterns and not blocks:
        raise ConfigError(Problem("model.before needs model.blocks", "model.blocks", suggested_blocks(module)))
    if not blocks:
        return WHOLE
    if config.model.loss:
        raise undefined("model.loss calls the whole module, and model.blocks divides it", "leave model.blocks out")
    where = builder.title(config)
    before = block_names(module, patterns, where, "model.before")
    cut = block_names(module, blocks, where)
    after = [*_others(module, {*before, *cut})]
    names = [name for name in before if any(True for _ in module.get_submodule(name).parameters())]
    # A stage sends what its last block returns: what the first block gets may be returned by no module.
    followers = [*names, cut[0]][1:] + after[1:]
    return OwnForward((*names, *cut, *after), tuple(before), frozenset(followers))


def _others(module: nn.Module, names: Collection[str], at: str = "") -> Iterator[str]:
    """The outermost modules with parameters that are in none of `names`, and in which none of them is."""
    for name, part in module.named_children():
        path = f"{at}{name}"
        if any(other.startswith(f"{path}.") for other in names):
            yield from _others(part, names, f"{path}.")
        elif path not in names and any(True for _ in part.parameters()):
            yield path


def block_names(module: nn.Module, patterns: Sequence[str], where: str, key: str = "model.blocks") -> list[str]:
    """The modules that `patterns` of `key` name, in the order given (those of one pattern in the module's order).

    A `*` stays within one level: `layers.*` is `layers.0`, not `layers.0.fc1`. A ModuleList stands for its items.
    Raises ConfigError.
    """
    names = [name.split(".") for name, _ in module.named_modules() if name]
    matched: dict[str, None] = {}
    for pattern in patterns:
        is_list = isinstance(dict(module.named_modules()).get(pattern), nn.ModuleList)
        parts = [*pattern.split("."), *(["*"] if is_list else [])]
        hits = [
            x for x in names if len(x) == len(parts) and all(map(fnmatchcase, x, parts)) and ".".join(x) not in matched
        ]
        if not hits:
            message = f"{key}: no module of {where} is called {pattern!r}"
            raise ConfigError(Problem(message, key, suggested_blocks(module)))
        matched |= dict.fromkeys(map(".".join, hits))
    return list(matched)


def likely_cut(module: nn.Module) -> tuple[list[str], list[str]]:
    """`model.before` and `model.blocks` of most modules: those with parameters that are made before the largest
    ModuleList, and that; two empty lists without one."""
    sizes = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) > 1
    }
    if not sizes:
        return [], []
    largest, order = max(sizes, key=lambda name: sizes[name]), [name for name, _ in module.named_modules()]
    others = _others(module, {largest})
    return [name for name in others if order.index(name) < order.index(largest)], [largest]


def suggested_blocks(module: nn.Module) -> str:
    """The keys of the likely cut; else `model.blocks=[...]` with the module's children, of a Sequential its items."""
    before, blocks = likely_cut(module)
    if before:
        return shlex.join([f"model.before=[{','.join(before)}]", f"model.blocks=[{blocks[0]}]"])
    names = [
        f"{name}.*" if isinstance(part, nn.Sequential) else name
        for name, part in module.named_children()
        if any(True for _ in part.parameters())
    ]
    return shlex.quote(f"model.blocks=[{','.join(names)}]")


def inputs(kind: str, shape: tuple[int, ...], num_samples: int, device: str) -> Tensor:
    """A batch of token ids 0 or of features 1."""
    value = 0 if kind == "tokens" else 1.0
    return torch.full((num_samples, *shape), value, device=device)


def dropout_shapes(module: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The input shape of every dropout layer with a rate above 0 when module(x) runs, by the layer's name."""
    shapes: dict[str, tuple[int, ...]] = {}
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, name=name: shapes.update({name: tuple(inputs[0].shape)}))
        for name, part in module.named_modules()
        if isinstance(part, HashDropout) and part.rate > 0
    ]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def let_gradients_through(module: nn.Module) -> None:
    """Make backward run through all layers, frozen ones at the input included, as if they were trained.

    Pipeline schedules send a gradient over every boundary, FSDP gathers for every backward, and tensor-parallel ranks
    sum input gradients: each must happen on every rank, and as often as the plan predicts, whatever is frozen.
    Otherwise autograd stops below the first trained layer, which saves that part of the work.
    """
    owners = {part for part in module.modules() if dict(part.named_parameters(recurse=False))}
    owners = {part for part in owners if not isinstance(part, NonDynamicallyQuantizableLinear)}  # is never called
    # Modules around the first layer may have parameters of their own, as a class token.
    inner = (part for part in module.modules() if part in owners and len(owners & {*part.modules()}) == 1)
    first = next(inner, None)
    for part in module.modules():
        is_input = part is first or isinstance(part, (nn.Embedding, layers.TokenEmbedding))
        if is_input and any(True for _ in part.parameters(recurse=False)):
            part.register_forward_hook(_require_gradient)


def _require_gradient(part: nn.Module, inputs: Any, out: Any) -> None:
    if torch.is_grad_enabled() and isinstance(out, Tensor) and out.is_floating_point() and not out.requires_grad:
        out.requires_grad_()


def compute_in(part: nn.Module, dtype: torch.dtype) -> None:
    """Make a module that is no role layer follow the precision table: its floating inputs and own weights are rounded
    to the compute dtype while its forward runs, its buffers permanently."""
    for name, buffer in list(part.named_buffers(recurse=False)):
        if buffer.is_floating_point():
            setattr(part, name, buffer.to(dtype))
    # Attention reads the weights of its output layer, which it never calls.
    holders = ["", *(name for name, x in part.named_children() if isinstance(x, NonDynamicallyQuantizableLinear))]
    each = ((holder, part.get_submodule(holder).named_parameters(recurse=False)) for holder in holders)
    own = [(holder, name) for holder, named in each for name, parameter in named if parameter.dtype != dtype]
    if isinstance(part, layers.RoleLayer) or not own:
        return

    def round_weights(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for holder, name in own:  # an entry of __dict__ hides the Parameter of that name from attribute look-up
            module = part.get_submodule(holder)
            if name in module._parameters:  # else another stage holds it
                module.__dict__[name] = rounded(module.get_parameter(name), dtype)
        torch_private.renew_weight_list(part)
        return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def restore(part: nn.Module, *_: Any) -> None:
        for holder, name in own:
            part.get_submodule(holder).__dict__.pop(name, None)
        torch_private.renew_weight_list(part)

    part.register_forward_pre_hook(round_weights)
    part.register_forward_hook(restore, always_call=True)
