"""The plan of a parameter server: its settings, what it refuses, and its predicted traffic and memory.

The servers are the last ranks and outside the mesh: dp counts the workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.base.wording import counted
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.messages import Call, ExplainedExchange, ExplainedMessage, ExplainedRound, Explanation
from parallelrun.planner.contract.optimizers import OPTIMIZERS
from parallelrun.planner.contract.plan import Collective, Equivalence, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.predict.prediction import COUNT_BYTES

from ..common.keys import ParameterServerConfig
from .protocol import AXIS, CONTROL, NORM_BYTES, PULL, PUSH, REPLY_BYTES, REQUEST_BYTES
from .shards import Sharding, assign, cut

SYNC, ASYNC, SSP = "sync", "async", "ssp"
DEFAULT_STALENESS = 2


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

    def counts_targets(self, plan: Plan) -> bool:
        """Whether workers sum the numbers of their targets in every step."""
        return self.in_step and plan.spec.has_ignored and plan.spec.router is not None and plan.num_workers > 1

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
        problems = _check_other_axes(request)
        checks = (_check_consistency, _check_delays, _check_num_servers, _check_unsupported)
        return problems or [problem for check in checks for problem in check(request)]

    @classmethod
    def resolve(cls, request: Request) -> ParameterServer:
        data = ParameterServerConfig.of(request.config)
        return cls(
            servers=request.servers,
            consistency=_consistency(request),
            staleness=_staleness(request),
            backup_workers=data.backup_workers or 0,
            delays=tuple((worker, float(seconds)) for worker, seconds in enumerate(data.delays) if seconds > 0),
            shard_min_bytes=int(data.shard_min_kb * 2**10),
        )

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        if _consistency(request) != SSP or ParameterServerConfig.of(request.config).staleness is not None:
            return ()
        return (f"staleness={DEFAULT_STALENESS} (filled: clocks the fastest worker may be ahead under ssp)",)

    def resolved_config(self, config: Config) -> ParameterServerConfig:
        return replace(ParameterServerConfig.of(config), servers=self.servers)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """One worker's messages in a step."""
        servers = plan.servers
        counts = [Collective(plan.count_axis, "all_reduce", CONTROL, 1, COUNT_BYTES)]
        return [
            *(counts if self.counts_targets(plan) else []),
            Collective(AXIS, "send", CONTROL, servers, servers * REQUEST_BYTES),
            Collective(AXIS, "recv", CONTROL, servers, 0),
            Collective(AXIS, "send", PUSH, servers, sum(sharding(plan).num_bytes)),
            Collective(AXIS, "recv", PULL, servers, 0),
        ]

    def server_collectives(self, server: int, plan: Plan) -> list[Collective]:
        """One server's messages while every worker does one step."""
        workers = plan.num_workers
        rows = [
            Collective(AXIS, "send", CONTROL, workers, workers * REPLY_BYTES),
            Collective(AXIS, "recv", CONTROL, workers, 0),
            Collective(AXIS, "send", PULL, workers, workers * sharding(plan).num_bytes[server]),
            Collective(AXIS, "recv", PUSH, workers, 0),
        ]
        if self.synchronous and plan.servers > 1:
            rows.append(Collective(AXIS, "all_reduce", CONTROL, 1, NORM_BYTES))
        return rows

    def explain(self, plan: Plan) -> Explanation:
        """Every message of one step of every worker."""
        pushes, pulls = [], []
        for worker in range(plan.num_workers):
            for server, size in enumerate(sharding(plan).num_bytes):
                rank, shards = plan.num_workers + server, f"of server {server}'s shards"
                pushes.append(ExplainedMessage(worker, rank, "header: step, loss, norm", REQUEST_BYTES, CONTROL))
                pushes.append(ExplainedMessage(worker, rank, f"gradient {shards}", size, PUSH))
                pulls.append(ExplainedMessage(rank, worker, "header: version, loss, norm", REPLY_BYTES, CONTROL))
                pulls.append(ExplainedMessage(rank, worker, f"weights {shards}", size, PULL))
        rounds = [ExplainedRound("push: each worker sends its gradient to every server", tuple(pushes))]
        if self.synchronous and plan.servers > 1:
            servers = tuple(range(plan.num_workers, plan.world))
            norm = Call("all_reduce", servers, "squared norm", NORM_BYTES, AXIS, CONTROL)
            rounds.append(ExplainedRound("the servers sum the squared norm of the gradient", calls=(norm,)))
        rounds.append(ExplainedRound("pull: each server sends its updated weights back", tuple(pulls)))
        title = f"one step of {counted(plan.num_workers, 'worker')} and {counted(plan.servers, 'server')}"
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
        """Bytes of one server: weights, an update's gradient, the optimizer's state, and a buffer for the push and one
        for the answer of each worker."""
        weights = sharding(plan).num_bytes[server]
        pushes = pulls = plan.num_workers * weights
        states, not_counted = weights * plan.optimizer_states, ("the framework's own memory",)
        return Memory(weights, weights + pushes, states, 0, pulls, not_counted)

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """A worker pulls the weights of each server into a buffer."""
        return sum(sharding(plan).num_bytes)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """A worker pushes gradients from another buffer."""
        return sum(sharding(plan).num_bytes)

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


