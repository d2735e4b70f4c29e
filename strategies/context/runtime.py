"""Put a network on the ranks of the cp axis: which tokens it holds, and how its attention reaches the others."""

from __future__ import annotations

from parallelrun.distributed.mesh import Mesh
from parallelrun.models.blockwise.attention import ContextAttention
from parallelrun.models.blockwise.transports import GatherTransport, RingTransport
from parallelrun.models.local_tokens import SomeTokens, hold
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.models.moe.router import Router
from parallelrun.models.moe.shared_groups import SharedGroups
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan

from .blockwise_plan import AXIS, BlockwiseContext
from .plan import GatheredAttention


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Let every layer know its tokens, and every attention and routing group reach those of other ranks.

    In place; names stay. A ring of one rank has nothing to send: that is Ulysses.
    """
    strategy, group = plan.context, mesh.group(AXIS)
    assert isinstance(strategy, BlockwiseContext)
    positions = [strategy.positions(index, plan) for index in range(group.size)]
    hold(network, SomeTokens(positions[group.index]))
    ring, heads = map(mesh.group, strategy.axes(plan))
    spans = [strategy.attended_spans(index, plan) for index in range(ring.size)]
    transport = GatherTransport(ring) if isinstance(strategy, GatheredAttention) else RingTransport(ring)
    attention = ContextAttention(heads, transport, spans, plan.spec.seq)
    groups = SharedGroups(group, positions)
    for module in network.modules():
        if isinstance(module, AttentionProduct):
            module.over_ranks, module.__dict__["uncompiled"] = attention, ("forward",)
        elif isinstance(module, Router):
            module.over_ranks = groups
