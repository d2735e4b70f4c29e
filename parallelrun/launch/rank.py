"""One rank, from its first to its last moment: device, process group, worker, and an orderly end or a recorded one.

As a program (`python -m parallelrun.launch.rank`) it is a rank that was started by exec: on CUDA, which does not
survive a fork, on macOS, and where the launcher has threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun import reserve
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_INTERRUPTED, EnvironmentProblem, Problem
from parallelrun.launch import failure, gpus
from parallelrun.launch.board import Board
from parallelrun.plan.structure import Plan

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

WORKER = "parallelrun.launch.worker:run"


@dataclass(frozen=True)
class Place:
    """Where a rank stands. slot: its place on the board of its host; worker: `module:function` of the worker door;
    threads: compute threads, 0 to leave torch's choice."""

    rank: int
    world: int
    local_rank: int
    slot: int
    directory: Path
    worker: str = WORKER
    threads: int = 0
    keeps_terminal: bool = False


def serve(place: Place, config: Config, plan: Plan, board: Board, connect: Callable[[], Store] | None) -> int:
    """Run the worker of this rank; return the exit code. Never raises: a failure is written to `errors/`, its
    traceback to stderr. connect: gives the store; None for a run of one rank, which has no process group."""
    try:
        code = _work(place, config, plan, board, connect)
        board.set_returned(place.slot, code)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            error = RuntimeError("the worker called sys.exit()")
        now = time.monotonic_ns()
        with contextlib.suppress(OSError, ValueError):  # a full disk: the log may have no room
            traceback.print_exception(error)
        beat = board.read(place.slot)
        said = failure.of_exception(error, place.rank, now, "".join(traceback.format_exception(error)), connect is None)
        said = replace(said, pid=os.getpid(), step=beat.step, phase=beat.phase)
        try:
            reserve.insist(place.directory, reserve.ERRORS, partial(failure.write, place.directory, said))
        except OSError:
            board.tell(place.slot, said.exit_code, said.order, said.what)
        return said.exit_code


def _work(place: Place, config: Config, plan: Plan, board: Board, connect: Callable[[], Store] | None) -> int:
    import torch

    if place.threads:
        torch.set_num_threads(place.threads)
    seed(config.seed, place.rank)
    device = _device(plan, place)
    store = connect() if connect is not None else None
    if store is not None:
        _join(place, config, plan, store)
    context = WorkerContext(
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        device=device,
        directory=place.directory,
        heartbeat=partial(board.beat, place.slot),
        stop_requested=board.stop_requested,
        save_failed=board.set_failed_save,
        console_owner=place.rank == 0,
        gone=partial(_stand_in, place, store),
    )
    code = find_worker(place.worker)(config, plan, context)
    if store is not None:
        board.beat(place.slot, board.read(place.slot).step, "finish")
        _leave(place, store)
    return code


def find_worker(name: str) -> Any:
    """`module:function` -> the function."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def seed(number: int, rank: int) -> None:
    """Give this rank random streams of its own: forked processes would share the launcher's."""
    import random

    import numpy
    import torch

    mixed = (number * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    numpy.random.seed(mixed)
    torch.manual_seed(mixed)


def _device(plan: Plan, place: Place) -> torch.device:
    """A worker's own GPU. Servers run on the CPU."""
    import torch

    if plan.device != "cuda" or plan.role(place.rank) == "server":
        return torch.device("cpu")
    device = torch.device("cuda", gpus.index(place.local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _join(place: Place, config: Config, plan: Plan, store: Store) -> None:
    """The process group of the run. Its own timeout is the last resort: the watchers act at `config.timeout_s`.

    Where there are servers, which may have no GPU, it is gloo's alone, and NCCL is left to the workers' own group.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if plan.device == "cuda" and not plan.servers else "gloo",
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=2 * config.timeout_s + 60),
    )


def _leave(place: Place, store: Store) -> None:
    """All ranks are through, then the group is taken down, and rank 0, which serves the store, leaves last.

    They meet in the store, not in a collective: that could pair with one that a rank has left out before.
    """
    import torch.distributed as dist

    if store.add("through", 1) == place.world:
        store.set("all through", "yes")
    store.wait(["all through"], timedelta(days=1))  # the watchers end it when a rank does not come
    dist.destroy_process_group()
    store.add("left", 1)
    deadline = time.monotonic() + 5
    while place.rank == 0 and store.add("left", 0) < place.world and time.monotonic() < deadline:
        time.sleep(0.002)


def _stand_in(place: Place, store: Store | None, gone: int) -> None:
    """Rank `gone` has died and the run goes on: nobody waits for it in `_leave`."""
    assert store is not None and gone != place.rank
    if store.add("through", 1) == place.world:
        store.set("all through", "yes")
    store.add("left", 1)


def local_store(world: int, port: int, listener: int | None) -> Store:
    """The store of ranks that share this host: rank 0 (with `listener`, a socket bound to 127.0.0.1) serves it."""
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1", port, world, listener is not None, timedelta(seconds=300), wait_for_workers=False,
        master_listen_fd=listener,
    )  # fmt: skip


def take_signals(board: Board) -> None:
    """SIGTERM asks all ranks of the host to stop after their step; SIGINT interrupts at once."""
    signal.signal(signal.SIGTERM, lambda *_: board.request_stop())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # rank 0 may write to the terminal from its own process group


def end(code: int) -> None:
    """Leave without running exit handlers: threads of a lost process group abort in them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def leave_with_parent(parent: int) -> None:
    """End this process when its launcher ends, however that ends."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if sys.platform != "linux":  # untested: macOS has no death signal, so a thread looks
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass(frozen=True)
class ExecOrder:
    """What an exec'd rank is told on its command line, as JSON: its place, and inherited descriptors."""

    place: Place
    parent: int
    board: int
    port: int
    listener: int | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> ExecOrder:
        fields: Mapping[str, Any] = json.loads(text)
        place = {**fields["place"], "directory": Path(fields["place"]["directory"])}
        return cls(**{**fields, "place": Place(**place)})


def main(text: str) -> None:
    """The life of an exec'd rank."""
    order = ExecOrder.from_json(text)
    place = order.place
    leave_with_parent(order.parent)
    board = Board(place.world, order.board)
    take_signals(board)
    from parallelrun.launch.output import redirect

    redirect(place.directory, place.rank, place.keeps_terminal)

    from parallelrun.plan.freeze import load_frozen
    from parallelrun.plan.resolve import resolve

    config = load_frozen((place.directory / "config.yaml").read_text())
    plan = resolve(config)
    if plan.world != place.world:
        problem = Problem(f"config.yaml says {plan.world} ranks, the launcher started {place.world}", "config.yaml")
        raise EnvironmentProblem(problem)
    connect = partial(local_store, place.world, order.port, order.listener) if place.world > 1 else None
    end(serve(place, config, plan, board, connect))


if __name__ == "__main__":
    main(sys.argv[1])
