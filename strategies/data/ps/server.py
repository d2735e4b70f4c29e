"""A server: one thread per worker receives its requests; updates are made under one lock, in the order of arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import comm
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import SaveFailed
from parallelrun.mesh import build_server_group
from parallelrun.plan.structure import Plan
from parallelrun.train.checkpointing import MAX_FAILED_SAVES
from parallelrun.train.gradients import EPSILON
from parallelrun.train.recorder import peak_bytes
from parallelrun.train.schedules import learning_rate

from . import apply_log
from .apply_log import AppliedUpdate, DroppedPush, Push
from .connections import PeerLost, WorkerConnection, flatten, publish_facts, unflatten
from .metrics import ServerTraffic
from .plan import ParameterServer
from .protocol import AXIS, CONTROL, PULL, PUSH, Ask, ServerReply, WorkerRequest
from .store import ShardStore
from .synchronization import Barrier, WorkerClocks

POLL_S = 1.0  # how long a worker waits at a barrier until the server replies "not yet"
HEARTBEAT_S = 0.2


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
        self._clocks = WorkerClocks(self._store.load())
        self._changed = threading.Condition()  # the lock of everything below
        self._pending: dict[int, dict[int, tuple[WorkerRequest, Tensor]]] = {}  # synchronous: pushes by clock, worker
        self._replies: dict[int, ServerReply] = {}  # synchronous: the reply to the pushes of a clock
        self._barriers = {Ask.SAVE: Barrier(), Ask.END: Barrier()}
        self._num_open = 0  # pushes that have arrived and are not answered
        self._error: BaseException | None = None
        self._left: set[int] = set()
        self._gradients: dict[int, Tensor] = {}  # verify: of every update
        self._failed_saves = 0  # in a row
        self._traffic = ServerTraffic()
        self._began = time.perf_counter()
        self._last_push = dict.fromkeys(self._clocks.completed, self._began)
        self.stopped = False  # whether a worker was asked to stop

    def serve(self) -> None:
        """Serve until all workers have left. Raises the first error of a thread."""
        for worker in self._clocks.completed:
            threading.Thread(target=self._attend, args=(worker,), daemon=True, name=f"worker-{worker}").start()
        while True:
            with self._changed:
                self._changed.wait(HEARTBEAT_S)
                if self._error is not None:
                    raise self._error
                if self._left >= self._clocks.live:
                    return
            self._context.heartbeat(max(self._clocks.completed.values()), "serve")

    # one thread per worker

    def _attend(self, worker: int) -> None:
        connection = WorkerConnection(worker, self._store.weights)
        channel = connection.channel
        try:
            while (request := channel.receive_request()).ask != Ask.LEAVE:
                reply, payload = self._reply(connection, request)
                channel.send_header(reply)
                if payload is not None:
                    channel.send(payload, PULL)
                counted = channel.flush()
                if request.ask == Ask.UPDATE:
                    self._traffic.exchanged(worker, counted)
            with self._changed:
                self._left.add(worker)
                self._changed.notify_all()
        except BaseException as error:  # any kind: the main thread must hear of it
            with self._changed:
                self._error = self._error or self._lose(worker, error)
                self._changed.notify_all()

    def _lose(self, worker: int, error: BaseException) -> BaseException | None:
        """Go on without a worker whose connection is lost if the plan can spare it; else return the error."""
        spare = self._settings.spare_workers(self._plan.num_workers)
        if not isinstance(error, PeerLost) or worker == 0 or len(self._clocks.lost) >= spare:
            return error
        try:
            self._clocks.lost.add(worker)
            for pushes in self._pending.values():
                pushes.pop(worker, None)
            if self._index == 0:
                self._context.rank_died(worker)
            self._release_barriers()
        except BaseException as further:
            return further
        return None

    def _reply(self, connection: WorkerConnection, request: WorkerRequest) -> tuple[ServerReply, Tensor | None]:
        """Do what a worker asks; return the reply, and what is sent after it."""
        if request.ask == Ask.UPDATE:
            connection.channel.receive(connection.push, PUSH)
            return self._update(connection, request)
        if request.ask in self._barriers:
            return self._wait_at_barrier(connection.worker, request), None
        if request.ask == Ask.READ_GRADIENT:
            return ServerReply(1), self._gradients[request.clock]
        if request.ask == Ask.READ:
            with self._changed:
                clock = self._clocks.completed[connection.worker]
                reply = ServerReply(1, self._store.version, clock, stop=float(self.stopped))
                return reply, connection.pull.copy_(self._store.weights)
        frozen = [parameter.tensor for parameter in self._store.frozen]
        if request.ask == Ask.READ_FROZEN:
            return ServerReply(1), flatten(frozen)
        flat = connection.channel.receive(torch.empty_like(flatten(frozen)), PUSH)
        with self._changed:
            unflatten(flat, frozen)
        return ServerReply(1), None

    def _update(self, connection: WorkerConnection, request: WorkerRequest) -> tuple[ServerReply, Tensor]:
        """Take in one push; return the reply and the weights, when the worker may have them."""
        with self._changed:
            arrived, worker = time.perf_counter(), connection.worker
            self._num_open += 1
            self._traffic.pushed_bytes += connection.push.nbytes
            self.stopped = self.stopped or (request.stop > 0 and not self._settings.synchronous)
            if self._settings.synchronous:
                reply = self._join_update(worker, request, connection.push)
            else:
                step_time = arrived - self._last_push[worker] - request.paused_s
                reply = self._apply_at_once(worker, request, connection.push, step_time)
            self._last_push[worker] = arrived
            self._num_open -= 1
            blocked = time.perf_counter() - arrived
            self._traffic.blocked_s[worker] = self._traffic.blocked_s.get(worker, 0.0) + blocked
            self._traffic.pulled_bytes += connection.pull.nbytes
            weights = self._store.weights
            if not self._settings.in_step:  # other workers may change the weights while these are being sent
                weights = connection.pull.copy_(weights)
            return reply._replace(blocked_s=blocked), weights

    # one update per push (async, ssp)

    def _apply_at_once(self, worker: int, request: WorkerRequest, gradient: Tensor, step_time: float) -> ServerReply:
        clock, finite = request.clock, request.finite > 0
        self._clocks.tick(worker, clock)
        if finite:
            self._set_gradient([gradient], [1.0])
        loss = request.loss_sum / request.num_valid if request.num_valid else float("nan")
        push = Push(worker, clock, request.pulled, loss, request.num_valid, request.norm)
        reply = self._apply(clock, (push,), loss, request.norm, finite, step_time=step_time)
        self._wait_until(lambda: self.stopped or self._clocks.may_read(worker, self._settings.staleness))
        return reply._replace(version=self._store.version, stop=float(self.stopped))

    # one update per clock, of several pushes (sync, backup workers, ssp with staleness 0)

    def _join_update(self, worker: int, request: WorkerRequest, gradient: Tensor) -> ServerReply:
        clock, version = request.clock, self._store.version
        if clock <= version:
            row = DroppedPush(self._index, worker, clock, request.pulled, version, self._seconds())
            apply_log.append(self._context.directory, row)
            self._clocks.tick(worker, version)
            return self._replies[version]._replace(accepted=0.0)
        self._pending.setdefault(clock, {})[worker] = (request, gradient)
        quorum = self._settings.quorum(self._plan.num_workers)
        while len(self._pending.get(self._store.version + 1, {})) >= quorum:
            ready = self._store.version + 1
            reply = self._average_and_update(ready, self._pending.pop(ready))
            self._replies = {one: old for one, old in self._replies.items() if one == ready - 1} | {ready: reply}
        self._wait_until(lambda: self._store.version >= clock)
        self._clocks.tick(worker, self._store.version)
        return self._replies[self._store.version]

    def _average_and_update(self, clock: int, pushes: dict[int, tuple[WorkerRequest, Tensor]]) -> ServerReply:
        """Average in the order of workers, sum the norm with the other servers, clip, step."""
        workers = sorted(pushes)
        requests = [pushes[worker][0] for worker in workers]
        counts = [max(request.num_valid, 0.0) for request in requests]
        counts = counts if sum(counts) else [1.0] * len(counts)
        self._set_gradient([pushes[worker][1] for worker in workers], counts)
        finite = all(request.finite > 0 for request in requests)
        squares = self._store.squared_norm() if finite else float("inf")
        squares, stops = self._sum_over_servers(squares, sum(request.stop for request in requests))
        norm = squares**0.5
        loss = sum(request.loss_sum for request in requests) / sum(counts)
        applied, limit = isfinite(norm) and isfinite(loss), self._config.optimizer.clip
        coefficient = min(1.0, limit / (norm + EPSILON)) if limit > 0 and applied else 1.0
        self.stopped = self.stopped or stops > 0
        parts = tuple(
            Push(worker, clock, request.pulled, request.loss_sum / (request.num_valid or 1.0), count)
            for worker, request, count in zip(workers, requests, counts)
        )
        return self._apply(clock, parts, loss, norm, applied, coefficient)

    def _sum_over_servers(self, squares: float, stops: float) -> tuple[float, float]:
        """All servers clip by one norm and stop after the same step."""
        if self._group is None:
            return squares, stops
        numbers = torch.tensor([squares, stops], dtype=torch.float64)
        with comm.label(AXIS, CONTROL, "sum"):
            dist.all_reduce(numbers, group=self._group)
        self._traffic.norm_summed(numbers.nbytes)
        return float(numbers[0]), float(numbers[1])

    def _set_gradient(self, gradients: list[Tensor], weights: list[float]) -> None:
        self._store.mean(gradients, weights)
        if self._config.verb == "verify":
            self._gradients[self._store.version + 1] = self._store.gradient.clone()

    def _apply(
        self, clock: int, pushes: tuple[Push, ...], loss: float, norm: float, applied: bool, coefficient: float = 1.0,
        step_time: float = 0.0,
    ) -> ServerReply:  # fmt: skip
        """Step the optimizer, unless a value is not finite, and log the update; return the reply to its workers."""
        lr = learning_rate(self._config.optimizer, clock, self._config.steps)
        if applied:
            self._store.update(lr, coefficient)
        self._store.version += 1
        version, queue, gap = self._store.version, self._num_open - 1, self._clocks.gap
        row = AppliedUpdate(
            self._index, version, clock, pushes, lr, loss, norm, applied, coefficient, queue, gap, self._seconds(),
            step_time,
        )  # fmt: skip
        apply_log.append(self._context.directory, row)
        self._changed.notify_all()
        return ServerReply(1, version, clock, float(applied), 1.0, loss, norm, float(self.stopped))

    # barriers

    def _wait_at_barrier(self, worker: int, request: WorkerRequest) -> ServerReply:
        with self._changed:
            barrier = self._barriers[request.ask]
            if request.ask == Ask.END:
                self._clocks.finished.add(worker)
            barrier.arrive(worker, request.stop > 0)
            self._release_barriers()
            self._changed.notify_all()
            self._wait_until(lambda: not barrier.is_waiting(worker), POLL_S)
            return ServerReply(barrier.fetch(worker), self._store.version, self._clocks.completed[worker])

    def _release_barriers(self) -> None:
        """Run the action of each barrier at which all expected workers have arrived, and release it."""
        saving, ending = self._barriers[Ask.SAVE], self._barriers[Ask.END]
        if saving.is_complete(self._clocks.running):
            saving.release(self._save(saving.final))
        if ending.is_complete(self._clocks.live):
            facts = {"peak_bytes": peak_bytes(torch.device("cpu")), "times": {}, "lost": sorted(self._clocks.lost)}
            publish_facts(self._context.rank, {**facts, **self._traffic.facts()})
            ending.release(True)

    def _save(self, final: bool) -> bool:
        """Write a checkpoint; return False if that failed and will be tried again. All servers decide alike.

        Raises SaveFailed for the last chance to save, and for the second failure in a row.
        """
        clocks = {worker: self._clocks.completed[worker] for worker in sorted(self._clocks.live)}
        step = min(clocks.values())
        self._context.heartbeat(step, "save")
        try:
            self._store.save(clocks, self._context.directory, self._group)
        except SaveFailed:
            self._failed_saves += 1
            self._context.save_failed(step)
            if final or self._failed_saves == MAX_FAILED_SAVES:
                raise
            return False
        self._failed_saves = 0
        return True

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Release the lock until `condition` holds, the time is over, or a thread has failed (ServerAborted)."""
        self._changed.wait_for(lambda: self._error is not None or condition(), timeout)
        if self._error is not None:
            raise ServerAborted

    def _seconds(self) -> float:
        return time.perf_counter() - self._began
