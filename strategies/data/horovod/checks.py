"""The settings that Horovod refuses too, and the completion of process sets."""

from __future__ import annotations

import json
from collections.abc import Sequence

from parallelrun.base.errors import Problem
from parallelrun.base.wording import either, nearest
from parallelrun.planner.contract.request import Request

from ..common.allreduce.algorithm import NativeAllReduce
from ..common.allreduce.plan import ALGORITHMS
from ..common.compression.plan import requested_compression
from ..common.keys import HorovodConfig

ADASUM = "adasum"
MOST_NAMED = 8


def check_horovod(request: Request) -> list[Problem]:
    """Return the violations of process sets, join and Adasum."""
    data = HorovodConfig.of(request.config)
    checks = [_check_sets, _check_batches]
    checks += [_check_adasum] if data.reduction == ADASUM else []
    problems = [problem for check in checks for problem in check(request)]
    return problems or (_check_experts(request) if request.ep_replicas > 1 else [])


def complete_sets(sets: Sequence[Sequence[int]], dp: int, span: int) -> tuple[tuple[int, ...], ...]:
    """Return `sets` and one for each worker (`span` coordinates of dp) that is in none of them; () without sets.

    As in Horovod: a DistributedOptimizer reduces gradients only on members of its process set, so that every other
    worker steps by its own gradients.
    """
    if not sets:
        return ()
    members = {worker for group in sets for worker in group}
    alone = (tuple(range(first, first + span)) for first in range(0, dp, span) if first not in members)
    return (*map(tuple, sets), *alone)


def filled(request: Request) -> tuple[str, ...]:
    """Return a sentence on the workers that are in no process set."""
    sets, span = HorovodConfig.of(request.config).process_sets, request.ep_replicas
    others = complete_sets(sets, request.dp, span)[len(sets) :]
    alone = [f"{group[0]} to {group[-1]}" if span > 1 else f"{group[0]}" for group in others]
    noun = "worker" if span == 1 else "ep group"
    if not alone:
        return ()
    if len(alone) == 1:
        return (f"{noun} {alone[0]} trains alone (filled: it is in no process set)",)
    shown = ", ".join([*alone[:MOST_NAMED], *(["..."] if len(alone) > MOST_NAMED else [])])
    return (f"{noun}s {shown} train alone, each by itself (filled: they are in no process set)",)


def _check_sets(request: Request) -> list[Problem]:
    sets, where = HorovodConfig.of(request.config).process_sets, "strategy.data.process_sets"
    workers = [worker for members in sets for worker in members]
    twice = [worker for worker in workers if workers.count(worker) > 1]
    unknown = [worker for worker in workers if not 0 <= worker < request.dp]
    messages = []
    if twice:
        messages.append(f"worker {min(twice)} is in several sets, and a worker averages in one")
    if unknown:
        messages.append(f"there is no worker {min(unknown)}: the {request.dp} workers are 0 to {request.dp - 1}")
    if not all(sets):
        messages.append("a set has no workers")
    legal, seen = [], set()
    for members in sets:
        first = [worker for worker in dict.fromkeys(members) if 0 <= worker < request.dp and worker not in seen]
        seen.update(first)
        legal += [first] if first else []
    fix = f"{where}={_text(legal)}"
    return [Problem(f"{where}={_text(sets)}: {message}", where, fix, kind="arithmetic") for message in messages]


def _check_batches(request: Request) -> list[Problem]:
    config = request.config
    data, where = HorovodConfig.of(config), "strategy.data.worker_batches"
    batches = data.worker_batches
    if not batches:
        return []
    of_verb = {"verify": config.verify.steps, "bench": config.bench.warmup + config.bench.steps}
    steps = of_verb.get(config.verb, config.steps)
    steps_key = f"{config.verb}.steps" if config.verb in of_verb else "steps"
    if len(batches) != request.dp or min(batches) < 0:
        legal = (list(map(abs, batches)) + [max(batches)] * request.dp)[: request.dp]
        if max(legal) < steps:  # at least one worker needs a batch for every step
            legal[-1] = steps
        message = f"{where}={_text(batches)}: give one number of batches for each of the {request.dp} workers"
        return [Problem(message, where, f"{where}={_text(legal)}", kind="arithmetic")]
    problems = []
    if steps > max(batches):
        message = f"{where}={_text(batches)}: nobody has a batch for step {max(batches) + 1} of {steps}"
        problems.append(Problem(message, where, f"{steps_key}={max(batches)}", kind="arithmetic"))
    if data.reduction == ADASUM or data.process_sets:
        other = "adasum" if data.reduction == ADASUM else "process sets"
        message = f"join is not defined with {other}, as in Horovod"
        problems.append(Problem(message, where, f"leave {where} out", kind="undefined"))
    return problems


def _check_adasum(request: Request) -> list[Problem]:
    data, problems = HorovodConfig.of(request.config), []
    span = request.ep_replicas
    sizes = {len(members) // span for members in data.process_sets} or {request.dp // span}
    for size in sorted(size for size in sizes if size & (size - 1)):
        powers = [2**n for n in range(size.bit_length() + 1)]
        dp = [span * number for number in nearest(size, powers)]
        fix = either("dp", dp) if not data.process_sets else "strategy.data.reduction=average"
        message = f"adasum combines workers in pairs: {size} is no power of two"
        problems.append(Problem(message, "strategy.data.reduction", fix, kind="arithmetic"))
    if not requested_compression(request.config).elementwise:
        message = "powersgd compresses sums of gradients, and adasum computes none"
        fix = "strategy.data.compression=fp16"
        problems.append(Problem(message, "strategy.data.compression", fix, kind="undefined"))
    if ALGORITHMS.get(data.algorithm or NativeAllReduce.name) is not NativeAllReduce:
        message = f"strategy.data.algorithm={data.algorithm} is not read with adasum, which has its own exchange"
        problems.append(Problem(message, "strategy.data.algorithm", "leave it out", kind="unread"))
    return problems


def _check_experts(request: Request) -> list[Problem]:
    """Workers that hold the experts of one model between them send each other tokens in every step."""
    data, span, problems = HorovodConfig.of(request.config), request.ep_replicas, []
    groups = [range(first, first + span) for first in range(0, request.dp, span)]

    def problem(key: str, group: range, why: str, legal: Sequence[object]) -> Problem:
        message = f"ep={request.ep}: workers {group[0]} to {group[-1]} hold the experts of one model, so {why}"
        where = f"strategy.data.{key}"
        return Problem(message, where, f"{where}={_text(legal)} or ep=1", kind="undefined")

    cut = [group for members in data.process_sets for group in groups if 0 < len({*group} & {*members}) < span]
    if cut:
        why, left, legal = "a process set has all of them or none", list(groups), []
        for members in data.process_sets:
            own = [group for group in left if {*group} & {*members}]
            left = [group for group in left if group not in own]
            legal += [[worker for group in own for worker in group]] if own else []
        problems.append(problem("process_sets", cut[0], why, legal))
    batches = data.worker_batches
    uneven = [group for group in groups if len({batches[worker] for worker in group}) > 1] if batches else []
    if uneven:
        equal = [max(batches[worker] for worker in group) for group in groups for _ in group]
        problems.append(problem("worker_batches", uneven[0], "they join in the same step", equal))
    return problems


def _text(value: Sequence[object]) -> str:
    return json.dumps(value, separators=(",", ":"))