def _consistency(request: Request) -> str:
    data = ParameterServerConfig.of(request.config)
    return data.consistency or (SYNC if data.staleness is None else SSP)


def _staleness(request: Request) -> int | None:
    if _consistency(request) != SSP:
        return None
    staleness = ParameterServerConfig.of(request.config).staleness
    return DEFAULT_STALENESS if staleness is None else staleness


def _check_other_axes(request: Request) -> list[Problem]:
    """Under tp or pp a worker would be several ranks, each with a part of the gradient whose norm clips them all."""
    return [
        Problem(
            f"strategy.data.kind=ps with {axis}={degree}: a worker is one rank that holds the complete model",
            axis,
            f"{axis}=1, or strategy=ptdp",
            kind="not_built",
        )
        for axis, degree in (("tp", request.tp), ("pp", request.pp))
        if degree > 1
    ]


def _check_consistency(request: Request) -> list[Problem]:
    """Staleness and backup workers that the consistency does not read, or that leave no gradient for an update."""
    data, consistency, problems = ParameterServerConfig.of(request.config), _consistency(request), []
    staleness, backups = data.staleness, data.backup_workers or 0
    if staleness is not None and consistency != SSP:
        cause = "every update waits for all workers, so no gradient is stale"
        cause = cause if consistency == SYNC else "async has no bound"
        message = f"staleness={staleness} with consistency={consistency}: {cause}"
        fix = "consistency=ssp, or leave staleness out"
        problems.append(Problem(message, "staleness", fix, kind="contradiction"))
    if backups and consistency != SYNC:
        cause = "an update uses one gradient, so none is spare"
        message = f"backup_workers={backups} with consistency={consistency}: {cause}"
        fix = "consistency=sync, or leave backup_workers out"
        problems.append(Problem(message, "backup_workers", fix, kind="contradiction"))
    elif backups and backups >= request.dp:
        message = f"backup_workers={backups} of dp={request.dp}: an update needs at least one gradient"
        more = f"dp={backups + 1}" if request.config.world is None else f"world={backups + 1 + request.servers}"
        fix = f"{more} or backup_workers={request.dp - 1}"
        problems.append(Problem(message, "backup_workers", fix, kind="arithmetic"))
    return problems


def _check_delays(request: Request) -> list[Problem]:
    delays, key = ParameterServerConfig.of(request.config).delays, "strategy.data.delays"
    if any(not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf") for seconds in delays):
        return [Problem(f"{key}={delays}: each delay is a number of seconds, at least 0", key, f"{key}=[0,0.1]")]
    if len(delays) > request.dp:
        message = f"{key} has {len(delays)} entries, but there are {counted(request.dp, 'worker')}"
        return [Problem(message, key, f"dp={len(delays)}", kind="arithmetic")]
    return []


def _check_num_servers(request: Request) -> list[Problem]:
    """Every server must own something."""
    element_size = BYTES[TABLE[request.config.precision.name].stored]
    min_bytes = int(ParameterServerConfig.of(request.config).shard_min_kb * 2**10)
    pieces = len(cut(request.spec, request.servers, min_bytes, element_size))
    if request.servers <= pieces:
        return []
    message = (
        f"servers={request.servers}: the model has only {counted(pieces, 'tensor')} or pieces of {min_bytes} bytes"
    )
    return [Problem(message, "servers", f"servers={pieces} or strategy.data.shard_min_kb=0", kind="arithmetic")]


def _check_unsupported(request: Request) -> list[Problem]:
    """Features for which all workers would have to exchange something in every step."""
    router, key, problems = request.spec.router, "model.router.bias_rate", []
    if router is not None and router.bias_rate != 0.0:
        message = f"{key}={router.bias_rate} needs the expert load of the global batch"
        message += ", which workers of ps do not exchange"
        problems.append(Problem(message, key, f"{key}=0, or strategy.data.kind=ddp", kind="not_built"))
    if request.config.model.lora.base_dtype is not None:  # 16 bits do not pay where every worker pulls all weights
        message = "model.lora.base_dtype: servers of ps store weights in the dtype of the precision"
        problems.append(Problem(message, "model.lora.base_dtype", "strategy.data.kind=ddp", kind="not_built"))
    if not OPTIMIZERS[request.config.optimizer.name].elementwise:
        message = f"optimizer={request.config.optimizer.name} updates complete matrices; servers of ps hold pieces"
        problems.append(Problem(message, "optimizer", "optimizer=adamw or strategy=ddp", kind="undefined"))
    if request.config.sdc.every:  # a step that is undone was pushed, and others may have read what followed
        message = "sdc.every looks for silent data corruption in steps that all ranks take, not on parameter servers"
        problems.append(Problem(message, "sdc.every", "sdc.every=0 or strategy=ddp", kind="not_built"))
    return problems
