"""Bytes that the layers of a rank save for backward, by autograd's own account, beside the plan's prediction.

Bodies of ranks: each takes a list of overrides of the tiny config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parallelrun.distributed.mesh import build_mesh
from parallelrun.models import dropout, initialise, recompute, rounding
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build_model_parts
from tests.live_bytes import saving
from tests.plans import tiny_config

Cases = list[dict[str, Any]]


def build_network(overrides: dict[str, Any]) -> tuple[Network, Plan, Tensor]:
    """The network of these overrides on this rank, its plan, and the tokens of one microbatch."""
    config = tiny_config(overrides)
    plan = resolve(config)
    mesh = build_mesh(plan, torch.device("cpu"))
    (network,) = parts = build_model_parts(config, plan, mesh)
    initialise.materialise(parts, plan, mesh, config.seed)
    generator = torch.Generator().manual_seed(7)
    return network, plan, torch.randint(plan.spec.vocab, (plan.batch.micro_batch, plan.spec.seq), generator=generator)


def predicted_bytes(block: str, plan: Plan) -> int:
    spec = plan.spec.block(block)
    return plan.tensor.saved_bytes(spec, plan) + (plan.expert.saved_bytes(spec, plan) if plan.expert else 0)


class Storages:
    """Counts the storages that autograd saves, each once, without those of parameters."""

    def __init__(self, network: Network):
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        self._saved: dict[int, torch.UntypedStorage] = {}  # a reference: the address of a freed one is used again

    def pack(self, saved: Tensor) -> Tensor:
        self._saved[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for address, storage in self._saved.items() if address not in self._parameters)


def saved_by_blocks(cases: Cases) -> list[dict[str, tuple[int, int]]]:
    """By case and block: (bytes saved in a forward pass of one microbatch, bytes predicted for an even load of
    experts). The loss belongs to the last block."""
    return [_saved_by_block(case) for case in cases]


def _saved_by_block(overrides: dict[str, Any]) -> dict[str, tuple[int, int]]:
    network, plan, x = build_network(overrides)
    even = replace(plan, stack=replace(plan.stack, expert_imbalance=1.0))
    targets, by_block = x.roll(-1, 1), {}
    for name in network.block_names:
        storages = Storages(network)
        with saving(storages.pack), dropout.scope(torch.arange(plan.batch.micro_batch)):
            x = network.block(name)(x)
            if name == network.block_names[-1]:
                network.loss(x, targets)
        by_block[name] = storages.nbytes, predicted_bytes(name, even)
    return by_block


def allocated_by_layer(cases: Cases) -> list[tuple[int, int]]:
    """By case: (bytes that the first layer leaves allocated with its input, bytes predicted).

    By the allocator's own account, so that it sees what hooks of `recompute` save. On one device: gloo's threads free
    buffers behind the profiler's back.
    """
    return [_allocated_by_layer(case) for case in cases]


def _allocated_by_layer(overrides: dict[str, Any]) -> tuple[int, int]:
    network, plan, tokens = build_network(overrides)
    x, sample_ids = network.block("embedding")(tokens), torch.arange(plan.batch.micro_batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, rounding.not_kept():
        y = recompute.run(network.block("layers.0"), x, sample_ids, plan.recompute)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    saved = allocated - y.untyped_storage().nbytes() + x.untyped_storage().nbytes()
    return saved, predicted_bytes("layers.0", plan)


def saved_selectively(cases: Cases) -> list[tuple[int, int]]:
    """By case under recompute=selective: (bytes that the first layer saves, bytes predicted)."""
    return [_saved_selectively({**case, "recompute": "selective"}) for case in cases]


def _saved_selectively(overrides: dict[str, Any]) -> tuple[int, int]:
    network, plan, tokens = build_network(overrides)
    x = network.block("embedding")(tokens)
    storages, pack = Storages(network), rounding.Recomputable.pack

    def counted(self: Any, saved: Tensor) -> Any:  # its hooks hide ours: what they return to autograd is counted
        packed = pack(self, saved)
        return storages.pack(packed) if isinstance(packed, Tensor) else packed

    with patch.object(rounding.Recomputable, "pack", counted):
        recompute.run(network.block("layers.0"), x, torch.arange(plan.batch.micro_batch), plan.recompute)
    return storages.nbytes, predicted_bytes("layers.0", plan)


def saved_outside_attention(cases: Cases) -> list[tuple[int, int]]:
    """By case: (bytes that the first layer saves, attention itself left out, rows of this rank)."""
    return [_saved_outside_attention(case) for case in cases]


def _saved_outside_attention(overrides: dict[str, Any]) -> tuple[int, int]:
    network, _, tokens = build_network(overrides)
    x = network.block("embedding")(tokens)
    storages, inside = Storages(network), []
    for module in network.modules():
        if isinstance(module, AttentionProduct):
            module.register_forward_pre_hook(lambda *_: inside.append(True))
            module.register_forward_hook(lambda *_: inside.clear())
    with saving(lambda saved: None if inside else storages.pack(saved)):
        network.block("layers.0")(x)
    return storages.nbytes, x.size(0) * x.size(1)
