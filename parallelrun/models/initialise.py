"""Same initial weights under every plan and on every device.

A logical tensor is cut along dim 0 into fixed blocks of at most 16 MiB. A block is drawn on CPU, in fp32, from
hash(seed, one-device name, block number), and a rank copies the part that its Layout assigns to it. So no rank ever
holds more than its shard and one block, and fp64, fp32 and bf16 runs start from the same numbers. The generator is
numpy's Philox (Salmon et al., SC11), keyed with 128 bits: torch's CPU generator keeps 32 bits of its seed, too few for
the blocks of a large model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.network import Network, allocate
from parallelrun.planner.contract.parameters import module_layout
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import Initialiser, ParameterSpec

BLOCK_BYTES = 16 * 2**20
Ranges = tuple[tuple[int, int], ...]


class InitialValues(Protocol):
    """Initial values from elsewhere, such as trained weights."""

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The part `ranges` of a logical tensor, in any dtype."""
        ...

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name: without a stored adapter, a new one starts."""
        ...


def materialise(
    parts: Sequence[Network], plan: Plan, mesh: Mesh, seed: int, values: InitialValues | None = None
) -> None:
    """Give every parameter of this rank's stages storage on `mesh.device` and its initial values, in place.

    values: where those come from instead of `seed`. Call it after the data strategy has sharded the parts: plain
    Parameters keep their identity, FSDP2's DTensors get their local shard only. A tied copy gets its original's values.
    Buffers on meta stay there: modules compute their constants in forward or hold them on a real device.
    """
    originals = dict(plan.spec.tied)
    own: dict[str, Tensor] = {}
    filled: set[int] = set()
    for part in parts:
        allocate(part, mesh.device)
        _move_buffers(part, mesh.device)
        if part.own_values is not None and not own:
            own = part.own_values(seed)
        for name, parameter in part.named_parameters():
            if id(parameter) in filled:  # a tied weight of two stages of this rank
                continue
            filled.add(id(parameter))
            spec = plan.spec.parameters[originals.get(name, name)]
            layout: Layout = plan.data.weight_layout(spec, module_layout(spec, plan), plan)
            local = parameter.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            stored = values if values is not None and values.holds(spec.name) else None
            fill(local, spec, layout.ranges(spec.shape, plan.mesh.sizes, mesh.coordinate), seed, own, stored)


def logical(spec: ParameterSpec, seed: int, own: dict[str, Tensor] | None = None) -> Tensor:
    """The full logical tensor of `spec` in fp32 on CPU: for tests and small tensors."""
    full = torch.empty(spec.shape)
    fill(full, spec, tuple((0, size) for size in spec.shape), seed, own or {})
    return full


def fill(
    local: Tensor,
    spec: ParameterSpec,
    ranges: Ranges,
    seed: int,
    own: dict[str, Tensor],
    values: InitialValues | None = None,
) -> None:
    """Write the part `ranges` ([start, stop) per dim) of `spec`'s initial values into `local`, on any device."""
    shape = tuple(stop - start for start, stop in ranges)
    assert tuple(local.shape) == shape, f"{spec.name}: {tuple(local.shape)} is held, its layout says {shape}"
    kind = spec.initialiser.kind
    if values is not None:
        local.copy_(values.read(spec.name, ranges))
    elif kind in ("zeros", "ones"):
        local.fill_(0.0 if kind == "zeros" else 1.0)
    elif kind == "own":
        local.copy_(own[spec.name][tuple(slice(*pair) for pair in ranges)])
    elif local.numel():
        local, ranges = (local, ranges) if ranges else (local.view(1), ((0, 1),))  # a scalar is one row
        for start, block in _blocks(spec, ranges[0], seed):
            _copy_rows(local, block, start, ranges)


def _copy_rows(local: Tensor, block: Tensor, start: int, ranges: Ranges) -> None:
    """Copy the part of `block` (rows of dim 0 from `start`) that is in `ranges` into `local`."""
    first, last = max(start, ranges[0][0]), min(start + block.size(0), ranges[0][1])
    rest = tuple(slice(*pair) for pair in ranges[1:])
    local[first - ranges[0][0] : last - ranges[0][0]].copy_(block[(slice(first - start, last - start), *rest)])


def _blocks(spec: ParameterSpec, rows: tuple[int, int], seed: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, values) of every block that touches `rows`."""
    num_rows, *row_shape = spec.shape or (1,)
    size = max(1, BLOCK_BYTES // (4 * prod(row_shape)))
    for number in range(rows[0] // size, -(-rows[1] // size)):
        start = number * size
        shape = (min(size, num_rows - start), *row_shape)
        yield start, torch.from_numpy(_draw(spec.initialiser, shape, f"{seed}/{spec.name}/{number}"))


def _draw(initialiser: Initialiser, shape: tuple[int, ...], key: str) -> np.ndarray:
    digest = hashlib.sha256(f"initialise/{key}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    scale = np.float32(initialiser.std)
    if initialiser.kind == "normal":
        return np.asarray(generator.standard_normal(shape, dtype=np.float32) * scale)
    assert initialiser.kind == "uniform", f"no initialiser {initialiser.kind}"
    return np.asarray((2 * generator.random(shape, dtype=np.float32) - 1) * scale)


def _move_buffers(part: Network, device: torch.device) -> None:
    """Move buffers that have values to `device`."""
    for module in part.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device != device and not buffer.is_meta:
                setattr(module, name, buffer.to(device))
