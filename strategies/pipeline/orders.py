"""Schedules as lists of actions: the order in which every pp rank computes.

Each function takes a pp rank, pp, the virtual stages of a rank and the number of microbatches. It returns the order of
that rank in the schedule of the same name in torch.distributed.pipelining; a test compares the two. Action F is a
forward, B a full backward, I a backward for inputs only, W for weights only. On stage 0 torch defers the whole backward
to W (no input gradient is sent), so I costs nothing there.

Sources: GPipe (Huang 2019, section 2); 1F1B and interleaving (Narayanan 2021, section 2.2); ZB1P and ZB-V (Qi 2023,
sections 3 and 6); DualPipeV (DeepSeek-AI 2024, section 3.2.1, and its repository DualPipe).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain

from parallelrun.planner.contract.pipeline_schedule import Action

Order = tuple[Action, ...]  # of one pp rank
Orders = tuple[Order, ...]
_new = tuple.__new__  # an Action in half the time: a search lists millions
RankOrder = Callable[[int, int, int, int], Order]


def accumulation(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """One stage: forward and backward of one microbatch after the other."""
    return tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in "FB")


def gpipe(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """All forwards, then all backwards in the same order."""
    return tuple(Action(kind, rank, m) for kind in "FB" for m in range(num_microbatches))


def one_f_one_b(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """Rank r starts with pp - 1 - r forwards, then goes on one forward, one backward, and drains."""
    return _looped(rank, pp, 1, num_microbatches, warmup=pp - 1 - rank)


def num_rounds(pp: int, num_microbatches: int) -> int:
    """Rounds of an interleaved schedule; it must divide the number of microbatches."""
    return max(1, num_microbatches // pp)


def num_warmup(pp: int, virtual_stages: int, num_microbatches: int, skew: int) -> int:
    """Forwards of a pp rank before its first backward; skew: those beside the rounds of the other virtual stages."""
    per_round = num_microbatches // num_rounds(pp, num_microbatches)
    return min((virtual_stages - 1) * per_round + skew + 1, virtual_stages * num_microbatches)


def interleaved(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """1F1B over looped stages: a round of microbatches passes all virtual stages before the next round."""
    per_round = num_microbatches // num_rounds(pp, num_microbatches)
    warmup = (virtual_stages - 1) * per_round + 2 * (pp - 1 - rank)
    return _looped(rank, pp, virtual_stages, num_microbatches, warmup)


def zero_bubble(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """ZB1P: as interleaved with half the warm-up; rank r keeps its weight passes r backwards behind."""
    per_round = num_microbatches // num_rounds(pp, num_microbatches)
    warmup = (virtual_stages - 1) * per_round + pp - 1 - rank
    return _split_backward(_looped(rank, pp, virtual_stages, num_microbatches, warmup), lag=rank)


def zbv(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """ZB-V: two virtual stages in a V, for at least 2 pp - 1 microbatches; the order omits those that do not exist."""
    down, up, number = rank, 2 * pp - 1 - rank, max(2 * pp - 1, num_microbatches)
    ahead = 2 * pp - 1 - rank  # forwards of the way down before the steady phase
    kinds = [("F", down)] * (2 * (pp - rank) - 1)
    kinds += [("F", up), ("F", down)] * rank
    kinds += [("F", up), ("I", up), ("W", up)] * (pp - rank)
    back = [("I", down), ("W", down), ("F", up), ("I", up), ("W", up)]
    kinds += [("F", down), *back] * (number - ahead) + back * (ahead - pp)
    kinds += [("I", down), ("I", up)] * rank
    kinds += [("I", down), ("W", down)] * (pp - rank)
    kinds += [("W", up)] * rank + [("W", down)] * rank
    return tuple(action for action in _numbered(kinds) if action.microbatch < num_microbatches)


def dualpipev(rank: int, pp: int, virtual_stages: int, num_microbatches: int, drains_split: bool = True) -> Order:
    """DualPipe cut in half; ZB-V for fewer than 2 pp microbatches. An F and the B behind it are a pair: each is on
    another virtual stage of the V, and waits for no result of the other. Backward is split before the pairs and, with
    drains_split, in the second half of what follows them."""
    if num_microbatches < 2 * pp:
        return zbv(rank, pp, virtual_stages, num_microbatches)
    down, up, later = rank, 2 * pp - 1 - rank, pp - 1 - rank
    kinds = [("F", down)] * (2 * later)
    kinds += [("F", down), ("F", up)] * (rank + 1)
    kinds += [("I", up), ("W", up), ("F", up)] * later
    kinds += [("F", down), ("B", up), ("F", up), ("B", down)] * (num_microbatches - 2 * pp + rank + 1)
    kinds += [("B", up), ("F", up), ("B", down)] * later
    draining = [up, down] * (rank + 1)
    whole = rank + 1 if drains_split else len(draining)
    kinds += [("B", stage) for stage in draining[:whole]] + [("I", stage) for stage in draining[whole:]]
    if not drains_split:
        return _numbered([*kinds, *[("B", down)] * later])
    late = [*draining[whole:], *[down] * later]  # stages of weight passes
    kinds += [action for stage in late[:later] for action in (("W", stage), ("I", down))]
    return _numbered([*kinds, *[("W", stage) for stage in late[later:]]])


def of_ranks(order: RankOrder, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
    """The order of every pp rank. order: one of the functions above."""
    return tuple(of_rank(order, rank, pp, virtual_stages, num_microbatches) for rank in range(pp))


@lru_cache(maxsize=256)
def of_rank(order: RankOrder, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Order:
    """The order of one pp rank, kept for the next time."""
    return order(rank, pp, virtual_stages, num_microbatches)


def _looped(rank: int, pp: int, virtual_stages: int, num_microbatches: int, warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards (stages in reverse)."""
    total = virtual_stages * num_microbatches
    warmup = min(warmup, total)
    per_round = num_microbatches // num_rounds(pp, num_microbatches) if virtual_stages > 1 else num_microbatches
    places = [  # of the number-th action: its chunk in forward order, its microbatch
        (number // per_round % virtual_stages, number // (per_round * virtual_stages) * per_round + number % per_round)
        for number in range(total)
    ]
    last = virtual_stages - 1
    forwards = [_new(Action, ("F", chunk * pp + rank, m)) for chunk, m in places]
    backwards = [_new(Action, ("B", (last - chunk) * pp + rank, m)) for chunk, m in places]
    steady = chain.from_iterable(zip(forwards[warmup:], backwards))
    return (*forwards[:warmup], *steady, *backwards[total - warmup :])


def _split_backward(order: Sequence[Action], lag: int) -> tuple[Action, ...]:
    """Replace each B by I, and let W follow `lag` backwards later."""
    split: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        kind, stage, microbatch = action
        if kind != "B":
            split.append(action)
            continue
        split.append(_new(Action, ("I", stage, microbatch)))
        waiting.append(_new(Action, ("W", stage, microbatch)))
        if len(waiting) > lag:
            split.append(waiting.popleft())
    return (*split, *waiting)


def _numbered(kinds: Iterable[tuple[str, int]]) -> Order:
    """Actions of these kinds and stages, each of its stage's next microbatch. A B counts as an I and a W."""
    numbers: Counter[tuple[str, int]] = Counter()
    order = []
    for kind, stage in kinds:
        passes = "IW" if kind == "B" else kind
        order.append(_new(Action, (kind, stage, numbers[passes[0], stage])))
        for each in passes:
            numbers[each, stage] += 1
    return tuple(order)


def forward_only(stages: Sequence[Sequence[int]], per_round: int, num_microbatches: int) -> Orders:
    """An order for evaluation: rounds of `per_round` microbatches through all stages of a rank. stages: by pp rank."""
    rounds = [range(start, min(start + per_round, num_microbatches)) for start in range(0, num_microbatches, per_round)]
    return tuple(tuple(Action("F", stage, m) for some in rounds for stage in own for m in some) for own in stages)
