"""Parameter server (Li et al. 2014; Dean et al. 2012): servers own the weights, workers pull them and push gradients.

The servers are the last ranks and no part of the mesh: dp counts the workers.
"""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.plan.messages import Explanation
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import Collective, Equivalence, Memory, Plan
from parallelrun.precision import BYTES, TABLE
from parallelrun.wording import counted, one_of

from ..replicated import Replicated
from . import shards, traffic
from .protocol import has_barrier
from .settings import CONSISTENCIES, SSP, SYNC, ParameterServerWay

DEFAULT_STALENESS = 2


class Way(Replicated):
    """Workers hold a copy of the weights, which the servers own, with the optimizer's state."""

    reads = ("servers", "consistency", "staleness", "backup_workers", "delays", "shard_min_kb")

    def num_servers(self, asked: int | None) -> int:
        """Ranks that are no workers. asked: `strategy.data.servers`."""
        return asked if isinstance(asked, int) and asked > 0 else 1

    def check(self, request: Request) -> list[Problem]:
        data = request.config.strategy.data
        found = [] if data.consistency is None else one_of("consistency", data.consistency, CONSISTENCIES)
        found += _other_axes(request)
        if found:
            return found
        return [
            problem
            for check in (_check_staleness, _check_backup, _check_delays, _check_router, _check_shares)
            for problem in check(request)
        ]

    def resolve(self, request: Request) -> ParameterServerWay:
        data = request.config.strategy.data
        consistency = _consistency(request)
        return ParameterServerWay(
            data.kind,
            servers=request.servers,
            consistency=consistency,
            staleness=_staleness(request),
            backup_workers=data.backup_workers or 0,
            delays=tuple((worker, float(seconds)) for worker, seconds in enumerate(data.delays) if seconds > 0),
            shard_min_bytes=int(data.shard_min_kb * 2**10),
        )

    def filled(self, request: Request) -> tuple[str, ...]:
        """The bound of ssp, where none was given."""
        if _consistency(request) != SSP or request.config.strategy.data.staleness is not None:
            return ()
        return (f"staleness={DEFAULT_STALENESS} (filled: clocks the fastest worker may be ahead under ssp)",)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """One worker's pull and push of a step."""
        return traffic.of_worker(plan)

    def explain(self, plan: Plan) -> Explanation:
        """One step of every worker: see `traffic`."""
        return traffic.explanation(plan)

    def server_collectives(self, server: int, plan: Plan) -> list[Collective]:
        """One server's part in a step of every worker."""
        return traffic.of_server(plan, server)

    def server_memory(self, server: int, plan: Plan) -> Memory:
        """Bytes of one server."""
        return traffic.server_memory(plan, server)

    def num_shards(self, server: int, plan: Plan) -> int:
        """Tensors, or parts of them, that one server owns."""
        return len(shards.of_server(plan, server))

    def equivalence(self, plan: Plan) -> Equivalence:
        strategy = plan.data
        assert isinstance(strategy, ParameterServerWay)
        if has_barrier(strategy) and not strategy.backup_workers:
            return Equivalence("exact")
        what = "its own apply log, update for update"
        return Equivalence("replay", what)


def _consistency(request: Request) -> str:
    data = request.config.strategy.data
    return data.consistency or (SYNC if data.staleness is None else SSP)


def _staleness(request: Request) -> int | None:
    if _consistency(request) != SSP:
        return None
    asked = request.config.strategy.data.staleness
    return DEFAULT_STALENESS if asked is None else asked


def _other_axes(request: Request) -> list[Problem]:
    """A worker is one rank: what would be pushed under tp or pp are parts of tensors that other ranks clip by."""
    degrees = {"tp": request.tp, "pp": request.pp}
    return [
        Problem(
            f"strategy.data.kind=ps with {axis}={degree}: a worker is one rank, it pushes whole gradients",
            axis,
            f"{axis}=1, or strategy=ptdp",
            kind="not_built",
        )
        for axis, degree in degrees.items()
        if degree > 1
    ]


def _check_staleness(request: Request) -> list[Problem]:
    consistency, asked = _consistency(request), request.config.strategy.data.staleness
    if asked is None or consistency == SSP:
        return []
    why = "where every update waits for all workers nothing is stale" if consistency == SYNC else "async has no bound"
    what = f"staleness={asked} with consistency={consistency}: {why}"
    return [Problem(what, "staleness", "consistency=ssp, or leave staleness out", kind="contradiction")]


def _check_backup(request: Request) -> list[Problem]:
    asked = request.config.strategy.data.backup_workers or 0
    if not asked:
        return []
    if (consistency := _consistency(request)) != SYNC:
        what = (
            f"backup_workers={asked} with consistency={consistency}: an update is made of one gradient, none is spare"
        )
        return [Problem(what, "backup_workers", "consistency=sync, or leave backup_workers out", kind="contradiction")]
    if asked < request.dp:
        return []
    what = f"backup_workers={asked} of dp={request.dp}: an update needs at least one gradient"
    more = f"dp={asked + 1}" if request.config.world is None else f"world={asked + 1 + request.servers}"
    return [Problem(what, "backup_workers", f"{more} or backup_workers={request.dp - 1}", kind="arithmetic")]


def _check_delays(request: Request) -> list[Problem]:
    delays = request.config.strategy.data.delays
    key = "strategy.data.delays"
    if any(not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf") for seconds in delays):
        return [Problem(f"{key}={delays} are not seconds, each at least 0", key, f"{key}=[0,0.1]")]
    if len(delays) > request.dp:
        what = f"{key} has {len(delays)} entries, and there are {counted(request.dp, 'worker')}"
        return [Problem(what, key, f"dp={len(delays)}", kind="arithmetic")]
    return []


def _check_router(request: Request) -> list[Problem]:
    """Biases move by the load of all workers, and those tell nobody theirs."""
    router, key = request.spec.router, "model.router.bias_rate"
    if router is None or router.bias_rate == 0.0:
        return []
    what = f"{key}={router.bias_rate} moves by the load of the global batch, and workers of ps do not tell theirs"
    return [Problem(what, key, f"{key}=0, or strategy.data.kind=ddp", kind="not_built")]


def _check_shares(request: Request) -> list[Problem]:
    """Every server owns something."""
    size = BYTES[TABLE[request.config.precision.name].stored]
    least = int(request.config.strategy.data.shard_min_kb * 2**10)
    pieces = shards.num_pieces(request.spec, request.servers, least, size)
    if request.servers <= pieces:
        return []
    what = (
        f"servers={request.servers}: the model has only {counted(pieces, 'tensor')} or parts of at least {least} bytes"
    )
    return [Problem(what, "servers", f"servers={pieces} or strategy.data.shard_min_kb=0", kind="arithmetic")]
