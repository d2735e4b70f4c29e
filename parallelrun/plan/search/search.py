"""`search`: every plan that the user has left open, priced; the fastest that fit. Torch-free."""

from __future__ import annotations

from collections import Counter

from parallelrun.config.schema import Config
from parallelrun.config.strategy_keys import completed, narrowed
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan import cluster_cost, prediction, resolve
from parallelrun.plan.search.result import Found, Removed, Search
from parallelrun.plan.search.space import Choice, Space
from parallelrun.plan.step_time.step import step_time, why_unknown
from parallelrun.plan.structure import Plan

MEMORY = "memory"


def search(
    config: Config,
    given: frozenset[str],
    world: int,
    keep: int = 3,
    *,
    against: float | None = None,
    gpus: int | None = None,
) -> Search:
    """Return the `keep` fastest plans on `world` ranks that fit, and what became of all others.

    config: composed, with the strategy that the user has chosen or the default one. given: the dotted keys that the
    user has set: they hold for all plans. against: seconds of a step of a plan to rank. gpus: GPUs of this host, as
    `resolve` takes it. Raises ConfigError where no plan can be listed: an unknown model or a bad value.
    """
    space = Space(config, given, world)
    problems: list[Problem] = []
    spec = resolve.spec_of(narrowed(space.base), problems)
    if spec is None:
        raise ConfigError(*problems)
    counts: Counter[str] = Counter()
    examples: dict[str, Problem] = {}
    priced: list[Found] = []
    for one in space.candidates(spec):
        plan = resolve.solve(completed(space.config(one)), given - {"schedule", "layout"}, None, gpus, True)
        if not isinstance(plan, Plan):
            rule = plan[0].where.rpartition(".")[2] or "configuration"
            counts[rule] += 1
            examples.setdefault(rule, plan[0])
            continue
        priced.append(_found(plan, space, one))
    fitting = [one for one in priced if one.fits == "yes" or not config.cluster.memory_gb]
    timed = sorted((one for one in fitting if one.time), key=_order)
    best = tuple(timed[:keep])
    unfit = [one for one in priced if one not in fitting]
    limit = best[0].time.step_s if best and best[0].time else float("inf")
    nearer = [one for one in unfit if one.time and one.time.step_s < limit]
    nearest = min(nearer, key=lambda one: one.heaviest_bytes, default=None)
    removed = [Removed(rule, count, examples[rule].what, examples[rule].suggestion) for rule, count in counts.items()]
    if unfit:
        lightest = min(unfit, key=lambda one: one.heaviest_bytes)
        removed.append(Removed(MEMORY, len(unfit), " ".join(lightest.overrides)))
    no_time = Counter(one.reason for one in priced if one.reason)
    firsts = {reason: next(one for one in priced if one.reason == reason) for reason in no_time}
    rank = None if against is None else 1 + sum(one.time.step_s < against for one in timed if one.time)
    return Search(
        world, space.global_batch, len(priced), len(fitting), best, nearest, tuple(firsts.values()), dict(no_time),
        tuple(sorted(removed, key=lambda one: -one.candidates)), rank,
    )  # fmt: skip


def _order(one: Found) -> tuple[float, int]:
    """The fastest first; of equally fast ones that which needs least memory."""
    assert one.time is not None
    return one.time.step_s, one.heaviest_bytes


def _found(plan: Plan, space: Space, one: Choice) -> Found:
    cluster = space.base.cluster
    memory = max(prediction.memories(plan, cluster).values(), key=lambda memory: memory.total)
    time = step_time(plan, cluster)
    return Found(
        space.overrides(one),
        time,
        memory.total,
        cluster_cost.fits(memory, cluster),
        time.tokens_per_s_per_gpu * plan.world if time else None,
        "" if time else why_unknown(plan, cluster),
    )
