"""Bodies on ranks for the expert dispatchers: a dispatch on made-up routings, beside the plain sum over assignments on
one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed.mesh import Group
from parallelrun.distributed.turns import Turns
from parallelrun.models.moe import rows
from parallelrun.models.moe.experts import Experts
from parallelrun.models.moe.routing import Routing
from parallelrun.planner.contract.classes import expert_dispatcher
from parallelrun.strategies.expert.capacity import runtime as capacity
from parallelrun.strategies.expert.capacity.runtime import CapacityTokenDispatcher
from parallelrun.strategies.expert.common.all_to_all import AllToAll
from parallelrun.strategies.expert.common.dispatcher import TokenDispatcher
from parallelrun.strategies.expert.common.plan import INNER, OUTER
from parallelrun.strategies.expert.common.rows import BlockTranspose, ExpertGroups, RowPermutation
from parallelrun.strategies.expert.dropless.runtime import DroplessTokenDispatcher

EXPERTS, HIDDEN, FFN, GROUPS, GROUP_TOKENS, CHOICES = 8, 4, 6, 4, 6, 2
TOKENS = GROUPS * GROUP_TOKENS
KINDS = {"capacity": CapacityTokenDispatcher, "dropless": DroplessTokenDispatcher}


@dataclass(frozen=True)
class Case:
    """load: who goes where. random | starved (nobody to the experts of the last rank) | idle (nothing that rank 0 has
    is kept) | piled (everybody to expert 0) | nothing (nobody to anybody)."""

    kind: str
    load: str = "random"
    chunks: int = 1
    group_size: int = 1
    overlap: bool = True


def groups_of_world(inner: int) -> tuple[Group, ...]:
    """The legs' groups of an expert axis that is the world: outer-major."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if inner == 1:
        return (Group("ep", tuple(range(world)), rank, dist.group.WORLD),)
    inners = [tuple(range(start, start + inner)) for start in range(0, world, inner)]
    outers = [tuple(range(place, world, inner)) for place in range(inner)]
    found = []
    for axis, groups in ((INNER, inners), (OUTER, outers)):
        for ranks in groups:
            process_group = dist.new_group(list(ranks))
            if rank in ranks:
                found.append(Group(axis, ranks, ranks.index(rank), process_group))
    return tuple(found)


