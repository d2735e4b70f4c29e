"""The plan of a parameter server: its settings, what it refuses, and its predicted traffic and memory.

The servers are the last ranks and outside the mesh: dp counts the workers, or, with experts over ep, the ranks of
several that hold one copy of the model. A worker of several ranks (DistBelief's were model parallel: Dean et al. 2012)
is one worker to the servers: its ranks sum their gradients, then each pushes and pulls its own part of the model (Li et
al. 2014: a node exchanges the key ranges that it works on with the servers that own them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import Bucket, DataStrategy
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.messages import (
    Call,
    ExplainedExchange,
    ExplainedMessage,
    ExplainedRound,
    Explanation,
    ranks_over,
)
from parallelrun.planner.contract.parameters import HeldParameter
from parallelrun.planner.contract.plan import Equivalence, Plan, once
from parallelrun.planner.contract.request import Request
from parallelrun.planner.pieces.expert_axes import inner_axis
from parallelrun.planner.predict.prediction import COUNT_BYTES

from ..common.bucket_prediction import final_collectives, inner_sums, summing_bytes
from ..common.buckets import Shape, partition
from ..common.keys import ParameterServerConfig
from . import checks
from .checks import DEFAULT_STALENESS, SSP, SYNC
from .protocol import AXIS, CONTROL, NORM_BYTES, PULL, PUSH, REPLY_BYTES, REQUEST_BYTES
from .shards import Shard, Sharding, assign, num_rows, pieces


@dataclass(frozen=True)
class ParameterServer(DataStrategy):
    """consistency: sync (one update from all workers' gradients), async (one update per push) or ssp (async, but no
    worker is more than `staleness` clocks ahead of the slowest). staleness: None unless ssp. backup_workers: of sync,
    the number of gradients that an update does not wait for. delays: (worker, seconds) added to each of its steps, to
    show the effect of a slow worker. shard_min_bytes: tensors are cut into pieces of at least this size.
    """

    kind = "ps"
    config_class = ParameterServerConfig
    has_servers = True
    takes_experts = True
    takes_context = True

    servers: int = 1
    consistency: str = SYNC
    staleness: int | None = None
    backup_workers: int = 0
    delays: tuple[tuple[int, float], ...] = ()
    shard_min_bytes: int = 256 * 2**10

    @property
    def detail(self) -> str:
        bound = f", staleness {self.staleness}" if self.consistency == SSP else ""
        spare = f", {counted(self.backup_workers, 'backup worker')}" if self.backup_workers else ""
        return f"{self.consistency}{bound}{spare}, {counted(self.servers, 'server')}"

    @property
    def synchronous(self) -> bool:
        """Whether an update averages the gradients of several workers. With staleness 0, ssp is sync."""
        return self.consistency == SYNC or self.staleness == 0

    @property
    def in_step(self) -> bool:
        return self.synchronous and not self.backup_workers

    @property
    def sums_workers_first(self) -> bool:
        return True

    def spare_workers(self, num_workers: int) -> int:
        return num_workers - self.quorum(num_workers)

    def delay(self, worker: int) -> float:
        """Seconds that `worker` waits in each of its steps."""
        return dict(self.delays).get(worker, 0.0)

    def quorum(self, num_workers: int) -> int:
        """Return the number of gradients in one update."""
        return max(1, num_workers - self.backup_workers) if self.synchronous else 1

    @classmethod
    def asked_servers(cls, config: Config) -> int | None:
        return ParameterServerConfig.of(config).servers

    @classmethod
    def num_servers(cls, requested: int | None) -> int:
        return requested if isinstance(requested, int) and requested > 0 else 1

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return checks.check(request)

    @classmethod
    def resolve(cls, request: Request) -> ParameterServer:
        data = ParameterServerConfig.of(request.config)
        return cls(
            servers=request.servers,
            consistency=checks.consistency_of(request),
            staleness=checks.staleness_of(request),
            backup_workers=data.backup_workers or 0,
            delays=tuple((worker, float(seconds)) for worker, seconds in enumerate(data.delays) if seconds > 0),
            shard_min_bytes=int(data.shard_min_kb * 2**10),
        )

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        if checks.consistency_of(request) != SSP or ParameterServerConfig.of(request.config).staleness is not None:
            return ()
        return (f"staleness={DEFAULT_STALENESS} (filled: clocks the fastest worker may be ahead under ssp)",)

    def resolved_config(self, config: Config) -> ParameterServerConfig:
        return replace(ParameterServerConfig.of(config), servers=self.servers)

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Bucket]:
        """The buckets that the ranks of a worker sum, of parameters of which several have copies: under cp and ep."""
        sums = [plan.mesh.size(inner_axis(parameter.layout, plan)) > 1 for parameter in trained]
        return partition(trained, shapes, plan, only=[index for index, several in enumerate(sums) if several])

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one rank of a worker in a step."""
        servers, exchanged = plan.servers, of_servers(plan.mesh.rank(**coordinate), plan)
        pushes = [size for size, _ in exchanged if size]
        return [
            *self._inside_worker(pp_rank, coordinate, plan),
            Collective(AXIS, "send", CONTROL, servers, servers * REQUEST_BYTES),
            Collective(AXIS, "recv", CONTROL, servers, 0),
            Collective(AXIS, "send", PUSH, len(pushes), sum(pushes)),
            Collective(AXIS, "recv", PULL, sum(1 for _, size in exchanged if size), 0),
        ]

    def _inside_worker(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """What the ranks of a worker sum: gradients, the norm that clips a push, and the number of targets."""
        rows = inner_sums(pp_rank, coordinate, plan) + final_collectives(pp_rank, coordinate, plan)
        if plan.worker_ranks and not self.synchronous:
            rows.append(Collective(plan.worker_ranks, "all_reduce", CONTROL, 1, NORM_BYTES))
        axis, counts = counting_axis(plan), plan.spec.has_ignored and pp_rank == plan.last_stage_pp_rank
        if counts and not self.in_step and plan.mesh.size(axis) > 1:
            rows.append(Collective(axis, "all_reduce", CONTROL, 1, COUNT_BYTES))
        return rows

    def server_collectives(self, server: int, plan: Plan) -> list[Collective]:
        """One server's messages while every worker does one step."""
        ranks, exchanged = plan.num_workers, of_ranks(server, plan)
        pulls = [size for _, size in exchanged if size]
        rows = [
            Collective(AXIS, "send", CONTROL, ranks, ranks * REPLY_BYTES),
            Collective(AXIS, "recv", CONTROL, ranks, 0),
            Collective(AXIS, "send", PULL, plan.num_replicas * len(pulls), plan.num_replicas * sum(pulls)),
            Collective(AXIS, "recv", PUSH, plan.num_replicas * sum(1 for size, _ in exchanged if size), 0),
        ]
        if self.synchronous and plan.servers > 1:
            rows.append(Collective(AXIS, "all_reduce", CONTROL, 1, NORM_BYTES))
        return rows

    def explain(self, plan: Plan) -> Explanation:
        """Every message of one step of every worker."""
        pushes, pulls, sums = [], [], []
        for worker in range(plan.num_workers):
            coordinate = plan.mesh.coordinate(worker)
            for row in self._inside_worker(coordinate["pp"], coordinate, plan):
                if (members := ranks_over(plan, row.axis, worker))[0] == worker:
                    sums.append(Call(row.operation, members, row.purpose, row.payload_bytes, row.axis, row.purpose))
            for server, (pushed, pulled) in enumerate(of_servers(worker, plan)):
                rank, shards = plan.num_workers + server, f"of server {server}'s shards"
                pushes.append(ExplainedMessage(worker, rank, "header: step, loss, norm", REQUEST_BYTES, CONTROL))
                pulls.append(ExplainedMessage(rank, worker, "header: version, loss, norm", REPLY_BYTES, CONTROL))
                pushes += [ExplainedMessage(worker, rank, f"gradient {shards}", pushed, PUSH)] if pushed else []
                pulls += [ExplainedMessage(rank, worker, f"weights {shards}", pulled, PULL)] if pulled else []
        rounds = [ExplainedRound("the ranks of a worker sum", calls=tuple(sums))] if sums else []
        rounds.append(ExplainedRound("push: each worker sends its gradient to every server", tuple(pushes)))
        if self.synchronous and plan.servers > 1:
            servers = tuple(range(plan.num_workers, plan.world))
            norm = Call("all_reduce", servers, "squared norm", NORM_BYTES, AXIS, CONTROL)
            rounds.append(ExplainedRound("the servers sum the squared norm of the gradient", calls=(norm,)))
        rounds.append(ExplainedRound("pull: each server sends its updated weights back", tuple(pulls)))
        title = f"one step of {counted(plan.num_replicas, 'worker')} and {counted(plan.servers, 'server')}"
        text = (
            "The servers own the weights, cut into shards of about equal bytes, and the optimizer. A worker pushes "
            "each server the gradient of its shards; the server "
            f"{'waits for all workers' if self.synchronous else 'does not wait for other workers'}, updates, and sends "
            "its weights back. The busiest link is a server's: it carries every worker's bytes."
        )
        exchanges = (ExplainedExchange(title, tuple(rounds)),)
        source, ranks = "Li et al. 2014; Dean et al. 2012", tuple(range(plan.world))
        return Explanation("data", self.kind, text, source, ranks, 1, AXIS, exchanges)

    def server_memory(self, server: int, plan: Plan) -> Memory:
        """Bytes of one server: weights (of the first one also those that are not trained), an update's gradient, the
        optimizer's state, and buffers for the push and the answer of each rank of each worker, and for what the first
        worker gives to be saved."""
        weights = sharding(plan).num_bytes[server]
        frozen = 0 if server else BYTES[plan.precision.stored] * sum(shard.numel for shard in frozen_shards(plan))
        pushes = plan.num_replicas * weights
        pulls = plan.num_replicas * sum(size for _, size in of_ranks(server, plan))
        states, not_counted = weights * plan.optimizer_states, ("the framework's own memory",)
        return Memory(weights + frozen, weights + pushes, states, 0, pulls + frozen, not_counted)

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """A rank pulls its part of the weights of each server into a buffer."""
        return sum(pulled for _, pulled in of_servers(plan.mesh.rank(**coordinate), plan))

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """A rank pushes gradients from another buffer."""
        return sum(pushed for pushed, _ in of_servers(plan.mesh.rank(**coordinate), plan))

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The flat copies of two buckets that the ranks of a worker sum at a time."""
        return summing_bytes(pp_rank, coordinate, plan)

    def num_shards(self, server: int, plan: Plan) -> int:
        return len(sharding(plan).of_server[server])

    def equivalence(self, plan: Plan) -> Equivalence:
        if self.in_step:
            return Equivalence("exact")
        return Equivalence("replay", "its own apply log, update for update")


def sharding(plan: Plan) -> Sharding:
    """The shards of each server; see `shards.assign`."""
    settings = ParameterServer.of(plan)
    return assign(plan.spec, settings.servers, settings.shard_min_bytes, BYTES[plan.precision.stored])


def frozen_shards(plan: Plan) -> list[Shard]:
    """The parameters that are not trained, which the first server has for checkpoints."""
    return [Shard(spec, 0, num_rows(spec)) for spec in plan.spec.parameters.values() if spec.frozen]


def worker_batch(plan: Plan) -> int:
    """Samples of one worker in a step."""
    return plan.batch.replica_batch * plan.mesh.size("dp") // plan.num_replicas


def counting_axis(plan: Plan) -> str:
    """The axis of the ranks of one worker that have targets of their own."""
    return inner_axis(Layout(()), plan)


def of_servers(rank: int, plan: Plan) -> list[tuple[int, int]]:
    """(bytes that a rank of a worker pushes to a server in a step, bytes that it pulls) by server. Equal ranks of all
    workers exchange the same."""
    if not plan.worker_ranks:
        return [(size, size) for size in sharding(plan).num_bytes]
    mesh = plan.mesh
    coordinate = {name: mesh.coordinate(rank)[name] for name in mesh.mesh_dim_names}
    first = mesh.rank(**(coordinate | dict.fromkeys(mesh.mesh_dims_of(plan.worker_axis), 0)))
    size = BYTES[plan.precision.stored]

    def compute() -> list[tuple[int, int]]:
        owners = [(server, shard) for server, own in enumerate(sharding(plan).of_server) for shard in own]
        sums = [[0, 0] for _ in range(plan.servers)]
        for direction, own in enumerate(pieces(plan, first, [shard for _, shard in owners])):
            for piece in own:
                sums[owners[piece.number][0]][direction] += size * piece.numel
        return [(pushed, pulled) for pushed, pulled in sums]

    return once(plan.weights_cache, ("exchanged with servers", first), compute)


def of_ranks(server: int, plan: Plan) -> list[tuple[int, int]]:
    """(bytes pushed, bytes pulled) of each rank of one worker with a server."""
    ranks = plan.mesh.group_of(0, *plan.worker_ranks.split("+"))
    return [of_servers(rank, plan)[server] for rank in ranks]
