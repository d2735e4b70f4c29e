"""What every way answers before it runs: the torch-free half of a strategy (`strategies/<axis>/<kind>/plan.py`).

Each such module has one class named `Way` that follows the protocol of its axis; the registry finds it by kind. All
methods are pure functions of their arguments. `request` is the half-made plan as plain numbers, for checks; after the
checks pass, the same questions are asked of the finished Plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import ModelSpec, ParameterSpec
from parallelrun.plan.messages import Explanation
from parallelrun.plan.structure import Batch, Collective, DataWay, Equivalence, Memory, Plan


@dataclass(frozen=True)
class Request:
    """The degrees and batch as filled, before they are known to be legal. batch is None if it does not divide.

    servers: ranks beside the dp x tp x pp workers.
    """

    config: Config
    spec: ModelSpec
    pp: int
    dp: int
    tp: int
    virtual_stages: int
    batch: Batch | None
    servers: int = 0
    ep: int = 1


class DataWayPlan(Protocol):
    """Optional beside these: `takes_experts` (True: experts may be spread over its ranks), `gathered_bytes` (weights
    held gathered at the peak, and what else the way keeps), `filled` (what the way filled in), `links` (bytes from rank
    to rank, where the way itself decides who sends to whom), `sending_classes` (where members of dp send different
    things: (the first of those alike, how many) each), and of a way with server ranks what `ServerWayPlan` adds."""

    reads: tuple[str, ...]  # the keys of `strategy.data` beside `kind` that this way reads; others given are violations

    def check(self, request: Request) -> list[Problem]: ...

    def resolve(self, request: Request) -> DataWay:
        """The plan's DataWay (or this way's own subclass), everything chosen. Asked of a request without violations."""

    def mesh_dims(
        self, request: Request
    ) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """(mesh dims that make up dp, factors): (("dp", 4),) or (("dp_replicate", 2), ("dp_shard", 2))."""

    def weight_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """How the stored weights of a logical parameter lie, given their tensor layout."""

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """How the optimizer's state lies (and the shard of the weight that the optimizer updates)."""

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """How the stored gradients lie at their peak, for memory."""

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Data-axis collectives of one rank at that pp rank in one step, and what the final gradients need:

        the sums over partial axes and of tied copies, which are sized by this way's shards.
        """

    def equivalence(self, plan: Plan) -> Equivalence: ...

    def explain(self, plan: Plan) -> Explanation:
        """Every message or collective of a step, for `parallelrun explain`."""
        ...


class ServerWayPlan(Protocol):
    """What a data strategy with server ranks answers beside `DataWayPlan` (`strategies/data/ps`)."""

    def num_servers(self, asked: int | None) -> int:
        """Ranks that are no workers. asked: `strategy.data.servers`."""

    def server_collectives(self, server: int, plan: Plan) -> list[Collective]:
        """One server's part in a step of every worker."""

    def server_memory(self, server: int, plan: Plan) -> Memory:
        """Bytes of one server."""

    def num_shards(self, server: int, plan: Plan) -> int:
        """Tensors, or parts of them, that one server owns."""
