"""Attention over the ranks of cp against attention on one device: the layer alone, on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed.mesh import Group
from parallelrun.models import dropout
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.planner.contract.context_order import ORDERS
from parallelrun.strategies.context.layers import ContextAttention
from parallelrun.strategies.context.transports import GatherTransport, RingTransport
from tests.pool import run_ranks

SEQ = 48
NO_GROUP = Group("heads", (0,), 0, None)


TRANSPORTS = {"ring": RingTransport, "allgather": GatherTransport}


def group_of(axis, ranks):
    """The group of this rank among groups of these ranks, made on every rank."""
    mine = None
    for members in ranks:
        process_group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = Group(axis, tuple(members), members.index(dist.get_rank()), process_group)
    return mine


def prove(cells):
    """{cell: largest error of output and gradients of this rank's tokens}."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rings = {1: group_of("ring", [list(range(world))])}
    heads = {1: NO_GROUP, world: group_of("heads", [list(range(world))])}
    if world == 4:
        heads[2] = group_of("heads", [[0, 1], [2, 3]])
        rings[2] = group_of("ring", [[0, 2], [1, 3]])
    rings[world] = Group("ring", (rank,), 0, None)
    return {cell: error(*cell, rings, heads) for cell in cells}


def error(kind, order, kv_heads, rate, causal, num_heads_ranks, rings, heads):
    torch.manual_seed(7)
    query, grad = (torch.randn(2, SEQ, 4, 8, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    key, value = (torch.randn(2, SEQ, kv_heads, 8, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    layer = AttentionProduct(rate, 3, "site", torch.float64, causal)
    ring = rings[num_heads_ranks]
    spans = [ORDERS[order].spans(ring.size, one, SEQ) for one in range(ring.size)]
    mine = torch.cat([torch.arange(s.start, s.stop, s.step) for s in spans[ring.index]])
    mine = mine.chunk(num_heads_ranks)[heads[num_heads_ranks].index]
    with dropout.scope(torch.tensor([5, 9])):
        leaves = [one.clone().requires_grad_() for one in (query, key, value)]
        expected = layer(*leaves)
        expected.backward(grad)
        layer.over_ranks = ContextAttention(heads[num_heads_ranks], TRANSPORTS[kind](ring), spans, SEQ)
        own = [one[:, :, mine].clone().requires_grad_() for one in (query, key, value)]
        out = layer(*own)
        out.backward(grad[:, :, mine])
    pairs = [
        (out.detach(), expected[:, :, mine].detach()),
        *((a.grad, b.grad[:, :, mine]) for a, b in zip(own, leaves)),
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


CELLS = [
    (kind, order, kv_heads, rate, causal, 1)
    for kind in TRANSPORTS
    for order in ORDERS
    for kv_heads, rate, causal in [(4, 0.0, True), (2, 0.3, True), (1, 0.0, False)]
]
HEADS = [("ring", order, kv_heads, rate, True, 2) for order in ORDERS for kv_heads, rate in [(4, 0.0), (1, 0.3)]]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tokens_on_several_ranks_attend_as_on_one(world):
    cells = CELLS
    if world != 3:
        cells = [*cells, *(("ring", "contiguous", kv, rate, True, world) for kv, rate in [(4, 0.0), (2, 0.3)])]
    if world == 4:
        cells = [*cells, *HEADS]
    for errors in run_ranks(world, prove, cells):
        assert {cell: found for cell, found in errors.items() if found > 1e-12} == {}
