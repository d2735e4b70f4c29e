"""Checks of a request for context parallelism."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.contract.context_order import CONTIGUOUS, ORDERS
from parallelrun.planner.contract.request import Request

ULYSSES = "strategy.context.ulysses"


def order_of(requested: str | None, request: Request, head_ranks: int) -> str:
    """The order of tokens: as asked for, else the one that balances attention."""
    if requested is not None:
        return requested
    return CONTIGUOUS if head_ranks == request.cp else balanced_order(request)[0]


def balanced_order(request: Request) -> tuple[str, str]:
    """Return the order that balances attention, and why."""
    if request.spec.packed:
        return "striped", "it balances the attention of every packed document"
    if request.spec.is_causal:
        return "zigzag", "it balances causal attention"
    return CONTIGUOUS, "without a causal mask every order is balanced"


def check(request: Request, head_ranks: int, order: str | None) -> list[Problem]:
    """Every violation. head_ranks: ranks that exchange tokens for heads."""
    spec = request.spec
    if spec.kind != "tokens" or not spec.seq or not any(p.heads for p in spec.parameters.values()):
        message = f"cp={request.cp}: model={spec.name} has no attention over a sequence to divide"
        return [Problem(message, "cp", f"cp=1 dp={request.dp * request.cp} or model=gpt", kind="undefined")]
    if head_ranks < 1 or request.cp % head_ranks:
        message = f"{ULYSSES}={head_ranks} does not divide cp={request.cp}"
        fix = either(ULYSSES, nearest(head_ranks, divisors(request.cp)))
        return [Problem(message, ULYSSES, fix, kind="arithmetic")]
    order = order_of(order, request, head_ranks)
    return _sequence(request, head_ranks, order) + _heads(request, head_ranks, order)


def parts(request: Request, head_ranks: int, order: str, cp: int = 0) -> int:
    """Return the number that must divide the sequence: the lcm of the order's chunks, the ranks and sequence parallel's
    slices."""
    cp = cp or request.cp
    slices = tensor_strategy(request.config.strategy.tensor.kind).asks_for_slices(request.config)
    return lcm(cp // head_ranks * ORDERS[order].parts, cp * (request.tp if slices else 1))


def _sequence(request: Request, head_ranks: int, order: str) -> list[Problem]:
    seq, needed = request.spec.seq, parts(request, head_ranks, order)
    if seq % needed == 0:
        return []
    cut = f"cp={request.cp}"
    if (number := ORDERS[order].parts) > 1:
        cut = f"{number} x {cut} parts (order={order})"
    if needed != parts(replace(request, tp=1), head_ranks, order):
        cut += f" of tp={request.tp} slices each (sequence_parallel)"
    legal = [n for n in divisors(seq)[1:] if _divides(n, head_ranks, order, request)]
    around = [n for n in (seq // needed * needed, (seq // needed + 1) * needed) if n]
    fixes = [either("cp", nearest(request.cp, legal)), either("model.seq", around)]
    message = f"model.seq={seq} does not divide into {cut}"
    return [Problem(message, "cp", " or ".join(filter(None, fixes)), kind="arithmetic")]


def _divides(cp: int, head_ranks: int, order: str, request: Request) -> bool:
    """Whether another cp divides the sequence. All of its ranks exchange heads where all of the asked one do."""
    inner = cp if head_ranks == request.cp else head_ranks
    return cp % inner == 0 and request.spec.seq % parts(request, inner, order, cp) == 0


def head_parts(request: Request) -> int:
    """Over how many ranks of tp the heads are split."""
    return tensor_strategy(request.config.strategy.tensor.kind).head_parts(request)


def _heads(request: Request, head_ranks: int, order: str) -> list[Problem]:
    """Heads on a tp rank are exchanged in equal parts; of keys and values equal parts, or copies of fewer."""
    if head_ranks == 1:
        return []
    spec, parts = request.spec, head_parts(request)
    kv_heads, each = spec.kv_heads or spec.heads, spec.heads // parts
    of = f"{head_ranks} ranks that exchange heads"
    if parts > 1:
        layout = tensor_strategy(request.config.strategy.tensor.kind).layout_name
        of = f"tp={request.tp} x {of}" if parts == request.tp else f"{parts} parts (layout={layout}) x {of}"
    key, others = ULYSSES, divisors(gcd(request.cp, each))
    if head_ranks == request.cp:
        key, others = "cp", [n for n in divisors(each)[1:] if _divides(n, head_ranks, order, request)]
    own = max(1, kv_heads // parts)
    if spec.heads % (parts * head_ranks):
        message = f"model.heads={spec.heads} is not divisible by {of}"
    elif own % head_ranks and head_ranks % own:
        message = f"model.kv_heads={kv_heads} is not divisible by {of}, nor they by it (each held by some ranks)"
    else:
        return []
    legal = [n for n in others if own % n == 0 or n % own == 0]
    fixes = [either(key, nearest(head_ranks, legal)), "strategy.context.kind=ring"]
    return [Problem(message, key, " or ".join(filter(None, fixes)), kind="arithmetic")]
