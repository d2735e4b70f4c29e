"""How much of its time a training makes progress, although devices fail: checkpoints, restarts, repairs.

A failure of any device ends the training. It restarts with a spare node in the place of the one that failed, reads the
last checkpoint and repeats the work since then. `daly_s` gives the interval of checkpoints, and `simulate` follows a
long training with it from failure to failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, floor, lgamma, log, sqrt

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.hosts import ranks_per_node
from parallelrun.planner.predict.prediction import checkpoint_bytes

HOUR = 3600.0
# From a failure to the next step, without reading the checkpoint: detection and diagnosis take less than 10 minutes at
# MegaScale (Jiang et al., NSDI 2024, section 6.3).
RESTART_S = 600.0
# An assumption, between a node that is reset in about two hours (Cui et al. 2025, on 1,056 A100 and H100) and one whose
# parts are replaced in some days.
REPAIR_HOURS = 24.0
CONFIDENCE = 0.95  # that the spare nodes suffice
NUM_FAILURES = 2000  # simulated
SEED = 0


@dataclass(frozen=True)
class Interruptions:
    """Seconds: mtbf_s from one failure of the training to the next; save_s of a checkpoint, while which nothing is
    trained; restart_s from a failure to the next step, reading included; repair_s of a node. spares: nodes beside those
    that train."""

    mtbf_s: float
    save_s: float
    restart_s: float
    repair_s: float = 0.0
    spares: int = 0


@dataclass(frozen=True)
class Shares:
    """Parts of all time, which add up to 1.

    useful: work that is kept. saving: checkpoints. repeated: work, and a part of a checkpoint, that a failure destroys.
    restarting: from a failure to the next step. waiting: for a repair, without a spare node.
    """

    useful: float
    saving: float
    repeated: float
    restarting: float
    waiting: float


@dataclass(frozen=True)
class Goodput:
    """The best interval of checkpoints and the shares of time under it.

    mtbf_s, save_s, restart_s, repair_s: see Interruptions. interval_s: of work between checkpoints; interval_steps: the
    same in whole steps, None without a predicted step. nodes: that train.
    """

    mtbf_s: float
    checkpoint_bytes: int
    save_s: float
    restart_s: float
    repair_s: float
    interval_s: float
    interval_steps: int | None
    shares: Shares
    nodes: int
    spares: int


def goodput(plan: Plan, config: Config, step_s: float | None) -> Goodput | None:
    """Return the Goodput of a plan; None if the failures or the storage are not given. step_s: of a predicted step."""
    if config.mtbf_gpu_hours is None or config.checkpoint_gb_s is None:
        return None
    saved = checkpoint_bytes(plan)
    save_s = saved / (config.checkpoint_gb_s * 1e9)
    restart_s = (RESTART_S if config.restart_s is None else config.restart_s) + save_s
    repair_s = (REPAIR_HOURS if config.repair_hours is None else config.repair_hours) * HOUR
    mtbf_s = config.mtbf_gpu_hours * HOUR / plan.world
    spares = spare_nodes(repair_s / mtbf_s)
    interval_s, steps = daly_s(mtbf_s, save_s), None
    if step_s:
        steps = max(1, round(interval_s / step_s))
        interval_s = steps * step_s
    nodes = -(-plan.world // ranks_per_node(config.cluster, plan.world))
    shares = simulate(Interruptions(mtbf_s, save_s, restart_s, repair_s, spares), interval_s)
    return Goodput(mtbf_s, saved, save_s, restart_s, repair_s, interval_s, steps, shares, nodes, spares)


def daly_s(mtbf_s: float, save_s: float) -> float:
    """Return the interval of checkpoints with the largest useful share (Daly 2006): to first order sqrt(2 save_s
    mtbf_s), and mtbf_s if a checkpoint takes twice that."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def spare_nodes(mean: float) -> int:
    """Return how many nodes are enough for the failures of one repair time, of which there are `mean` on average.

    As many as are in repair at any moment with that probability: their number has a Poisson distribution.
    """
    if not mean:
        return 0
    number = max(0, floor(mean - 10 * sqrt(mean)))  # fewer are as good as impossible
    covered = 0.0
    while (covered := covered + exp(number * log(mean) - mean - lgamma(number + 1))) < CONFIDENCE:
        number += 1
    return number


@cache
def _operating_times(number: int) -> tuple[float, ...]:
    """Times from one failure to the next, over their mean, in random order: the quantiles of an exponential
    distribution, so that few of them already have its mean and its spread."""
    import random  # slow to import, and few plans need it

    times = [-log(1 - (index + 0.5) / number) for index in range(number)]
    random.Random(SEED).shuffle(times)
    return tuple(times)


def simulate(case: Interruptions, interval_s: float, times: Sequence[float] | None = None) -> Shares:
    """Follow a training that saves after every `interval_s` seconds of work through NUM_FAILURES failures.

    times: of operation from one failure to the next, over mtbf_s; None: exponentially distributed. A restart may fail,
    too. Every failure takes a node to repair; while as many as there are spares are in repair, the training waits.
    """
    period, restart, spares = interval_s + case.save_s, case.restart_s, case.spares
    back: deque[float] = deque()  # when each node in repair is ready
    clock = saves = repeated = restarting = waiting = 0.0
    for time in _operating_times(NUM_FAILURES) if times is None else times:
        operated = time * case.mtbf_s
        clock += operated
        running = operated - restart
        if running <= 0:
            restarting += operated
        else:
            restarting += restart
            complete = running // period
            rest = running - complete * period
            saves += complete
            repeated += rest
        back.append(clock + case.repair_s)
        while back and back[0] <= clock:
            back.popleft()
        if len(back) > spares:
            ready = back.popleft()
            waiting += ready - clock
            clock = ready
    useful = saves * interval_s
    return Shares(*(part / clock for part in (useful, saves * case.save_s, repeated, restarting, waiting)))
