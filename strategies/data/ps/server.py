"""A server: one thread per worker waits for its requests; updates are made under one lock, in the order they come."""

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
from parallelrun.plan.structure import Plan
from parallelrun.train import schedule
from parallelrun.train.gradients import EPSILON

from . import protocol
from .channel import Channel, PeerGone
from .clocks import Clocks
from .count import StepCounter
from .desk import Aborted, Desk, Figures
from .log import Applied, Dropped, Push, ServerLog
from .meeting import Meeting
from .protocol import AXIS, CONTROL, PULL, PUSH, UPDATE, Reply, Request, has_barrier
from .settings import ParameterServerWay
from .store import ShardStore

ASK_AGAIN_S = 1.0  # how long a server lets a worker wait in a meeting before it answers "not yet"
BEAT_S = 0.2


class Server:
    """Serves one run, from the first read to the last goodbye.

    group: the process group of all servers, None where there is only one. Who makes a server may set: on_save(clocks of
    the live workers, last chance), False where it failed and may be tried again; on_lost(worker), when the run goes on
    without one; on_end(), when all are through and still listen.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        index: int,
        store: ShardStore,
        log: ServerLog,
        start: dict[int, int],
        group: dist.ProcessGroup | None = None,
    ):
        assert isinstance(plan.data, ParameterServerWay)
        self.config, self.plan, self.index, self.store = config, plan, index, store
        self.strategy, self.barrier = plan.data, has_barrier(plan.data)
        self.clocks, self.figures = Clocks(start), Figures()
        self.counter = StepCounter()
        self._log, self._group = log, group
        self.on_save: Callable[[dict[int, int], bool], bool] = lambda clocks, last: True
        self.on_lost: Callable[[int], None] = lambda worker: None
        self.on_end: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._pending: dict[int, dict[int, tuple[Request, Tensor]]] = {}  # barrier: pushes by clock and worker
        self._results: dict[int, Reply] = {}  # barrier: the answer to the pushes of a clock
        self._meetings = {protocol.SAVE: Meeting(), protocol.END: Meeting()}
        self._held = 0  # requests that have come and are not answered
        self._stop = False
        self._error: BaseException | None = None
        self._began = time.perf_counter()
        self._last_push = dict.fromkeys(start, self._began)
        self._kept: dict[int, Tensor] = {}  # verify: the gradient of every update
        self._left: set[int] = set()

    def serve(self, beat: Callable[[int], None]) -> None:
        """Until all workers have said goodbye. Raises what a thread could not handle: the run is over then."""
        for worker in self.clocks.completed:
            threading.Thread(target=self._attend, args=(worker,), daemon=True, name=f"worker-{worker}").start()
        while True:
            with self._changed:
                self._changed.wait(BEAT_S)
                if self._error is not None:
                    raise self._error
                if self._left >= self.clocks.live:
                    return
            beat(max(self.clocks.completed.values()))

    @property
    def stopped(self) -> bool:
        """Was somebody asked to stop?"""
        return self._stop

    # one thread per worker

    def _attend(self, worker: int) -> None:
        desk = Desk(worker, self.store)
        try:
            while self._answer(desk):
                pass
            with self._changed:
                self._left.add(worker)
                self._changed.notify_all()
        except BaseException as error:  # of any kind: the main thread must hear of it
            self._failed(worker, error)

    def _failed(self, worker: int, error: BaseException) -> None:
        """A worker that is gone is done without, if the plan can; anything else ends the server."""
        with self._changed:
            spare = self.plan.data.spare_workers(self.plan.num_workers)
            gone = isinstance(error, PeerGone) and worker != 0 and len(self.clocks.lost) < spare
            if gone and self._error is None:
                try:
                    self.clocks.lose(worker)
                    self._pending = {c: {w: p for w, p in of.items() if w != worker} for c, of in self._pending.items()}
                    self.on_lost(worker)
                    self._hold_meetings()
                except BaseException as further:
                    error, gone = further, False
            if not gone:
                self._error = self._error or error
            self._changed.notify_all()

    def _answer(self, desk: Desk) -> bool:
        """Receive one request and answer it; False after the last."""
        request = desk.channel.receive_request()
        if request.operation == UPDATE:
            desk.channel.receive(desk.push, PUSH)
        if request.operation == protocol.LEAVE:
            return False
        self._reply(desk, request)
        desk.channel.flush()
        passed = desk.channel.take_passed()
        if request.operation == UPDATE:
            self.counter.exchanged(desk.worker, passed)
        return True

    def _reply(self, desk: Desk, request: Request) -> None:
        if request.operation in (protocol.READ, UPDATE):
            reply, weights = self._update(desk, request) if request.operation == UPDATE else self._read(desk)
            desk.channel.send_header(reply)
            desk.channel.send(weights, PULL)
        elif request.operation in (protocol.SAVE, protocol.END):
            desk.channel.send_header(self._meet(desk.worker, request))
        elif request.operation == protocol.KEEP:
            self._keep(desk.channel)
            desk.channel.send_header(Reply(1))
        else:
            desk.channel.send_header(Reply(1))
            flat = self._kept[request.clock] if request.operation == protocol.READ_GRADIENT else self._frozen()
            desk.channel.send(flat, PULL)

    def _read(self, desk: Desk) -> tuple[Reply, Tensor]:
        with self._changed:
            reply = Reply(1, self.store.version, self.clocks.completed[desk.worker], stop=float(self._stop))
            return reply, desk.pull.copy_(self.store.weights)

    def _update(self, desk: Desk, request: Request) -> tuple[Reply, Tensor]:
        """Take in one push; the answer, and the weights that go with it."""
        with self._changed:
            arrived = time.perf_counter()
            self.figures.pushed_bytes += desk.push.nbytes
            self._held += 1
            self._stop = self._stop or (request.stop > 0 and not self.barrier)
            step_time = arrived - self._last_push[desk.worker] - request.paused_s
            reply = self._together(desk, request) if self.barrier else self._alone(desk, request, step_time)
            self._last_push[desk.worker] = arrived
            self._held -= 1
            blocked = time.perf_counter() - arrived
            self.figures.blocked_s[desk.worker] = self.figures.blocked_s.get(desk.worker, 0.0) + blocked
            self.figures.pulled_bytes += desk.pull.nbytes
            weights = self.store.weights if self.barrier and not self.strategy.backup_workers else desk.pull
            if weights is desk.pull:  # others may change the weights while these travel
                weights.copy_(self.store.weights)
            return reply._replace(blocked_s=blocked), weights

    # one push, one update (async, ssp)

    def _alone(self, desk: Desk, request: Request, step_time: float) -> Reply:
        worker, clock = desk.worker, request.clock
        self.clocks.tick(worker, clock)
        finite = request.finite > 0
        lr = schedule.learning_rate(self.config.optimizer, clock, self.config.steps)
        if finite:
            self.store.mean([desk.push], [1.0])
            self._keep_gradient(self.store.version + 1)
            self.store.update(lr)
        self.store.version += 1
        loss = request.loss_sum / request.num_valid if request.num_valid else float("nan")
        push = Push(worker, clock, request.pulled, loss, request.num_valid, request.norm)
        self._log.add(
            Applied(
                self.index, self.store.version, clock, (push,), lr, loss, request.norm, finite, 1.0, self._held - 1,
                self.clocks.gap, self._now(), step_time,
            )
        )  # fmt: skip
        self._changed.notify_all()
        self._wait_until(lambda: self._stop or self.clocks.may_read(worker, self.strategy.staleness))
        return Reply(1, self.store.version, clock, float(finite), 1.0, loss, request.norm, float(self._stop))

    # one update of several pushes (sync, backup workers)

    def _together(self, desk: Desk, request: Request) -> Reply:
        clock = request.clock
        if clock <= self.store.version:
            self._log.add(Dropped(self.index, desk.worker, clock, request.pulled, self.store.version, self._now()))
            self.clocks.tick(desk.worker, max(clock, self.store.version))
            return self._results[self.store.version]._replace(accepted=0.0)
        self._pending.setdefault(clock, {})[desk.worker] = (request, desk.push)
        self._make_ready_updates()
        self._wait_until(lambda: self.store.version >= clock)
        self.clocks.tick(desk.worker, self.store.version)
        return self._results[self.store.version]

    def _make_ready_updates(self) -> None:
        quorum = self.strategy.quorum(self.plan.num_workers)
        while len(self._pending.get(self.store.version + 1, {})) >= quorum:
            clock = self.store.version + 1
            self._results[clock] = self._make_update(clock, self._pending.pop(clock))
            self._results = {c: reply for c, reply in self._results.items() if c >= clock - 1}
            self._changed.notify_all()

    def _make_update(self, clock: int, pushes: dict[int, tuple[Request, Tensor]]) -> Reply:
        """Average in the order of workers, agree with the other servers on the norm, clip, step."""
        ordered = sorted(pushes.items())
        requests = [request for _, (request, _) in ordered]
        counts = [max(request.num_valid, 0.0) for request in requests]
        counts = counts if sum(counts) else [1.0] * len(counts)
        self.store.mean([payload for _, (_, payload) in ordered], counts)
        self._keep_gradient(clock)
        finite = all(request.finite > 0 for request in requests)
        squares, stops = self._agree(
            self.store.squared_norm() if finite else float("inf"), sum(request.stop for request in requests)
        )
        norm = squares**0.5
        loss = sum(request.loss_sum for request in requests) / sum(counts)
        applied = isfinite(norm) and isfinite(loss)
        limit = self.config.optimizer.clip
        coefficient = min(1.0, limit / (norm + EPSILON)) if limit > 0 and applied else 1.0
        lr = schedule.learning_rate(self.config.optimizer, clock, self.config.steps)
        if applied:
            self.store.update(lr, coefficient)
        self.store.version = clock
        self._stop = self._stop or stops > 0
        parts = tuple(
            Push(worker, clock, request.pulled, request.loss_sum / (request.num_valid or 1.0), count)
            for (worker, (request, _)), count in zip(ordered, counts)
        )
        self._log.add(
            Applied(
                self.index, clock, clock, parts, lr, loss, norm, applied, coefficient, self._held - 1, self.clocks.gap,
                self._now(),
            )
        )  # fmt: skip
        return Reply(1, clock, clock, float(applied), 1.0, loss, norm, float(self._stop))

    def _keep_gradient(self, version: int) -> None:
        if self.config.verb == "verify":
            self._kept[version] = self.store.gradient.clone()

    def _agree(self, squares: float, stops: float) -> tuple[float, float]:
        """Sums over the servers: all clip by one norm, and stop after the same step."""
        if self._group is None:
            return squares, stops
        numbers = torch.tensor([squares, stops], dtype=torch.float64)
        assert len(numbers) == protocol.NORM_ELEMENTS
        with comm.label(AXIS, CONTROL, "sum"):
            dist.all_reduce(numbers, group=self._group)
        self.counter.agreed()
        total = numbers.tolist()
        return total[0], total[1]

    # meetings

    def _meet(self, worker: int, request: Request) -> Reply:
        with self._changed:
            meeting = self._meetings[request.operation]
            if request.operation == protocol.END:
                self.clocks.finish(worker)
            meeting.come(worker, request.stop > 0)
            self._hold_meetings()
            self._changed.notify_all()
            self._wait_until(lambda: not meeting.is_waiting(worker), ASK_AGAIN_S)
            return Reply(meeting.answer(worker), self.store.version, self.clocks.completed[worker])

    def _hold_meetings(self) -> None:
        """Hold each meeting to which everybody has come."""
        saving, ending = self._meetings[protocol.SAVE], self._meetings[protocol.END]
        if saving.complete(self.clocks.running):
            clocks = {worker: self.clocks.completed[worker] for worker in sorted(self.clocks.live)}
            saving.hold(self.on_save(clocks, saving.last))
        if ending.complete(self.clocks.live):
            self.on_end()
            ending.hold(True)

    def _keep(self, channel: Channel) -> None:
        flat = channel.receive(torch.empty_like(self._frozen()), PUSH)
        with self._changed:
            frozen = self.store.frozen.values()
            for tensor, part in zip(frozen, flat.split([tensor.numel() for tensor in frozen])):
                tensor.copy_(part.view_as(tensor))

    def _frozen(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self.store.frozen.values()])

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Let others work until `condition` holds, or somebody has failed."""
        self._changed.wait_for(lambda: self._error is not None or condition(), timeout)
        if self._error is not None:
            raise Aborted

    def _now(self) -> float:
        return time.perf_counter() - self._began
