"""Exact shares: how many samples of each part of a mixture the global batches so far have, for any step at once.

After n batches of B samples, a part of weight w has had floor(w n B) or ceil(w n B) samples: its count differs from its
share by less than one, and never falls. In each batch a part first gets what it needs to reach the floor. The rest
goes, one each, to the parts below their ceiling whose next sample is due in the earliest batch, and of those to the
largest remainders. Sample j of a part is due in the batch in which w n B reaches j: these are the windows of
proportionate progress (Baruah et al. 1996), for which a schedule always exists, and for jobs of one slot the earliest
due date finds one. By the largest remainders alone, one in ten random mixtures leaves a share by one or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

BLOCK = 64  # batches between two states that are kept
Counts = tuple[int, ...]


def whole_weights(weights: Sequence[Fraction]) -> Counts:
    """The same shares as whole numbers without a common divisor."""
    scale = lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    divisor = gcd(*numbers)
    return tuple(number // divisor for number in numbers)


@lru_cache(maxsize=256)
def counts_after(weights: Counts, batch: int, num_batches: int) -> Counts:
    """The samples of each part in the first `num_batches` global batches.

    The time is at most that of the batches since the shares last were whole numbers of samples, once for a run.
    """
    total = sum(weights)
    period = total // gcd(total, batch)  # after so many batches every share is a whole number
    num_periods, rest = divmod(num_batches, period)
    number, left = divmod(rest, BLOCK)
    states = _states(weights, batch)
    while number not in states:  # filled in order; another thread may do the same, with the same results
        last = len(states) - 1
        states[last + 1] = _advance(weights, batch, last * BLOCK, states[last], BLOCK)
    counts = _advance(weights, batch, number * BLOCK, states[number], left)
    return tuple(count + num_periods * period * batch * weight // total for count, weight in zip(counts, weights))


@lru_cache(maxsize=16)
def _states(weights: Counts, batch: int) -> dict[int, Counts]:
    return {0: (0,) * len(weights)}


def _advance(weights: Counts, batch: int, done: int, counts: Counts, num_batches: int) -> Counts:
    """The counts `num_batches` after those of the batch number `done`."""
    total = sum(weights)
    for number in range(done + 1, done + num_batches + 1):
        samples = number * batch
        now = [max(count, weight * samples // total) for count, weight in zip(counts, weights)]
        behind = [part for part, weight in enumerate(weights) if now[part] * total < weight * samples]
        due = {part: -(-(now[part] + 1) * total // (weights[part] * batch)) for part in behind}
        behind.sort(key=lambda part: (due[part], now[part] * total - weights[part] * samples))
        for part in behind[: samples - sum(now)]:
            now[part] += 1
        counts = tuple(now)
    return counts
