"""Image classifiers: from an architecture to modules, with the names that its spec lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import layers
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.network import Network, assemble
from parallelrun.models.vision import operations as ops
from parallelrun.models.vision.batch_norm import BatchNorm
from parallelrun.models.vision.convolution import CONVOLUTIONS
from parallelrun.models.vision.spec import ClassifierDefinition
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import ModelSpec


class OperationChain(nn.Module):
    """One block: its operations in sequence, and the shortcut around them if it has one."""

    def __init__(self, block: ops.OperationBlock, shape: ops.Shape, config: Config, dtype: torch.dtype):
        super().__init__()
        self._operations, self._shortcut = block.operations, block.shortcut
        for operation, before in block.steps(shape):
            if operation.name:
                module = _module(operation, before, f"{block.name}.{operation.name}", config, dtype)
                self.add_module(operation.name, module)

    def forward(self, x: Tensor) -> Tensor:
        out = self._run(self._operations, x)
        if self._shortcut is None:
            return out
        return functional.relu_(out.add_(self._run(self._shortcut, x)))  # in place: no norm needs what it gave

    def _run(self, operations: Sequence[ops.Operation], x: Tensor) -> Tensor:
        for operation in operations:
            x = getattr(self, operation.name)(x) if operation.name else _apply(operation, x)
        return x


def _module(operation: ops.Operation, shape: ops.Shape, site: str, config: Config, dtype: torch.dtype) -> nn.Module:
    """The module of an operation that has a name."""
    if isinstance(operation, ops.ConvolutionOp):
        return CONVOLUTIONS[operation.role](shape[0], operation, dtype)
    if isinstance(operation, ops.BatchNormOp):
        return BatchNorm(shape[0], config.model.norm_eps, config.model.norm_momentum, dtype)
    if isinstance(operation, ops.DropoutOp):
        return HashDropout(config.dropout, config.seed, site, shape[0], dtype)
    assert isinstance(operation, ops.LinearOp), f"no module for {operation}"
    if operation.role == "column_parallel":
        return layers.ColumnLinear(shape[0], {"": operation.outputs}, True, dtype)
    kind = layers.RowLinear if operation.role == "row_parallel" else layers.UnsplitLinear
    return kind(shape[0], operation.outputs, True, dtype)


def _apply(operation: ops.Operation, x: Tensor) -> Tensor:
    """The result of an operation without a module."""
    if isinstance(operation, ops.ReluOp):
        return functional.relu(x)
    if isinstance(operation, ops.MaxPoolOp):
        return functional.max_pool2d(x, operation.kernel, operation.stride, operation.padding)
    if isinstance(operation, ops.AveragePoolOp):
        return functional.adaptive_avg_pool2d(x, operation.size)
    assert isinstance(operation, ops.FlattenOp), f"{operation} is unknown"
    return x.flatten(1)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, on the current device and uninitialised."""
    definition = definitions.model(config)
    assert isinstance(definition, ClassifierDefinition)
    architecture = definition.architecture(config, spec.sample_shape[1], spec.vocab)
    shapes = ops.flow(architecture, spec.sample_shape)
    dtype = getattr(torch, precision.compute)
    blocks = [OperationChain(block, shape, config, dtype) for block, shape in zip(architecture, shapes)]
    return assemble(config, spec, precision, blocks)
