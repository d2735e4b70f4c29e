"""Whether the disk has room for what a run will write: said before it starts. Torch-free."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from parallelrun.checkpoint.resume import keeps_last_state
from parallelrun.config.schema import Config
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES
from parallelrun.routing_log import NUMBERS_WRITTEN

_ROW_BYTES = 512  # of metrics.jsonl: measured 300 to 450
_NUMBER_BYTES = 6  # of routing.jsonl, which has two numbers for each expert, layer and step


@dataclass(frozen=True)
class Need:
    """What a run writes at most at one time, in bytes. num_checkpoints: those kept, and the one being written beside
    them."""

    checkpoint_bytes: int
    num_checkpoints: int
    record_bytes: int

    @property
    def total(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes + self.record_bytes


def need(config: Config, plan: Plan) -> Need:
    """What a run of `plan` will write."""
    every, steps = config.checkpoint.every, config.steps
    saves = steps // every if every else 0
    saves += keeps_last_state(config) and (not every or steps % every > 0)
    kept = max(1, config.checkpoint.keep)
    layers = sum(1 for layer in plan.spec.layers() if layer.layer_role == "router")
    loads = min(NUMBERS_WRITTEN, 2 * steps * layers * config.model.experts)
    return Need(checkpoint_bytes(plan), min(saves, kept + 1), steps * _ROW_BYTES + int(loads) * _NUMBER_BYTES)


def checkpoint_bytes(plan: Plan) -> int:
    """The size of one checkpoint: weights, optimizer state and what the data strategy keeps, each element once, and
    once more for each replica that trains by itself."""
    trained = plan.spec.num_parameters - plan.spec.num_frozen
    state = plan.spec.num_parameters + trained * plan.optimizer_states
    replicas = plan.mesh.size("dp")
    copies = 1 + replicas if plan.data.independent and replicas > 1 else 1
    kept = trained * plan.data.kept_states
    return (state * copies + kept) * BYTES[plan.precision.stored]


def shortage(config: Config, plan: Plan, folder: Path) -> list[str]:
    """A sentence if the disk of `folder`, which need not exist yet, has less free than the run will write."""
    if config.verb != "run":
        return []
    wanted, free = need(config, plan), free_bytes(folder)
    if wanted.total <= free:
        return []
    checkpoints = f"{wanted.num_checkpoints} checkpoints of {_size(wanted.checkpoint_bytes)}"
    kept = f" ({wanted.num_checkpoints - 1} kept while the next is written)" if wanted.num_checkpoints > 1 else ""
    parts = [checkpoints + kept] if wanted.num_checkpoints else []
    what = " and ".join([*parts, f"{_size(wanted.record_bytes)} of records"])
    return [
        f"the disk may become full: the run needs {_size(wanted.total)} in {folder} ({what}), and {_size(free)} are "
        "free; checkpoint.keep=1 or runs=<a folder on a larger disk> would help"
    ]


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write on the disk of `folder`, or of the nearest folder above it that exists."""
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
