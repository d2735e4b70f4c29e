"""The Plan: the immutable result of `resolve`.

A Plan depends only on config and world: every rank derives it from the frozen `config.yaml`, and none is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from parallelrun.base.precision import Precision
from parallelrun.config.schema.stack_schema import StackConfig
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.model.model_spec import BlockSpec, ModelSpec

if TYPE_CHECKING:
    from parallelrun.planner.contract.context_strategy import ContextStrategy
    from parallelrun.planner.contract.data_strategy import DataStrategy
    from parallelrun.planner.contract.expert_dispatcher import ExpertDispatcher
    from parallelrun.planner.contract.pipeline_schedule import PipelineSchedule
    from parallelrun.planner.contract.tensor_strategy import TensorStrategy

Value = TypeVar("Value")
# fp64 numbers that are summed over all ranks in every step (`training.loop.step`): loss sum, valid targets and stop,
# besides the squared norms of `Plan.num_norms` gradients
CONTROL_ELEMENTS = 3
WORLD, EMBEDDING = "world", "embedding"  # groups that are not mesh axes: all ranks; the holders of a tied weight
DATA_CONTEXT = "dp_cp"  # dp x cp as one axis
EXPERT_DP = "expert_dp"  # dp x cp without ep: the copies of an expert
SYNC = "sync"  # purpose of the traffic between independent replicas, once every `DataStrategy.sync_every` steps


@dataclass(frozen=True)
class BatchSizes:
    """Batch arithmetic, in samples: global_batch = dp x micro_batch x microbatches."""

    global_batch: int
    micro_batch: int
    microbatches: int

    @property
    def replica_batch(self) -> int:
        """Samples of one data replica in a step."""
        return self.micro_batch * self.microbatches


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its index along the model, the pp rank that runs it, and the blocks it holds."""

    index: int
    pp_rank: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class SampleSets:
    """The samples that share BatchNorm statistics: sets of `size` consecutive samples of the global batch.

    spread: a set is split over data replicas, which exchange its sums in forward and backward; else every microbatch
    consists of complete sets. exchanged: replicas exchange statistics in every step (only running ones if not spread).
    """

    size: int
    spread: bool
    exchanged: bool


@dataclass(frozen=True)
class Equivalence:
    """How a plan's result compares with that of one device.

    kind: `exact`, `exact_when` (under the condition in `detail`) or `replay` (equals a single-process replay of the
    algorithm in `detail`). bound: the largest error of a replay if the backend chooses the order of low-precision
    sums; None: the usual bound. floor: the magnitude below which these sums have no relative precision.
    """

    kind: str
    detail: str = ""
    bound: float | None = None
    floor: float = 0.0


def once(cache: dict[object, Any], key: object, compute: Callable[[], Value]) -> Value:
    """The value under `key`, computed if it is not in the cache yet."""
    if key not in cache:
        cache[key] = compute()
    value: Value = cache[key]
    return value


