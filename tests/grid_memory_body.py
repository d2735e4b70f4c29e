"""What the ranks of a grid keep for backward, by autograd's own account. Bodies of ranks for test_grid_memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parallelrun.base import registry
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.models import dropout, recompute, rounding
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve
from tests.live_bytes import saving
from tests.plans import tiny_config


def placed(overrides: dict[str, Any]) -> tuple[Network, Plan]:
    """The network of these overrides on this rank, its weights drawn anyhow."""
    config = tiny_config(overrides)
    plan = resolve(config)
    mesh: Mesh = build_mesh(plan, torch.device("cpu"))
    with torch.device("meta"):
        network = registry.load("models", config.model.name, "network").build(config, plan.spec, plan.precision)
    registry.load("strategies", f"tensor.{plan.tensor.kind}", "runtime").parallelize(network, plan, mesh)
    network.to_empty(device="cpu")
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.1)
    return network, plan


class Storages:
    """Counts the storages that autograd saves, each once, without those of parameters."""

    def __init__(self, network: Network):
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        self._held: dict[int, torch.UntypedStorage] = {}  # kept: a freed one's address would be used again

    def pack(self, saved: Tensor) -> Tensor:
        self._held[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for address, storage in self._held.items() if address not in self._parameters)


def saved_by_block(overrides: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Body of a rank: by block, (bytes saved in a forward pass of one microbatch, bytes predicted)."""
    network, plan = placed(overrides)
    strategy, num_samples = plan.tensor, plan.batch.micro_batch
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(plan.spec.vocab, (num_samples, plan.spec.seq), generator=generator)
    targets, found = x.roll(-1, 1), {}
    for name in network.block_names:
        storages = Storages(network)
        with saving(storages.pack):
            with dropout.scope(torch.arange(num_samples)):
                x = network.block(name)(x)
            if name == network.block_names[-1]:
                network.loss(x, targets)
        found[name] = storages.nbytes, strategy.saved_bytes(plan.spec.block(name), plan)
    return found


def saved_by_blocks(cases: list[dict[str, Any]]) -> list[dict[str, tuple[int, int]]]:
    """Body of a rank: of each case."""
    return [saved_by_block(case) for case in cases]


def saved_selectively(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Body of a rank: of each case under recompute=selective, (bytes that the first layer keeps, bytes predicted)."""
    return [_saved_selectively({**case, "recompute": "selective"}) for case in cases]


def _saved_selectively(overrides: dict[str, Any]) -> tuple[int, int]:
    network, plan = placed(overrides)
    recompute.apply(network, plan.recompute)
    x = network.block("embedding")(torch.zeros((plan.batch.micro_batch, plan.spec.seq), dtype=torch.int64))
    storages, pack = Storages(network), rounding.Recomputable.pack

    def counted(self: Any, saved: Tensor) -> Any:  # its hooks hide ours: what they give back to autograd is counted
        packed = pack(self, saved)
        return storages.pack(packed) if isinstance(packed, Tensor) else packed

    with patch.object(rounding.Recomputable, "pack", counted):
        recompute.run(network.block("layers.0"), x, torch.arange(plan.batch.micro_batch), plan.recompute)
    predicted = plan.tensor.saved_bytes(plan.spec.block("layers.0"), plan)
    return storages.nbytes, predicted


def saved_by_layer(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Body of a rank: of each case, (bytes that the first layer saves, attention itself left out, rows it has)."""
    return [_saved_by_layer(case) for case in cases]


def _saved_by_layer(overrides: dict[str, Any]) -> tuple[int, int]:
    network, plan = placed(overrides)
    x = network.block("embedding")(torch.zeros((plan.batch.micro_batch, plan.spec.seq), dtype=torch.int64))
    storages, inside = Storages(network), []
    for module in network.modules():
        if isinstance(module, AttentionProduct):
            module.register_forward_pre_hook(lambda *_: inside.append(True))
            module.register_forward_hook(lambda *_: inside.clear())

    with saving(lambda saved: None if inside else storages.pack(saved)):
        network.block("layers.0")(x)
    return storages.nbytes, x.size(0) * x.size(1)
