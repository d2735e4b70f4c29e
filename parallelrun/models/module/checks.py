"""The checks of a user's module by running it: its blocks, its cuts into stages, and its layers split by tp."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from math import prod

import torch
from torch import nn

from parallelrun.base import user_code
from parallelrun.base.errors import ConfigError
from parallelrun.base.registry import has
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import layers
from parallelrun.models.module import network, source
from parallelrun.models.module.outputs import undefined
from parallelrun.models.module.own_forward import OwnForwardNetwork
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.model.model_spec import ModelSpec

Sizes = tuple[int, ...]
USELESS = 0.75  # part of the parameters in one block above which a pipeline gains nothing
SPLIT_ROLES = ("column_parallel", "row_parallel")


def check_cuts(config: Config, spec: ModelSpec, device: str) -> None:
    """Raise ConfigError unless stages on the module's own forward compute what it computes: on the CPU by their
    results, on meta by what they call and read. They are cut at the first, a middle and the last possible place."""
    title = f"{source.builder_of(config).title(config)} cannot be cut into stages"
    with torch.device(device), torch.no_grad():
        module = source.build(config, spec.vocab).eval()
        how = network.own_forward(config, module)
        x = torch.arange(2 * prod(spec.sample_shape)).view(2, *spec.sample_shape) * 7 + 3
        x = x % spec.vocab if spec.kind == "tokens" else x.float().sin()
        expected = module(x)
        names = [block.name for block in spec.blocks]
        cuts = [number for number, block in enumerate(spec.blocks) if number and not block.follows]
        ends = [0, *sorted({cuts[0], cuts[len(cuts) // 2], cuts[-1]}), len(names)]
        parts = [names[start:end] for start, end in pairwise(ends)]
        actual = x
        try:
            for stage in OwnForwardNetwork(spec, nn.Identity(), module, how).split(parts):
                actual = stage(actual)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
            raise undefined(f"{title}: {user_code.reason(error)}", "pp=1", "pp") from error
    if device == "cpu" and (expected.shape != actual.shape or not torch.allclose(expected, actual, 1e-4, 1e-5)):
        raise undefined(f"{title}: on its own forward they compute something else", "pp=1", "pp")


def check_split(device: str, config: Config, vocab: int, kind: str, shape: Sizes) -> None:
    """Raise ConfigError unless forward works when every column- and row-parallel layer is split, on `device`.

    They are split by tp; by 2 under a grid, which splits features over some of its axes only: a module that works on
    halves works on other parts.
    """
    tensor = config.strategy.tensor.kind
    is_grid = not (has("strategies", f"tensor.{tensor}") and tensor_strategy(tensor).is_one_dimensional)
    tp = 2 if is_grid and config.tp != 1 else config.tp or 2
    if tp == 1 or (config.tp is None and not config.model.roles):
        return
    module = source.build_with_roles(config, vocab, device)
    if not {layers.role_of(part) for part in module.modules()} & set(SPLIT_ROLES):
        return
    inputs = network.inputs(kind, shape, 1, device)
    expected = network.dropout_shapes(module.eval(), inputs)
    entered = [""]
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        if not divide(part, tp):
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
        raise undefined(message, fix, "model.roles") from error
    for name, before in expected.items():
        if before[:-1] != shapes[name][:-1]:
            message = (
                f"dropout {name} acts on something whose rows, not columns, tp={tp} splits ({before} to {shapes[name]})"
            )
            fix = "drop before heads are split or after they are joined; probabilities of attention cannot be dropped"
            raise undefined(message, fix, "model.roles")


def check_useful_cut(module: nn.Module, names: Collection[str]) -> None:
    """Raise ConfigError where one block holds a list of layers and most of the module's parameters."""
    total = sum(parameter.numel() for parameter in module.parameters())
    for name in names:
        block = module.get_submodule(name)
        lists = {path: part for path, part in block.named_modules() if isinstance(part, nn.ModuleList)}
        inner, inner_list = next(((path, part) for path, part in lists.items() if len(part) > 1), ("", None))
        if inner_list and sum(parameter.numel() for parameter in block.parameters()) > USELESS * total:
            path = f"{name}.{inner}"
            message = f"block {name} holds the {len(inner_list)} layers of {path}: one stage would compute nearly all"
            raise undefined(message, network.suggested_blocks(module))


def divide(part: nn.Module, tp: int) -> bool:
    """Cut the weights of a column- or row-parallel layer to a tp-th; False if they do not divide."""
    dim = {"column_parallel": 0, "row_parallel": 1}.get(layers.role_of(part))
    for key, parameter in list(part.named_parameters(recurse=False)):
        if dim is None or parameter.dim() <= dim:
            continue
        if parameter.size(dim) % tp:
            return False
        size = list(parameter.shape)
        size[dim] //= tp
        setattr(part, key, nn.Parameter(torch.zeros(size, dtype=parameter.dtype, device=parameter.device)))
    return True
