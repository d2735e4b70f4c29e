"""The life of a server rank: groups, shards, resume, serve, leave."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from parallelrun import torch_private
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK, EXIT_PREEMPTED
from parallelrun.mesh import build_server_group
from parallelrun.plan.structure import Plan
from parallelrun.train.recorder import peak_bytes

from . import saving
from .log import ServerLog
from .protocol import has_barrier
from .server import Server
from .store import ShardStore

FACTS = "parallelrun/ps/facts/{rank}"  # in the store: what a rank tells worker 0 at the end


def serve(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Serve one run as this rank; the exit code. Collective: the workers build their meshes meanwhile."""
    group = build_server_group(plan)
    store = ShardStore(config, plan, group.index)
    store.initialise()
    start = saving.load(store, config, plan, has_barrier(plan.data))
    server = Server(config, plan, group.index, store, ServerLog(context.directory), start, group.process_group)
    saver = saving.Saver(context)

    def save(clocks: dict[int, int], last: bool) -> bool:
        def write() -> None:
            saving.save(store, config, plan, clocks, context.directory, group.index, group.process_group)

        return saver.save(clocks, last, write)

    server.on_save = save
    server.on_end = lambda: publish(context.rank, _facts(server, saver.failed_steps))
    if group.index == 0:
        server.on_lost = context.gone
    server.serve(lambda step: context.heartbeat(step, "serve"))
    return EXIT_PREEMPTED if server.stopped else EXIT_OK


def publish(rank: int, facts: dict[str, Any]) -> None:
    """Tell worker 0, by the store: a collective would wait for those who are gone."""
    torch_private.default_store().set(FACTS.format(rank=rank), json.dumps(facts))


def collect(rank: int) -> dict[str, Any]:
    """What that rank has told."""
    return json.loads(torch_private.default_store().get(FACTS.format(rank=rank)))


def _facts(server: Server, failed_saves: list[int]) -> dict[str, Any]:
    rows = server.counter.rows()
    return {
        "peak_bytes": peak_bytes(torch.device("cpu")),
        "rows": None if rows is None else [asdict(row) for row in rows],
        "times": {},
        "lost": sorted(server.clocks.lost),
        "failed_saves": failed_saves,
        **asdict(server.figures),
    }
