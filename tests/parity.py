"""Proof of a plan inside tests: the same training as on one device, by the same code as `parallelrun verify`, and what
it sends as the plan predicts.

The one-device reference is computed once per setting in the test process and read by rank 0 of every cell.
"""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import shared_memory, torch_private
from parallelrun.distributed.comm import gather_json
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.models.network import compile_blocks
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop import build as train_build
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import StepResult, train_step
from parallelrun.training.verify.checked import checked_config
from parallelrun.training.verify.checked import single_device as single_device
from parallelrun.training.verify.replay import record_replay
from parallelrun.training.verify.run import judge, plan_trace, reference_trace
from parallelrun.training.verify.trace import decisions_are_held, record
from tests.matrix import FULL
from tests.mutants import plant
from tests.plans import tiny_config
from tests.pool import BACKEND, COMPILER, TRANSFORMERS, run_ranks
from tests.scratch import scratch

_PLACEMENT = (
    "dp", "cp", "tp", "pp", "ep", "layout", "grid", "depth", "schedule", "virtual_stages", "microbatches",
    "micro_batch", "recompute", "compile", "loss_chunks",
)  # fmt: skip


def parity(
    overrides: dict[str, Any],
    mutant: str | None = None,
    timeout: float = 60.0,
    fault: Callable[[Training], None] | None = None,
    backend: str = BACKEND,
    hosts: str = "",
) -> dict[str, Any]:
    """The verdict (verify.json's document) of one plan.

    mutant: a function of `tests.mutants`, called on every rank. fault: plants a bug in what has been built, before the
    first step. hosts: a letter for the pretended host of each rank.
    """
    config = checked_config(tiny_config(overrides))
    plan = resolve(config)
    if smaller := _smaller(config, plan, overrides):
        overrides = {**overrides, **smaller}
        config = checked_config(tiny_config(overrides))
        plan = plan if smaller.keys() == {"verify.steps"} else resolve(config)
    replayed = plan.equivalence.kind == "replay"
    settings = repr(sorted(overrides.items()) if replayed else _settings(overrides))
    reference = "" if decisions_are_held(config, plan) else str(_reference(settings))
    cell = (overrides, plan, reference, mutant, fault, hosts)
    imports = COMPILER if config.compile else TRANSFORMERS if config.model.name == "hf" else ()
    return run_ranks(plan.world, _cell, *cell, timeout=timeout, backend=backend, fresh=bool(hosts), imports=imports)[0]


def _smaller(config: Config, plan: Plan, overrides: dict[str, Any]) -> dict[str, Any]:
    """Sizes that prove as much in less time, where the test has not chosen its own: a layer for each of at most two
    stages, two microbatches a stage, which pass through every phase of a schedule, and one step.

    What the step has updated is compared, and the validation loss is computed with it. A second step also shows what
    the first has left behind: weights gathered or rounded before the update, buffers, counts, masks by step. So two
    (`tests.matrix.TWO_STEPS`) are taken where that is the subject: each strategy, layout and schedule in its own file,
    and routers with a bias. Rules that are replayed keep something, too; if replicas meet seldom or leave, in later
    steps than the second.
    """
    smaller, stages = {}, plan.mesh.size("pp")
    replayed, is_late = plan.equivalence.kind == "replay", plan.data.independent or config.strategy.data.worker_batches
    if not FULL and "verify.steps" not in overrides and not (replayed and is_late):
        smaller["verify.steps"] = 2 if replayed else 1
    if config.model.name in ("gpt", "bert", "mlp") and "model.layers" not in overrides and len(plan.stages) <= 2:
        smaller["model.layers"] = 2
    is_free = "microbatches" not in overrides and "micro_batch" not in overrides
    if is_free and plan.batch.microbatches > 2 * stages > 2 and plan.batch.replica_batch % (2 * stages) == 0:
        smaller["microbatches"] = 2 * stages
    return smaller


def assert_equal(document: dict[str, Any]) -> None:
    """Fail with the worst of each kind if the verdict is not `passed`, or if something was sent but not predicted."""
    assert document["passed"], f"{document['max_error']} in {document['worst']}; {document['copies_that_disagree']}"
    assert not document["surprises"], "\n".join(sorted(document["surprises"]))


def _settings(overrides: dict[str, Any]) -> list[tuple[str, Any]]:
    """The overrides that change the one-device training."""
    return sorted((k, v) for k, v in overrides.items() if k not in _PLACEMENT and not k.startswith("strategy."))


