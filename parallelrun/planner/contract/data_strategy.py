"""The base class of data-parallel strategies: their resolved settings, and the traffic and memory they predict.

A strategy is a frozen subclass of `DataStrategy` in `strategies/data/<kind>/plan.py`.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import Config, DataStrategyConfig
from parallelrun.planner.contract.axis_strategy import AxisStrategy
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.messages import Explanation, explanation_of_calls
from parallelrun.planner.contract.parameters import HeldParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import ParameterSpec

if TYPE_CHECKING:
    from typing_extensions import Self

MeshDims = tuple[tuple[str, int], ...]
FlattenedDims = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class ExchangeForm:
    """How a strategy combines gradients, as far as the time and memory of a step depend on it.

    scatters_once: gradients are scattered once a step, not in every backward pass. gathers_again: weights are gathered
    twice a microbatch, not once a step. gathers_rounded: in the compute dtype. compression: of the messages, by name.
    can_undo: what compression keeps is copied in each step, which may not be applied.
    """

    scatters_once: bool = False
    gathers_again: bool = False
    gathers_rounded: bool = False
    compression: str = ""
    can_undo: bool = False


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together: the axis over which they are summed, and the indices of their parameters
    in a list of trained ones."""

    axis: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class DataStrategy(AxisStrategy):
    """A data-parallel strategy: `plan.data`. `pp_rank` and `coordinate` name a rank.

    The defaults describe replicas that hold complete copies of the weights, gradients and optimizer state.

    shard: ranks that share one copy of the weights (HSDP: fewer than dp). bucket_bytes: size of a gradient bucket.
    """

    config_class: ClassVar[type[DataStrategyConfig]] = DataStrategyConfig  # its keys of `strategy.data`
    is_searched: ClassVar[bool] = False  # a search tries it with its default settings (`choices`)
    shards_weights: ClassVar[bool] = False  # no rank of dp holds complete weights
    rounds_weights: ClassVar[bool] = False  # some weights may be kept in the compute dtype (`weight_dtype`)
    saves_memory: ClassVar[bool] = False  # suggested where a plan does not fit on a device
    takes_experts: ClassVar[bool] = False  # experts may be distributed over its ranks (ep > 1)
    takes_context: ClassVar[bool] = False  # gradients may be summed over the ranks of a sequence, too (cp > 1)
    has_servers: ClassVar[bool] = False  # some ranks are no workers
    overlaps_backward: ClassVar[bool] = True  # gradients are exchanged while backward computes the next ones
    kept_states: ClassVar[int] = 0  # tensors of state per weight beside the optimizer's
    compared: ClassVar[tuple[dict[str, Any], ...]] = ({},)  # settings in `detail=data_axis`, if it has no `choices`

    shard: int = 1
    bucket_bytes: int = 25 * 2**20

    # Before there is a plan

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return []

    @classmethod
    def asked_servers(cls, config: Config) -> int | None:
        """The number of servers that the user set; None where it was left open."""
        return None

    @classmethod
    def num_servers(cls, requested: int | None) -> int:
        """The number of ranks that are no workers. requested: see `asked_servers`."""
        return 0

    @classmethod
    def choices(cls, dp: int, pp: int, in_node: int) -> list[DataStrategyConfig]:
        """The settings that a search compares, legal or not; none for strategies that a search leaves out, because
        they train otherwise than one device would, or as another strategy does. in_node: ranks of dp that share a
        host."""
        return [cls.config_class()] if cls.is_searched else []

    @classmethod
    def described(cls) -> tuple[str, str]:
        """(what it does, the paper), for `explain`: `Idea:` and `Paper:` of the docstring of the strategy's package."""
        package = sys.modules.get(cls.__module__.rpartition(".")[0], sys.modules[cls.__module__])
        summary, *fields = re.split(r"^(Idea|Paper|Costs): ", package.__doc__ or "", flags=re.MULTILINE)
        texts = dict(zip(fields[::2], (" ".join(text.split()) for text in fields[1::2])))
        return texts.get("Idea", " ".join(summary.split())), texts.get("Paper", "")

    # Properties of the resolved strategy

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The data strategy of a plan, which is known to be of this class."""
        assert isinstance(plan.data, cls), f"{plan.data.kind} is no {cls.__name__}"
        return plan.data

    @property
    def detail(self) -> str:
        """The settings in a few words for the user; empty where the name says everything."""
        return ""

    @property
    def independent(self) -> bool:
        """Whether every replica has weights of its own between synchronisations (local SGD, DiLoCo).

        A replica's gradient is then that of the mean over its own samples (dp times its part of the global mean),
        measured and clipped by itself; `verify` and checkpoints keep the weights of every replica.
        """
        return False

    @property
    def in_step(self) -> bool:
        """Whether all replicas go through every step together, so that layers may communicate inside a step."""
        return not self.independent

    @property
    def sums_workers_first(self) -> bool:
        """Whether what is combined is no plain sum, so that the ranks of a worker (`Plan.worker_axis`) sum their
        gradients before it."""
        return False

    @property
    def shares_statistics(self) -> bool:
        """Whether replicas exchange BatchNorm's running statistics in every step."""
        return self.in_step

    @property
    def sync_every(self) -> int:
        """The number of steps between two exchanges with purpose SYNC."""
        return 1

    def spare_workers(self, num_workers: int) -> int:
        """The number of workers that a run can lose and continue, each with all of its ranks. Worker 0 is never spare:
        it writes the metrics."""
        return 0

    def group_size(self, axis: str) -> int | None:
        """The size of the strategy's own process groups named `axis`; None where it has none of that name."""
        return None

    def members(self, axis: str, worker: int) -> tuple[int, ...] | None:
        """The dp coordinates in `worker`'s group among the strategy's own groups named `axis`; None without such."""
        return None

    def has_batch(self, step: int, worker: int) -> bool:
        """Whether `worker` (a dp coordinate) has data in `step`; its gradient is zero otherwise."""
        return True

    def checked(self, steps: int) -> Self:
        """The strategy as `verify` runs it, so that everything rare happens within `steps` steps."""
        return self

    def full_step(self, step: int) -> int:
        """The first step from `step` on that sends everything the strategy ever sends; traffic is counted there."""
        return step

    def resolved_config(self, config: Config) -> DataStrategyConfig:
        """The section of `config` with the values that were filled in."""
        return config.strategy.data

    def document(self) -> dict[str, Any]:
        """The settings as a JSON object. Two settings of FSDP are there for every strategy, so that rows compare."""
        return {"kind": self.kind, "reshard_after_forward": False, "reduce_each_microbatch": False, **asdict(self)}

    # Layouts

    def mesh_dims(self, dp: int) -> tuple[MeshDims, FlattenedDims]:
        """(mesh dims that make up `dp` ranks, flattened dims): (("dp", 4),) or (("dp_replicate", 2), ("dp_shard", 2)).

        dp: the ranks over which gradients are summed, those of cp among them.
        """
        return (("dp", dp),), ()

    def weight_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """The layout of the stored weights of a logical parameter, given its tensor layout."""
        return tensor_layout

    def weight_dtype(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> str:
        """The dtype of a parameter in the modules, and of the gradients that backward computes for it."""
        return plan.precision.stored

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """The layout of the optimizer's state, and of the part of the weight that the optimizer updates."""
        return tensor_layout

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """The layout of the stored gradients at their peak, for memory."""
        return tensor_layout

    # Traffic

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[tuple[int, ...]], plan: Plan) -> list[Bucket]:
        """The buckets of parameters with those local shapes, in launch order. A parameter without copies is in none.

        The prediction and the runtime ask the same method, so that both have the same buckets.
        """
        return []

    def num_exchanges(self, plan: Plan) -> int:
        """The number of times that a step exchanges every bucket."""
        return 1

    @abstractmethod
    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The data-axis collectives of one rank in one step.

        They include the sums over partial axes and of tied copies, which are sized by this strategy's shards.
        """

    def sending_classes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]] | None:
        """(the first, how many) of the members of dp that send the same; None where shards alone decide that."""
        return None

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        """How gradients are combined, for the comparison of costs."""
        return ExchangeForm()

    def explain(self, plan: Plan) -> Explanation:
        coordinate = plan.mesh.coordinate(0)
        rows = self.collectives(coordinate["pp"], coordinate, plan)
        return explanation_of_calls("data", self.kind, *self.described(), plan, rows)

    # Memory (asked only where dp > 1, but for `gathered_bytes`)

    def keeps_gradients(self, plan: Plan) -> bool:
        """Whether gradients are held at every peak of a step: in the strategy's buffers, or of earlier microbatches."""
        return False

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Bytes held beside the layouts above and counted as weights: gathered weights, copies of chunks."""
        return 0

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Bytes held beside the layouts above and counted as gradients: receive buffers, padding."""
        return 0

    def saved_bytes(self, plan: Plan) -> int:
        """Bytes of a checkpoint, over all ranks, in addition to weights, optimizer state and `kept_states`."""
        return 0

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """Per block of a stage, bytes of gradients outside the buffers while backward pass `number` runs through it.
        Called only where backward is not split. None where every gradient stays until the schedule ends.
        """
        return None

    def closing_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
        """Per block of a stage, bytes of gradients when backward pass `number` has just freed what it saved for the
        block; asked with `backward_bytes` that are not None. []: less than before."""
        return []

    def reducing_bytes(self, stage: int, coordinate: dict[str, int], plan: Plan) -> tuple[int, int] | None:
        """(bytes beside a stage's unsharded gradients while they are reduced, bytes that stay of the sums), after each
        pass that computes them where backward is split. None if gradients are added up until the step ends."""
        return None

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Bytes of buffers while the last gradients are exchanged after the schedule, or weights at a step's end."""
        return 0

    # Server ranks (`has_servers`)

    def server_collectives(self, server: int, plan: Plan) -> list[Collective]:
        """The messages of one server while every worker does one step."""
        raise AssertionError(f"{self.kind} has no servers")

    def server_memory(self, server: int, plan: Plan) -> Memory:
        """Bytes of one server."""
        raise AssertionError(f"{self.kind} has no servers")

    def num_shards(self, server: int, plan: Plan) -> int:
        """The number of tensors, or parts of tensors, that one server owns."""
        raise AssertionError(f"{self.kind} has no servers")
