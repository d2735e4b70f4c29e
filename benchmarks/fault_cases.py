"""The runs of the fault campaign: small trainings of every strategy, each with faults chosen by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from benchmarks.fault_injection import FAULTS, IN_TURN, LATE, SLOW, SLOW_STEPS, Fault
from parallelrun import api
from parallelrun.api.results import PlannedRun

SMALL = (
    "model.layers=2", "model.hidden=16", "model.heads=4", "model.seq=8", "dataset=synthetic", "dataset.samples=64",
    "global_batch=8", "checkpoint.every=2", "checkpoint.keep=3", "eval.every=0", "dropout=0.1",
)  # fmt: skip
STRATEGIES = {
    "ptdp": ("strategy=ptdp", "dp=2", "tp=2"),
    "fsdp": ("strategy=fsdp", "dp=2", "backend=gloo"),
    "ring": ("strategy=ring", "dp=2", "backend=gloo"),
    "gshard": ("model=moe_gpt", "strategy=gshard", "dp=2", "ep=2"),
    "tp3d": ("strategy=tp3d", "tp=8", "dp=1"),
    "ps": ("strategy=ps", "dp=2", "servers=1"),
}
CUT = "network cut"
ON_SOCKETS = ("ring", "fsdp")  # the others' ranks exchange data through shared memory here
FULL = "full disk"
HARMLESS = (SLOW, FULL)  # that end no attempt
LOST = "lost launcher"
FATAL = tuple(kind for kind in FAULTS if kind not in (*HARMLESS, LOST, LATE, CUT))
PER_RUN, APART, FIRST = 8, 3, 4  # faults, steps between them, the first one's step


@dataclass
class Case:
    """A run with its faults, and what was found.

    results: by check; culprits: by the fault's number; unplanned: attempts that have failed without a fault, such as a
    step that took longer than the timeout of a campaign on a busy machine; load: of the machine when the run ended.
    """

    number: int
    strategy: str
    faults: list[Fault]
    results: dict[str, bool] = field(default_factory=dict)
    culprits: dict[int, bool] = field(default_factory=dict)
    restart_s: list[float] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    told: str = ""
    wall_s: float = 0.0
    load: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether every check holds, and the right rank was named for every fault."""
        return bool(self.results) and all([*self.results.values(), *self.culprits.values()])


@cache
def planned(strategy: str, num_faults: int) -> PlannedRun:
    """Return the small training of a strategy, long enough for so many faults."""
    steps = FIRST + APART * num_faults + SLOW_STEPS
    return api.plan(*SMALL, *STRATEGIES[strategy], f"steps={steps}")


def cases(num_faults: int, seed: int, strategies: Sequence[str]) -> Iterator[Case]:
    """Yield runs with `num_faults` faults in all: every strategy in turn, kinds and ranks by chance."""
    rng = random.Random(seed)
    left, number = num_faults, 0
    while left > 0:
        for strategy in strategies:
            count = min(left, PER_RUN)
            if count <= 0:
                return
            left -= count
            yield Case(number, strategy, list(_faults(strategy, count, rng)))
            number += 1


def _faults(strategy: str, count: int, rng: random.Random) -> Iterator[Fault]:
    world = planned(strategy, PER_RUN).world
    workers = world - (1 if strategy == "ps" else 0)
    disk_was_full = False  # since the last restart: a run whose saves fail twice in a row ends, as it should
    for number in range(count):
        step = FIRST + APART * number
        if number == count - 1 and rng.random() < 0.5:
            kind = LOST
        elif rng.random() < 0.25:
            kind = SLOW if disk_was_full else rng.choice(HARMLESS)
        else:
            kind = rng.choice((*FATAL, *([CUT] * 2 if strategy in ON_SOCKETS else [])))
        disk_was_full = kind == FULL or (disk_was_full and kind == SLOW)
        # of ps, a server saves, a worker may be slow, and both may have all other faults
        rank = workers if strategy == "ps" and kind == FULL else rng.randrange(workers if kind == SLOW else world)
        yield Fault(kind, rank, step, IN_TURN, round(rng.random() * 0.02, 4) if kind in ("kill", "stop") else 0.0)
