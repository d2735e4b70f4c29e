"""The choice of an all-reduce algorithm: `strategy.data.algorithm` and `group_size`. Torch-free.

For any strategy that reduces whole gradients: it has a field `algorithm`, and its config has `AlgorithmKeys`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from parallelrun.errors import Problem
from parallelrun.plan import data_cost
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Plan
from parallelrun.wording import divisors, either, nearest, one_of

from ..keys import AlgorithmKeys
from .steps import ALGORITHMS, HALVING_DOUBLING, HIERARCHICAL, NATIVE, RING, TREE

COST_NAMES = {
    NATIVE: data_cost.RING,
    RING: data_cost.RING,
    HALVING_DOUBLING: data_cost.HALVING,
    HIERARCHICAL: data_cost.HIERARCHICAL,
    TREE: data_cost.BINOMIAL,
}


@dataclass(frozen=True)
class Algorithm:
    """name: native (the backend's own) | ring | halving_doubling | tree | hierarchical. group_size: of hierarchical,
    how many consecutive members of dp make an inner group; else 1."""

    name: str = NATIVE
    group_size: int = 1

    @property
    def cost_name(self) -> str:
        """The name of its cost in `plan.data_axis`. The backend's own all-reduce counts as a ring."""
        return COST_NAMES[self.name]


def of(request: Request, default: str) -> Algorithm:
    """The Algorithm that a request without violations asks for."""
    name = AlgorithmKeys.of(request.config).algorithm or default
    return Algorithm(name, _group_size(request) if name == HIERARCHICAL else 1)


def check(request: Request, default: str) -> list[Problem]:
    """Unknown algorithms, groups that do not make up dp."""
    data = AlgorithmKeys.of(request.config)
    name, where = data.algorithm or default, "strategy.data.group_size"
    found = one_of("strategy.data.algorithm", name, ALGORITHMS)
    if found:
        return found
    if name != HIERARCHICAL:
        if data.group_size is None:
            return []
        what = f"{where}={data.group_size} is read by algorithm=hierarchical only"
        return [Problem(what, where, "strategy.data.algorithm=hierarchical", kind="unread")]
    size = _group_size(request)
    if size < 1:  # told by the rules
        return []
    if request.dp % size == 0:
        return _check_experts(size, request)
    source = "" if data.group_size is not None else f" (cluster.gpus_per_node / tp={request.tp})"
    what = f"inner groups of {size}{source} do not make up dp={request.dp}"
    return [Problem(what, where, either(where, nearest(size, divisors(request.dp))), kind="arithmetic")]


def _check_experts(size: int, request: Request) -> list[Problem]:
    """The copies of an expert are every ep-th member of dp: inner groups hold equally many of them, or one."""
    ep = request.ep
    if size % ep == 0 or ep % size == 0:
        return []
    where = "strategy.data.group_size"
    legal = [n for n in divisors(request.dp) if n % ep == 0 or ep % n == 0]
    what = f"inner groups of {size} members of dp do not hold equally many copies of an expert, one in {ep} members"
    return [Problem(what, where, either(where, nearest(size, legal)), kind="arithmetic")]


def over(algorithm: Algorithm, axis: str, plan: Plan) -> Algorithm:
    """`algorithm` for a sum over `axis`, dp or what ep leaves of it: inner groups are the same ranks' (or one rank)."""
    if algorithm.name != HIERARCHICAL or axis == "dp":
        return algorithm
    apart = plan.mesh.size("dp") // plan.mesh.size(axis)
    return replace(algorithm, group_size=algorithm.group_size // gcd(algorithm.group_size, apart))


def filled(request: Request, default: str) -> tuple[str, ...]:
    """The source of the inner groups' size, where the user gave none."""
    data = AlgorithmKeys.of(request.config)
    if (data.algorithm or default) != HIERARCHICAL or data.group_size is not None or request.dp == 1:
        return ()
    reason = "the ranks of dp in a host" if request.config.cluster.gpus_per_node else "cluster.gpus_per_node is not set"
    return (f"group_size={_group_size(request)} (filled: dp {request.dp}, {reason})",)


def _group_size(request: Request) -> int:
    """As given; else the members of dp that share a host; where hosts are unknown the divisor of dp next to its root,
    with which a rank has the fewest rounds."""
    asked, per_node = AlgorithmKeys.of(request.config).group_size, request.config.cluster.gpus_per_node
    if asked is not None:
        return asked
    if per_node is not None:
        return min(request.dp, max(1, per_node // request.tp))
    return min(divisors(request.dp), key=lambda size: (size + request.dp // size, size))
