"""The ranks' side of a calibration: `devices` times the machine, `steps` a training. Both write JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch

from parallelrun.base.context import ASKED, WorkerContext
from parallelrun.base.errors import EXIT_OK
from parallelrun.base.records import write_json
from parallelrun.cli.calibration import devices
from parallelrun.cli.calibration.devices import PURPOSE, Clock
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.mesh import build_mesh
from parallelrun.launch.ranks import worker
from parallelrun.planner.contract.plan import Plan

PRODUCTS, EXCHANGES = "products", "exchanges"


def measure(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Time what `asked.json` asks for; write `measured_<rank>.json`."""
    request = json.loads((context.directory / ASKED).read_text(encoding="utf-8"))
    if context.device.type == "cpu":
        torch.set_num_threads(1)
        torch_private.use_fast_products()
    mesh = build_mesh(plan, context.device)
    clock = Clock(context.device, request["seconds"])

    def start() -> None:
        context.heartbeat(1, "calibrate")
        comm.all_reduce(torch.zeros(1, device=context.device), mesh.group("dp"), PURPOSE)

    measured: dict[str, object] = {"threads": torch.get_num_threads()}
    if PRODUCTS in request["parts"]:
        start()
        measured["peaks"] = {name: asdict(devices.peak(clock, name)) for name in devices.PRECISIONS}
        measured["products"] = [asdict(row) for row in devices.products(clock, start)]
        start()
        measured["memory_bytes_s"] = devices.copies(clock)
    if EXCHANGES in request["parts"] and plan.world > 1:
        measured["exchanges"] = [asdict(row) for row in devices.exchanges(clock, mesh.group("dp"))]
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        measured["device"] = properties.name
        measured["multiprocessors"] = properties.multi_processor_count
        measured["memory_bytes"] = properties.total_memory
    measured["backend"] = comm.backend_of(mesh) or ""
    write_json(context.directory / f"measured_{context.rank}.json", measured)
    return EXIT_OK


def steps(config: Config, plan: Plan, context: WorkerContext) -> int:
    """`parallelrun bench` without its table."""
    return worker.run(config, plan, replace(context, console_owner=False))