def dispatch_of(case: Case) -> TokenDispatcher:
    strategy = expert_dispatcher(case.kind)(case.chunks, case.group_size, case.overlap)
    groups = ExpertGroups(groups_of_world(case.group_size), EXPERTS // dist.get_world_size())
    return KINDS[case.kind](strategy, groups, Turns(torch.device("cpu")))


def routing_of(load: str, rank: int) -> Routing:
    """That of a rank's own tokens: choice-major, two different experts a token, some dropped."""
    random = torch.Generator().manual_seed(100 + rank)
    experts = torch.stack([torch.randperm(EXPERTS, generator=random)[:CHOICES] for _ in range(TOKENS)]).t().reshape(-1)
    kept = torch.rand(CHOICES * TOKENS, generator=random) < 0.8
    if load == "starved":
        kept &= experts < EXPERTS // 2
    elif load == "idle":
        kept &= torch.tensor(rank != 0)
    elif load == "piled":
        experts, kept = torch.zeros_like(experts), torch.arange(CHOICES * TOKENS) < TOKENS
    elif load == "nothing":
        kept = torch.zeros_like(kept)
    tokens = torch.arange(TOKENS).repeat(CHOICES)
    slots, taken = torch.full_like(tokens, 10**6), {}
    for number in range(CHOICES * TOKENS):
        if kept[number]:
            place = (int(tokens[number]) // GROUP_TOKENS, int(experts[number]))
            slots[number] = taken.get(place, 0)
            taken[place] = taken.get(place, 0) + 1
    weights = (torch.rand(CHOICES * TOKENS, generator=random, dtype=torch.float64) * kept).requires_grad_()
    capacity = GROUP_TOKENS + 1
    empty = torch.zeros(0, dtype=torch.float64)
    return Routing(tokens, experts, weights, kept, slots, TOKENS, GROUPS, capacity, EXPERTS, None, empty)


def tokens_of(rank: int) -> tuple[Tensor, Tensor]:
    """(a rank's rows, the gradient of what comes of them)."""
    random = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=random, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), grad


def experts_of(first: int, last: int) -> Experts:
    """Experts [first, last) of the layer."""
    random = torch.Generator().manual_seed(7)
    experts = Experts(EXPERTS, HIDDEN, FFN, "swiglu", torch.float64)
    for name in ("gate", "up", "down"):
        whole = torch.randn(getattr(experts, name).shape, generator=random, dtype=torch.float64)
        setattr(experts, name, torch.nn.Parameter(whole[first:last].clone()))
    return experts


def expected(load: str, world: int) -> dict[str, Any]:
    """By name: every rank's output and gradients, and those of all experts. Every expert computes every token here."""
    experts = experts_of(0, EXPERTS)
    found: dict[str, Any] = {"out": [], "x": [], "weights": []}
    for rank in range(world):
        (x, grad), routing = tokens_of(rank), routing_of(load, rank)
        opened = torch.einsum("th,efh->etf", x, experts.up)
        gated = torch.nn.functional.silu(torch.einsum("th,efh->etf", x, experts.gate)) * opened
        of_all = torch.einsum("etf,ehf->teh", gated, experts.down)  # what every expert makes of every token
        shares = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
        number = routing.tokens[routing.kept], routing.experts[routing.kept]
        shares = shares.index_put(number, routing.weights[routing.kept], accumulate=True)
        out = torch.einsum("te,teh->th", shares, of_all)
        (out * grad).sum().backward()
        found["out"].append(out.detach())
        found["x"].append(x.grad)
        found["weights"].append(routing.weights.grad)
    return {**found, **{name: parameter.grad for name, parameter in experts.named_parameters()}}


def passes(case: Case, times: int = 1) -> tuple[dict[str, Tensor], int]:
    """(output and gradients by name, bytes sent) of a rank's forward and backward; the shared expert doubles x."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = EXPERTS // world
    dispatch, experts = dispatch_of(case), experts_of(rank * local, (rank + 1) * local)
    for _ in range(times):
        (x, grad), routing = tokens_of(rank), routing_of(case.load, rank)
        experts.zero_grad()
        y, beside = dispatch(x, routing, experts, lambda x=x: 2 * x)
        assert beside is not None
        # a gradient in other strides than the output's, as a permuted activation gives it
        (y.t() * grad.t()).sum().backward()
        assert torch.equal(beside.detach(), 2 * x.detach())
    gradients = {name: p.grad for name, p in experts.named_parameters()}  # None would be a weight outside the graph
    return {"out": y.detach(), "x": x.grad, "weights": routing.weights.grad, **gradients}, dispatch.take_bytes()


def several(cases: list[Case]) -> list[tuple[dict[str, Tensor], int]]:
    return [passes(case) for case in cases]


def order_of_events(case: Case) -> list[str]:
    """What one forward and backward do, in order."""
    log: list[str] = []

    class Heard(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            log.append(name)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            log.append(f"{ctx.name} backward")
            return grad, None

    begin, end = AllToAll.begin, AllToAll.end

    def heard_begin(self: AllToAll, rows: Tensor, backward: bool = False, counted: bool = True) -> Tensor:
        log.append("send")
        return begin(self, rows, backward, counted)

    def heard_end(self: AllToAll) -> Tensor:
        log.append("wait")
        return end(self)

    AllToAll.begin, AllToAll.end = heard_begin, heard_end
    rank, world = dist.get_rank(), dist.get_world_size()
    local = EXPERTS // world
    experts, (x, grad) = experts_of(rank * local, (rank + 1) * local), tokens_of(rank)

    def compute(rows: Tensor, counts: Tensor | None) -> Tensor:
        return Heard.apply(experts(rows, counts), "experts")

    y, beside = dispatch_of(case)(x, routing_of(case.load, rank), compute, lambda: Heard.apply(x, "shared"))
    log.append("|")
    ((y + beside) * grad).sum().backward()
    return log


def with_fault(fault: str, case: Case) -> tuple[dict[str, Tensor], int]:
    """`passes`, with a bug planted."""
    if fault == "arrival order":  # experts read rows as they come, by rank
        BlockTranspose.apply = RowPermutation.apply = lambda self, rows: rows
    elif fault == "expert order":  # rows are packed for one level
        ExpertGroups.send_order = lambda self, device: torch.arange(EXPERTS, device=device)
    elif fault == "gradient of the row alone":  # as if every row that comes back had weight 1 in backward
        spreads = (rows._CombineRows, capacity._CombineSlots)
        for node in spreads:
            backward = node.backward
            node.backward = staticmethod(
                lambda ctx, grad, backward=backward: unweighted(backward(ctx, grad), ctx, grad)
            )
    return passes(case)


def unweighted(found: tuple, ctx: Any, grad: Tensor) -> tuple:
    tokens = ctx.saved_tensors[2]
    return grad[tokens.clamp(max=TOKENS - 1)], *found[1:]
