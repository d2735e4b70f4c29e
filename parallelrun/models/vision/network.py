"""From an architecture to modules, with the names that its spec lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models import layers
from parallelrun.models.network import Network, store
from parallelrun.models.rounding import rounded
from parallelrun.precision import Precision

from . import architecture as parts
from .batch_norm import BatchNorm


class Convolution(nn.Module):
    """x (batch, inputs, height, width) -> (batch, outputs, ...). Parameters `weight` (outputs, inputs, kernel, kernel)
    and maybe `bias` (outputs), rounded to the compute dtype where they are used."""

    def __init__(self, inputs: int, made: parts.Convolution, compute_dtype: torch.dtype):
        super().__init__()
        self.stride, self.padding, self.compute_dtype = made.stride, made.padding, compute_dtype
        self.weight = nn.Parameter(torch.empty(made.outputs, inputs, made.kernel, made.kernel))
        self.bias = nn.Parameter(torch.empty(made.outputs)) if made.bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.conv2d(x.to(dtype), rounded(self.weight, dtype), bias, self.stride, self.padding)


class Chain(nn.Module):
    """A block: its operations in order, and the shortcut around them if it has one."""

    def __init__(self, block: parts.Block, shape: parts.Shape, config: Config, dtype: torch.dtype):
        super().__init__()
        self._steps = self._add(block, block.operations, shape, config, dtype)
        self._around = None
        if block.shortcut is not None:
            self._around = self._add(block, block.shortcut, shape, config, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = self._run(self._steps, x)
        return out if self._around is None else functional.relu(out + self._run(self._around, x))

    def _run(self, steps: Sequence[tuple[str, parts.Operation]], x: Tensor) -> Tensor:
        for name, operation in steps:
            x = getattr(self, name)(x) if name else _apply(operation, x)
        return x

    def _add(
        self,
        block: parts.Block,
        operations: Sequence[parts.Operation],
        shape: parts.Shape,
        config: Config,
        dtype: torch.dtype,
    ) -> list[tuple[str, parts.Operation]]:
        """Make the modules; (name of the module or empty, operation) in order."""
        for operation, before in zip(operations, parts.flow(operations, shape)):
            if operation.name:
                site = f"{block.name}.{operation.name}"
                self.add_module(operation.name, _module(operation, before, site, config, dtype))
        return [(operation.name, operation) for operation in operations]


def _module(operation: parts.Operation, shape: parts.Shape, site: str, config: Config, dtype: torch.dtype) -> nn.Module:
    """The module of an operation that has one."""
    if isinstance(operation, parts.Convolution):
        return Convolution(shape[0], operation, dtype)
    if isinstance(operation, parts.BatchNorm):
        return BatchNorm(shape[0], config.model.norm_eps, config.model.norm_momentum, dtype)
    if isinstance(operation, parts.Dropout):
        return layers.Dropout(config.dropout, config.seed, site, shape[0], dtype)
    assert isinstance(operation, parts.Linear), f"no module for {operation}"
    if operation.role == "columns":
        return layers.Columns(shape[0], {"": operation.outputs}, True, dtype)
    kind = layers.Row if operation.role == "row" else layers.Linear
    return kind(shape[0], operation.outputs, True, dtype)


def _apply(operation: parts.Operation, x: Tensor) -> Tensor:
    """An operation without parameters."""
    if isinstance(operation, parts.Relu):
        return functional.relu(x)
    if isinstance(operation, parts.MaxPool):
        return functional.max_pool2d(x, operation.kernel, operation.stride, operation.padding)
    if isinstance(operation, parts.AveragePool):
        return functional.adaptive_avg_pool2d(x, operation.size)
    assert isinstance(operation, parts.Flatten), f"{operation} is unknown"
    return x.flatten(1)


class ImageNetwork(Network):
    """The blocks of an architecture, by their dotted names."""

    def __init__(self, blocks: Sequence[parts.Block], config: Config, spec: ModelSpec, dtype: torch.dtype):
        super().__init__(spec, layers.TokenLoss(config.model.label_smoothing))
        shape = spec.sample_shape
        for block in blocks:
            *parents, leaf = block.name.split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in dict(place.named_children()):
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.add_module(leaf, Chain(block, shape, config, dtype))
            shape = block.out(shape)


def assemble(blocks: Sequence[parts.Block], config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The network of an architecture, its parameters uninitialised and stored as the precision says."""
    network = ImageNetwork(blocks, config, spec, getattr(torch, precision.compute))
    store(network, precision.stored)
    return network