@dataclass(frozen=True)
class Plan:
    """Everything that a worker must know except hyper-parameters.

    optimizer_states: state tensors that the optimizer keeps per weight. servers: the last ranks, which are outside the
    mesh (server k has rank num_workers + k). filled: sentences on values that were filled in (`dp=3 (filled: world 4,
    tp 1)`). warnings: sentences for the user.
    """

    preset: str
    world: int
    mesh: MeshShape
    batch: BatchSizes
    data: DataStrategy
    tensor: TensorStrategy
    pipeline: PipelineSchedule
    stages: tuple[Stage, ...]
    spec: ModelSpec
    precision: Precision
    recompute: str
    dropout: float
    device: str  # cpu | cuda
    optimizer: str
    optimizer_states: int
    offloads_optimizer: bool
    equivalence: Equivalence
    servers: int = 0
    filled: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    sample_sets: SampleSets | None = None  # None: the model has no BatchNorm
    expert: ExpertDispatcher | None = None  # None: every rank holds all experts (ep=1)
    context: ContextStrategy | None = None  # None: every rank has complete sequences (cp=1)
    loss_chunks: int = 1  # parts of a microbatch's tokens whose logits are computed one after the other
    stack: StackConfig = field(default_factory=StackConfig)  # the program that is predicted; runs are this one's

    @cached_property
    def cache(self) -> dict[object, Any]:
        """A cache of values computed from this plan, each under a unique key. Valid because a plan never changes."""
        return {}

    @cached_property
    def weights_cache(self) -> dict[object, Any]:
        """As `cache`, of values that depend neither on the batch nor on recomputation; plans that differ in nothing
        else share it."""
        return {}

    @cached_property
    def blocks_cache(self) -> dict[object, Any]:
        """As `cache`, of values that depend on a block, on how tp, ep and cp split it, and on a microbatch: a search
        shares it between plans that differ in dp, pp, the data strategy, the number of microbatches and recomputation.
        """
        return {}

    def sharing(self, **changes: Any) -> Plan:
        """The plan with other recomputation or another number of microbatches, and caches that depend on neither."""
        changed = replace(self, **changes)
        vars(changed).update(weights_cache=self.weights_cache, blocks_cache=self.blocks_cache)
        return changed

    @property
    def runs_again(self) -> bool:
        """Whether the backward of a block runs its forward again."""
        return self.recompute in ("full", "offload")

    @property
    def degrees(self) -> dict[str, int]:
        """pp, dp, cp, tp, ep in rank order."""
        return {axis: self.mesh.size(axis) for axis in ("pp", "dp", "cp", "tp", "ep")}

    @cached_property
    def count_axis(self) -> str:
        """The axis of the ranks with tokens of their own, over which counts are added: dp, or dp x cp where sequences
        are divided. Samples are divided over dp alone."""
        return DATA_CONTEXT if self.context else "dp"

    @cached_property
    def num_data_ranks(self) -> int:
        """The ranks of `count_axis`."""
        return self.mesh.size(self.count_axis)

    @cached_property
    def worker_axis(self) -> str:
        """The axis of the workers. A worker is the ranks that act as one in the data strategy: those of a sequence
        (cp), and, where workers are not in step or push to servers, those that share a copy of the experts (ep)."""
        shares_experts = self.expert is not None and self.mesh.size(EXPERT_DP) < self.mesh.size("dp")
        return EXPERT_DP if shares_experts and (self.data.has_servers or not self.data.in_step) else "dp"

    @cached_property
    def worker_ranks(self) -> str:
        """The axes of the ranks of one worker, those of pp and tp among them, joined by `+`; empty for a single one."""
        others = self.mesh.mesh_dims_of(self.worker_axis)
        return "+".join(name for name, degree in self.mesh.mesh_dims if degree > 1 and name not in others)

    @property
    def num_replicas(self) -> int:
        """The number of workers (of `worker_axis`)."""
        return self.mesh.size(self.worker_axis)

    @cached_property
    def sums_workers_first(self) -> bool:
        """Whether a worker sums its gradients before the data strategy combines those of several workers."""
        return self.data.sums_workers_first and 1 < self.num_replicas < self.num_data_ranks

    @cached_property
    def data_axis(self) -> str:
        """The axis over which the data strategy combines gradients."""
        return self.worker_axis if self.sums_workers_first else self.count_axis

    @property
    def ep_spans_tp(self) -> bool:
        """Whether the ranks of tp have complete experts, and divide the tokens that they send to experts."""
        return bool(self.expert and self.expert.spans_tp)

    @property
    def expert_tp(self) -> int:
        """The ranks of tp that split an expert."""
        return 1 if self.ep_spans_tp else self.token_ranks

    @cached_property
    def token_ranks(self) -> int:
        """The ranks of tp that have the same tokens where a layer reads complete rows (`TensorStrategy.token_axis`)."""
        return self.mesh.size(self.tensor.token_axis(self))

    @property
    def sample_parts(self) -> int:
        """The parts of a microbatch's samples that ranks of tp route, each by itself."""
        return self.mesh.size("tp") // self.token_ranks

    @property
    def seq(self) -> int:
        """The positions of a sequence that a rank holds, before sequence parallel divides them."""
        return self.spec.seq // self.mesh.size("cp")

    @cached_property
    def num_rows(self) -> int:
        """The rows of the matrix that a layer reads: a rank's positions of all samples of a replica's microbatch."""
        return self.batch.micro_batch * prod(self.spec.boundary_shape[:-1]) // self.mesh.size("cp")

    def input_shape(self, block: BlockSpec) -> tuple[int, ...]:
        """The local shape of a microbatch of the input of a block that names it."""
        assert block.input_shape is not None
        channels, *area = block.input_shape
        return self.batch.micro_batch, channels // (self.mesh.size("tp") if block.splits_input else 1), *area

    @property
    def num_norms(self) -> int:
        """The number of gradient norms: one for the global gradient, or one for each independent replica."""
        return self.num_replicas if self.data.independent else 1

    @property
    def num_workers(self) -> int:
        """The ranks of the mesh."""
        return self.mesh.num_ranks

    def role(self, rank: int) -> str:
        """worker | server."""
        assert 0 <= rank < self.world, f"rank {rank} is not in a world of {self.world}"
        return "worker" if rank < self.num_workers else "server"

    def stages_of(self, pp_rank: int) -> tuple[Stage, ...]:
        """The stages that a pp rank runs, by stage index."""
        return self._of_pp_rank.get(pp_rank, ())

    @cached_property
    def _of_pp_rank(self) -> dict[int, tuple[Stage, ...]]:
        stages_by_rank: dict[int, list[Stage]] = {}
        for stage in self.stages:
            stages_by_rank.setdefault(stage.pp_rank, []).append(stage)
        return {pp_rank: tuple(stages) for pp_rank, stages in stages_by_rank.items()}

    @property
    def counts_right_answers(self) -> bool:
        """Whether evaluation counts top-1 hits: for classifiers whose last stage has all logits on each rank."""
        splits_classes = self.mesh.size("tp") > 1 and any(layer.layer_role == "head" for layer in self.spec.layers())
        return self.spec.classifies and not splits_classes

    @property
    def last_stage_pp_rank(self) -> int:
        """The pp rank that computes the loss."""
        return self.stages[-1].pp_rank

    @property
    def tied_copies(self) -> tuple[tuple[str, str], ...]:
        """(copy, original) names of tied weights on two pp ranks, which need the embedding group. Of the copies on the
        last stage, which are one tensor, the last."""
        if not self.spec.tied or self.stages[0].pp_rank == self.stages[-1].pp_rank:
            return ()
        last = {original: copy for copy, original in self.spec.tied if original in self.spec.readers}
        return tuple((copy, original) for original, copy in last.items())