@cache
def _reference(settings: str) -> Path:
    """The trace that a cell is compared with; of a way that is replayed, `settings` are all of the cell's overrides."""
    config = checked_config(tiny_config(dict(ast.literal_eval(settings))))
    plan, cpu = resolve(config), torch.device("cpu")
    if plan.equivalence.kind == "replay":
        trace = record_replay(config, plan, cpu)
    else:
        alone, plan = single_device(config, plan)
        trace = record(build(alone, plan, cpu), config.verify.steps)
    path = scratch("parallelrun-parity-") / f"{abs(hash(settings)):x}.pickle"
    with open(path, "wb") as file:
        _Pickler(file).dump(trace)
    return path


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays, which are read in a tenth of the time."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def _cell(
    overrides: dict[str, Any],
    plan: Plan,
    reference: str,
    mutant: str | None,
    fault: Callable[[Training], None] | None,
    hosts: str,
) -> dict[str, Any] | None:
    """One rank of one cell; rank 0 returns the verdict. plan: of overrides, which takes long to find for a module."""
    torch.set_num_threads(1)
    if hosts:
        _move_to(hosts)
    config: Config = checked_config(tiny_config(overrides))
    if mutant:
        plant(mutant)
    if config.compile:  # what the compiler makes graphs of, without its code generation, which takes minutes
        train_build.compile_blocks = partial(compile_blocks, backend="aot_eager" if FULL else "eager")
    training = build(config, plan, torch.device("cpu"))
    if fault:
        fault(training)
    with _counted_step(training) as counter:
        trace = plan_trace(config, plan, training)
    surprises = (
        []
        if mutant or fault
        else [text for texts in gather_json(unforetold(training, counter), training.mesh) for text in texts]
    )
    if plan.world > 1 and dist.get_rank() != 0:
        return None
    if decisions_are_held(config, plan):  # the reference follows this cell's decisions
        against = reference_trace(config, plan, torch.device("cpu"), trace)
    else:
        against = pickle.loads(Path(reference).read_bytes())
    document = judge(trace, against, config, plan)
    return {**document, "surprises": surprises}


def _move_to(hosts: str) -> None:
    """Make the process group of the world anew, with the ranks on pretended hosts."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), torch_private.default_store()
    os.environ[shared_memory.HOST_VARIABLE] = hosts[rank]
    dist.destroy_process_group()
    dist.init_process_group(
        shared_memory.BACKEND, store=dist.PrefixStore("on hosts", store), rank=rank, world_size=world
    )
    assert shared_memory.carrier(dist.group.WORLD) == "gloo"


@contextmanager
def _counted_step(training: Training) -> Iterator[CommunicationCounter]:
    """Count what the last verified step sends, or a further step if the data strategy does not send everything in that
    one.

    What the verdict itself gathers is not counted.
    """
    last, counter = training.config.verify.steps, CommunicationCounter(training.mesh)
    full = training.plan.data.full_step(last)

    def counted(training: Training, step: int, *args: Any, observe: Any = None, **more: Any) -> StepResult:
        def uncounted(seen: Training) -> None:
            counter.__exit__(None, None, None)
            observe(seen)
            counter.__enter__()

        if step != full:
            return train_step(training, step, *args, observe=observe, **more)
        with counter:
            return train_step(training, step, *args, observe=observe and uncounted, **more)

    with mock.patch("parallelrun.training.verify.trace.train_step", counted):
        yield counter
    if full != last:
        counted(training, full, 0.0, LossScaler(training.config.precision, scaled=False))


def unforetold(training: Training, counter: CommunicationCounter) -> list[str]:
    """Where what this rank sends in a steady step differs from the plan's prediction, in calls or to the byte (beyond
    the bound, where bytes depend on the data). Of a first step, what torch's stages tell each other is left out."""
    plan, mesh = training.plan, training.mesh
    counted = {_key(row): row for row in counter.rows()}
    if plan.data.full_step(training.config.verify.steps) == 1:
        for operation in ("send", "recv"):
            counted.pop(("pp", operation, "engine"), None)
    said = {_key(row): row for row in prediction.collectives(plan, mesh.rank)}
    agreed = {key for key, row in counted.items() if key in said and said[key].allows(row.calls, row.payload_bytes)}
    return [f"rank {mesh.rank} sent {row}" for key, row in counted.items() if key not in agreed] + [
        f"rank {mesh.rank} was to send {row}" for key, row in said.items() if key not in agreed
    ]


def _key(row: Collective) -> tuple[str, str, str]:
    return row.axis, row.operation, row.purpose
