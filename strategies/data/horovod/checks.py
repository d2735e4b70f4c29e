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
    checks += [_check_experts] if request.ep > 1 else []
    return [problem for check in checks for problem in check(request)]


def complete_sets(sets: Sequence[Sequence[int]], num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return `sets` and a set of one for each worker that is in none of them; () if there are no sets.

    As in Horovod: a DistributedOptimizer reduces gradients only on members of its process set, so that every other
    worker steps by its own gradients.
    """
    if not sets:
        return ()
    members = {worker for group in sets for worker in group}
    alone = ((worker,) for worker in range(num_workers) if worker not in members)
    return (*map(tuple, sets), *alone)


def filled(request: Request) -> tuple[str, ...]:
    """Return a sentence on the workers that are in no process set."""
    sets = HorovodConfig.of(request.config).process_sets
    alone = [str(members[0]) for members in complete_sets(sets, request.dp)[len(sets) :]]
    if not alone:
        return ()
    if len(alone) == 1:
        return (f"worker {alone[0]} trains alone (filled: it is in no process set)",)
    shown = ", ".join([*alone[:MOST_NAMED], *(["..."] if len(alone) > MOST_NAMED else [])])
    return (f"workers {shown} train alone, each by itself (filled: they are in no process set)",)


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
    sizes = {len(members) for members in data.process_sets} or {request.dp}
    for size in sorted(size for size in sizes if size & (size - 1)):
        powers = [2**n for n in range(size.bit_length() + 1)]
        fix = either("dp", nearest(size, powers)) if not data.process_sets else "strategy.data.reduction=average"
        message = f"adasum combines workers in pairs: {size} is no power of two"
        problems.append(Problem(message, "strategy.data.reduction", fix, kind="undefined"))
    if not requested_compression(request.config).elementwise:
        message = "powersgd compresses sums of gradients, and adasum computes none"
        fix = "strategy.data.compression=fp16"
        problems.append(Problem(message, "strategy.data.compression", fix, kind="undefined"))
    if ALGORITHMS.get(data.algorithm or NativeAllReduce.name) is not NativeAllReduce:
        message = f"strategy.data.algorithm={data.algorithm} is not read with adasum, which has its own exchange"
        problems.append(Problem(message, "strategy.data.algorithm", "leave it out", kind="unread"))
    return problems


def _check_experts(request: Request) -> list[Problem]:
    """Tokens go to experts on other workers in every step, so all workers must train one model in every step."""
    data, ep = HorovodConfig.of(request.config), request.ep
    settings = [
        (data.reduction == ADASUM, "reduction", "=average", "adasum steps every worker by its own gradient"),
        (bool(data.process_sets), "process_sets", "=[]", "each process set trains a model of its own"),
        (bool(data.worker_batches), "worker_batches", "=[]", "a worker that has joined takes no more steps"),
    ]
    return [
        Problem(
            f"ep={ep} sends tokens to other workers inside every step, and {why}",
            f"strategy.data.{key}",
            f"strategy.data.{key}{fix} or ep=1",
            kind="undefined",
        )
        for is_set, key, fix, why in settings
        if is_set
    ]


def _text(value: Sequence[object]) -> str:
    return json.dumps(value, separators=(",", ":"))
