"""A server: one thread per rank of a worker receives requests; updates are made under one lock, in order of arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.base.context import WorkerContext
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import build_server_group
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.prediction import merge
from parallelrun.training.loop.flat_tensors import flatten, unflatten
from parallelrun.training.loop.gradients import clip_coefficient
from parallelrun.training.loop.schedules import learning_rate
from parallelrun.training.metrics.recorder import peak_bytes

from .apply_log import AppliedUpdate, DroppedPush, LogRow, LogStatistics, Push, append_row
from .checkpoints import ServerCheckpoints
from .connections import PeerLost, RankConnection, WorkerConnections, publish_facts
from .plan import ParameterServer, frozen_shards
from .protocol import AXIS, CONTROL, COUNTED, PULL, PUSH, Ask, ServerReply, WorkerRequest
from .shards import pieces
from .store import ShardStore
from .synchronization import Barrier, WorkerClocks

WAIT_S = 1.0  # a worker at a barrier gets a reply as often, for its heartbeat and before gloo's timeout
HEARTBEAT_S = 0.2
Act = Callable[[int, WorkerRequest], ServerReply]  # does what a worker asks


class ServerAborted(Exception):
    """Another thread of this server has failed; this one only stops."""


class Server:
    """Serves one run, from the first read until every worker has left. Creating it is collective over the world."""

    def __init__(self, config: Config, plan: Plan, context: WorkerContext):
        group = build_server_group(plan)
        self._config, self._plan, self._context = config, plan, context
        self._settings = ParameterServer.of(plan)
        self._index, self._group = group.index, group.process_group
        self._store = ShardStore(config, plan, group.index)
        self._store.initialise()
        self._checkpoints = ServerCheckpoints(config, plan, context, self._store, group)
        self._clocks = WorkerClocks(self._store.load())
        self._connections = [RankConnection(rank, plan, self._store) for rank in range(plan.num_workers)]
        self._workers = [WorkerConnections(worker, self._connections) for worker in self._clocks.completed]
        self._changed = threading.Condition()  # the lock of everything below
        self._pending: dict[int, WorkerRequest] = {}  # synchronous: pushes of the next update, by worker
        self._last_reply = ServerReply()  # synchronous: to the pushes of the last update
        self._barriers = {Ask.SAVE: Barrier(), Ask.END: Barrier()}
        self._error: BaseException | None = None
        self._left: set[int] = set()  # ranks
        self._gradients: list[Tensor] = []  # verify: of every update
        self._statistics = LogStatistics()
        self._norm_sum: list[Collective] = []  # the message of each update, once one was sent
        self._began = time.perf_counter()
        self.stopped = False  # whether a worker was asked to stop

    def serve(self) -> None:
        """Serve until all workers have left. Raises the first error of a thread."""
        for connection in self._connections:
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait(HEARTBEAT_S)
                if self._error is not None:
                    raise self._error
                if self._left >= self._ranks(self._clocks.live):
                    return
                self._checkpoints.poll()
            self._context.heartbeat(max(self._clocks.completed.values()), "serve")

    # one thread per rank of a worker

    def _attend(self, connection: RankConnection) -> None:
        channel = connection.channel
        try:
            while (request := channel.receive_header(WorkerRequest)).ask != Ask.LEAVE:
                reply, payload = self._reply(connection, request)
                channel.send_header(reply)
                if payload is not None and payload.numel():
                    channel.send(payload, PULL)
                messages, payload = channel.flush(), None
                if request.ask == Ask.UPDATE:
                    connection.exchanged(messages)
            with self._changed:
                self._left.add(connection.rank)
                self._changed.notify_all()
        except BaseException as error:  # any kind: the main thread must hear of it
            with self._changed:
                try:
                    if self._error is None:
                        self._lose(connection, error)
                except BaseException as fatal:
                    self._error = fatal
                self._changed.notify_all()

    def _lose(self, connection: RankConnection, error: BaseException) -> None:
        """Continue without the worker of a lost connection, if the plan can spare it. Raise any other error."""
        worker, spare = connection.worker, self._settings.spare_workers(self._plan.num_replicas)
        lost = self._clocks.lost | {worker}
        if not isinstance(error, PeerLost) or worker == 0 or len(lost) > spare:
            raise error
        self._clocks.lost = lost
        self._pending.pop(worker, None)
        if self._index == 0:
            self._context.rank_died(connection.rank)
        self._release_barriers()

    def _reply(self, connection: RankConnection, request: WorkerRequest) -> tuple[ServerReply, Tensor | None]:
        """Do what a rank asks; return the reply, and what is sent after it."""
        if request.ask == Ask.UPDATE:
            if connection.push.numel():
                connection.channel.receive(connection.push, PUSH)
            return self._do_once(connection, request, self._update), connection.payload
        if request.ask in self._barriers:
            return self._wait_at_barrier(connection, request), None
        if request.ask == Ask.READ_GRADIENT:
            return ServerReply(), self._gradients[request.clock - 1]
        if request.ask == Ask.READ:
            return self._do_once(connection, request, self._read), connection.payload
        pushed, pulled = pieces(self._plan, connection.rank, frozen_shards(self._plan))
        own = pulled if request.ask == Ask.READ_FROZEN else pushed
        frozen = [self._store.frozen[piece.number].tensor[piece.in_shard] for piece in own]
        if request.ask == Ask.READ_FROZEN:
            return ServerReply(), flatten(frozen)
        flat = frozen[0].new_empty(sum(part.numel() for part in frozen))
        connection.channel.receive(flat, PUSH)
        with self._changed:
            self._checkpoints.before_update()
            unflatten(flat, frozen)
        return ServerReply(), None

    def _do_once(self, connection: RankConnection, request: WorkerRequest, act: Act) -> ServerReply:
        """Do what a worker asks when the last of its ranks has asked it; return its reply, the same to all ranks."""
        worker = self._workers[connection.worker]
        with self._changed:
            turn, worker.requests[connection.rank] = worker.turn, request
            if (request_of_all := worker.request()) is None:
                self._wait_until(lambda: worker.turn > turn or worker.index in self._clocks.lost)
                if worker.turn == turn:
                    raise PeerLost(f"another rank of the worker of rank {connection.rank} is lost")
            else:
                worker.done(act(worker.index, request_of_all), self._settings.in_step)
                self._changed.notify_all()
            return worker.reply

    def _read(self, worker: int, request: WorkerRequest) -> ServerReply:
        return ServerReply(1, self._store.version, self._clocks.completed[worker], stop=float(self.stopped))

    def _update(self, worker: int, request: WorkerRequest) -> ServerReply:
        """Take in one push; return the reply when the worker may have the weights."""
        arrived = time.perf_counter()
        self.stopped = self.stopped or request.stop > 0
        reply = (self._join_update if self._settings.synchronous else self._apply_at_once)(worker, request)
        self._workers[worker].blocked_s += time.perf_counter() - arrived
        return reply

    def _apply_at_once(self, worker: int, request: WorkerRequest) -> ServerReply:
        """Make one update of one push (async, ssp)."""
        self._clocks.tick(worker, request.clock)
        if request.finite:
            self._store.mean([self._workers[worker].pushed], [1.0])
        push, step_time = request.logged(worker), request.step_time_s
        reply = self._apply(request.clock, (push,), push.loss, push.norm, request.finite, step_time_s=step_time)
        self._wait_until(lambda: self.stopped or self._clocks.may_read(worker, self._settings.staleness))
        return reply._replace(version=self._store.version, stop=float(self.stopped))

    def _join_update(self, worker: int, request: WorkerRequest) -> ServerReply:
        """Make one update per clock, of several pushes (sync, backup workers, ssp with staleness 0)."""
        clock = request.clock
        # Another server may be ahead, and its reply was used.
        self._wait_until(lambda: clock <= self._store.version + 1)
        version = self._store.version
        if clock <= version:
            self._log(DroppedPush(self._index, worker, clock, request.pulled, version))
            if version > self._clocks.completed[worker]:  # else this server was ahead
                self._clocks.tick(worker, version)
            return self._last_reply._replace(accepted=0.0)
        self._pending[worker] = request
        if len(self._pending) >= self._settings.quorum(self._plan.num_replicas):
            self._last_reply = self._average_and_update(clock)
        self._wait_until(lambda: self._store.version >= clock)
        self._clocks.tick(worker, self._store.version)
        return self._last_reply

    def _average_and_update(self, clock: int) -> ServerReply:
        """Average the pending pushes in the order of workers, sum the norm with the other servers, clip, step.

        The weight of a push is its number of targets. Workers in step have divided their losses by the mean number.
        """
        pending, self._pending = dict(sorted(self._pending.items())), {}
        counts = [request.num_valid for request in pending.values()]
        weights = counts if sum(counts) and not self._settings.in_step else [1.0] * len(counts)
        self._store.mean([self._workers[worker].pushed for worker in pending], weights)
        finite = all(request.finite for request in pending.values())
        norm = self._sum_over_servers(self._store.squared_norm() if finite else float("inf")) ** 0.5
        loss = sum(request.loss_sum for request in pending.values()) / (sum(counts) or len(counts))
        applied = isfinite(norm) and isfinite(loss)
        coefficient = clip_coefficient(norm, self._config.optimizer.clip) if applied else 1.0
        pushes = tuple(request.logged(worker) for worker, request in pending.items())
        return self._apply(clock, pushes, loss, norm, applied, coefficient)

    def _sum_over_servers(self, squares: float) -> float:
        if self._group is None:
            return squares
        total = torch.tensor([squares], dtype=torch.float64)
        with comm.label(AXIS, CONTROL, "sum"):
            dist.all_reduce(total, group=self._group)
        self._norm_sum = [Collective(AXIS, "all_reduce", CONTROL, 1, total.nbytes)]
        return total.item()

    def _apply(
        self, clock: int, pushes: tuple[Push, ...], loss: float, norm: float, applied: bool, coefficient: float = 1.0,
        step_time_s: float = 0.0,
    ) -> ServerReply:  # fmt: skip
        """Step the optimizer, unless a value is not finite, and log the update; return the reply to its workers."""
        if self._config.verb == "verify":
            self._gradients.append(self._store.gradient.clone())
        lr = learning_rate(self._config.optimizer, clock, self._config.steps)
        if applied:
            self._checkpoints.before_update()
            self._store.update(lr, coefficient)
        self._store.version += 1
        version = self._store.version
        row = AppliedUpdate(self._index, version, clock, pushes, lr, loss, norm, applied, coefficient)
        self._log(replace(row, gap=self._clocks.gap, step_time_s=step_time_s))
        self._changed.notify_all()
        return ServerReply(1, version, clock, float(applied), 1.0, loss, norm, float(self.stopped))

    def _log(self, row: LogRow) -> None:
        row = replace(row, time_s=time.perf_counter() - self._began)
        append_row(self._context.directory, row)
        self._statistics.add(row)

    # barriers

    def _ranks(self, workers: Set[int]) -> set[int]:
        return {connection.rank for connection in self._connections if connection.worker in workers}

    def _wait_at_barrier(self, connection: RankConnection, request: WorkerRequest) -> ServerReply:
        """Return the reply when the barrier is released; meanwhile tell the rank about once a second to wait on."""
        rank, barrier = connection.rank, self._barriers[request.ask]
        with self._changed:
            if request.ask == Ask.END:
                self._clocks.finished.add(connection.worker)
            barrier.arrive(rank, request.stop > 0)
            self._release_barriers()
            self._changed.notify_all()
        while True:
            with self._changed:
                self._wait_until(lambda: rank not in barrier.waiting, WAIT_S)
                if rank not in barrier.waiting:
                    return ServerReply(1, self._store.version, clock=barrier.failed_step)
            connection.channel.send_header(ServerReply(ready=0))
            connection.channel.flush()

    def _release_barriers(self) -> None:
        """Run the action of each barrier at which the ranks of all expected workers have arrived, and release it."""
        saving, ending = self._barriers[Ask.SAVE], self._barriers[Ask.END]
        if saving.is_complete(self._ranks(self._clocks.running)):
            clocks = {worker: self._clocks.completed[worker] for worker in sorted(self._clocks.live)}
            saving.release(self._checkpoints.save(clocks, saving.final))
        if ending.is_complete(self._ranks(self._clocks.live)):
            failed = self._checkpoints.finish()
            publish_facts(self._context.rank, self._facts())
            ending.release(failed)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of this server that worker 0 writes. rows: of the counted exchange with every rank."""
        connections = self._connections
        rows = merge(self._norm_sum + [row for connection in connections for row in connection.messages])
        return {
            "peak_bytes": peak_bytes(torch.device("cpu")),
            "times": {},
            "saves": asdict(self._checkpoints.times),
            "lost": sorted(self._ranks(self._clocks.lost)),
            "statistics": self._statistics.document(),
            "rows": [asdict(row) for row in rows] if all(c.num_exchanges >= COUNTED for c in connections) else None,
            "blocked_s": {worker.index: worker.blocked_s for worker in self._workers},
        }

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Release the lock until `condition` holds, the time is over, or a thread has failed (ServerAborted)."""
        self._changed.wait_for(lambda: self._error is not None or condition(), timeout)
        if self._error is not None:
            raise ServerAborted
