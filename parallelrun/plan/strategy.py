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
from parallelrun.model_spec import BlockSpec, ModelSpec, ParameterSpec
from parallelrun.plan.messages import Explanation
from parallelrun.plan.structure import Batch, Collective, DataWay, Equivalence, ExpertWay, Memory, Plan, TensorWay


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


class TensorWayPlan(Protocol):
    def check(self, request: Request) -> list[Problem]:
        """Every violation, each with the nearest legal values."""

    def sample_parts(self, request: Request) -> int:
        """Into how many parts this way cuts the samples of a microbatch: micro_batch must divide by it."""

    def mesh_dims(
        self, request: Request
    ) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """(mesh dims with degrees that make up the tensor axes, factors): see MeshShape."""

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """How a logical parameter lies on the tensor axes, with the axes its gradient is partial over."""

    def resolve(self, request: Request) -> TensorWay:
        """The plan's TensorWay, everything chosen. Asked once, of a request without violations."""

    def vocabulary_parts(self, request: Request) -> tuple[int, ...]:
        """Degrees of the axes that split the vocabulary, major first."""

    def filled(self, request: Request) -> tuple[str, ...]:
        """Sentences on what this way filled in, such as `depth=2 (filled: the largest legal)`."""

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """Shape of the local tensor that passes between blocks, for one microbatch."""

    def loss_axes(self, plan: Plan) -> tuple[str, ...]:
        """Leaf axes over which the loss of a microbatch is a partial sum: each rank has that of its own samples."""

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Bytes one microbatch of `block` keeps for backward on a rank, under plan.recompute."""

    def passes(self, block: BlockSpec, plan: Plan) -> tuple[Pass, ...]:
        """What the layers of `block` need in its backward pass, in forward order; where it is computed again (recompute
        full), of the second forward."""

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """One rank's tensor-axis collectives of one whole training step (all microbatches) for those blocks."""

    def equivalence(self, plan: Plan) -> Equivalence: ...

    def explain(self, plan: Plan) -> Explanation:
        """Every message or collective of a step, for `parallelrun explain`."""
        ...


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


class ExpertWayPlan(Protocol):
    """Of the ways to bring tokens to experts that lie on other ranks of dp (`strategies/expert`)."""

    def check(self, request: Request) -> list[Problem]: ...

    def resolve(self, request: Request) -> ExpertWay:
        """The plan's ExpertWay, everything chosen. Asked of a request without violations."""

    def mesh_dims(
        self, request: Request
    ) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """(mesh dims that make up ep, major first; factors): (("ep", 4),), () or two levels and how they make ep."""

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """One rank's all-to-alls of one training step (all microbatches) for those blocks."""

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Bytes that one microbatch of `block` keeps for backward because rows go to experts and back."""

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


@dataclass(frozen=True)
class Pass:
    """One layer's part of a block's backward pass: bytes on a rank for one microbatch.

    kept: what forward has saved for it, freed when it is over. arriving, giving: gradients of activations that it reads
    and gives, and those that wait for an earlier layer meanwhile. scratch: what only it needs. weights: the gradient of
    its weights, in the stored dtype. reads: the gradient of its output, from which the weights' one is computed: where
    that is done apart (zero bubble), it stays until then.
    """

    kept: int = 0
    arriving: int = 0
    giving: int = 0
    scratch: int = 0
    weights: int = 0
    reads: int = 0
