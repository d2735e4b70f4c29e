"""Plants wrong bits in one rank of a real training, and says what the run made of them. Test tools, not product code.

A fault is a flipped bit, several of them, or a stuck lane (one of 16, in which a bit keeps a value from then on), in
weights, in gradients or in activations. `run` trains on the ranks of the warm pool, through the loop of a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import CorruptionError, NumericsError
from parallelrun.report.records.find import EVENTS
from parallelrun.training.corruption.digests import digests
from parallelrun.training.corruption.state import state_of, weights_at_rest
from parallelrun.training.loop import training_loop
from parallelrun.training.loop.build import Training, build
from parallelrun.training.metrics import first_steps
from parallelrun.training.metrics.recorder import Recorder
from tests.plans import tiny_config, tiny_plan

FLIP, SEVERAL, STUCK = "flip", "several", "stuck"
WEIGHTS, GRADIENTS, SUMS, ACTIVATIONS = "weights", "gradients", "sums", "activations"
LANES = 16
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fault:
    """kind: flip, several, stuck; place: weights (at rest), gradients (of a module's output, in backward), sums (final
    gradients of the rank), activations (a module's output); step: of the first wrong bit; seed: of all other choices;
    bit: of a word, None: any.
    """

    kind: str
    place: str
    rank: int
    step: int
    seed: int
    bit: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run did. planted: the steps in which bits were changed; events: rows of events.jsonl; losses: by step in
    metrics.jsonl; state: digests of weights and optimizer state at the end; error: how it ended early, if it did."""

    planted: list[int]
    events: list[dict[str, Any]]
    losses: dict[int, float]
    state: dict[str, int]
    error: str = ""


class Bits:
    """Changes bits of tensors as a fault says. wrong: the number of calls that have changed something."""

    def __init__(self, fault: Fault):
        self._fault, self._random = fault, random.Random(fault.seed)
        self._stuck: tuple[int, int, int] | None = None  # lane, bit, value
        self.wrong = 0

    def change(self, tensor: Tensor) -> None:
        """Change bits of `tensor` in place."""
        assert tensor.is_contiguous()
        words = tensor.detach().view(-1).view(_WORDS[tensor.element_size()])
        bits = 8 * tensor.element_size()
        before = words.clone()
        if self._fault.kind == STUCK:
            self._hold(words, bits)
        else:
            for _ in range(1 if self._fault.kind == FLIP else self._random.randint(2, 8)):
                index = self._random.randrange(words.numel())
                bit = self._random.randrange(bits) if self._fault.bit is None else self._fault.bit
                words[index] ^= _bit(bit, bits)
        self.wrong += not torch.equal(before, words)

    def _hold(self, words: Tensor, bits: int) -> None:
        """Give one bit of every element of a lane its stuck value: not the one that it has first."""
        if self._stuck is None:
            lane, bit = self._random.randrange(min(LANES, words.numel())), self._random.randrange(bits)
            self._stuck = lane, bit, int(not (int(words[lane]) >> bit) & 1)
        lane, bit, value = self._stuck
        mask = _bit(bit, bits)
        if value:
            words[lane::LANES] |= mask
        else:
            words[lane::LANES] &= ~mask


def _bit(number: int, bits: int) -> int:
    return 1 << number if number < bits - 1 else -(1 << number)


class Planted:
    """A fault in a training of this rank. `step` is told by the loop's heartbeats."""

    def __init__(self, fault: Fault, training: Training):
        self.fault, self.bits = fault, Bits(fault)
        self.steps: list[int] = []
        self._step, self._seen, self._done = 0, 0, False
        self._random = random.Random(fault.seed + 1)
        self._call = self._random.randrange(2)  # a step may call a module twice: which call gets the flip
        {
            WEIGHTS: self._at_rest,
            GRADIENTS: self._in_modules,
            ACTIVATIONS: self._in_modules,
            SUMS: self._in_sums,
        }[fault.place](training)

    def heartbeat(self, step: int, phase: str) -> None:
        self._step = step

    def _now(self) -> bool:
        """Whether the fault acts in this call."""
        if self.fault.kind == STUCK:
            return self._step >= self.fault.step
        if self._done or self._step != self.fault.step:
            return False
        self._seen += 1
        self._done = self._seen > self._call
        return self._done

    def _change(self, tensor: Tensor) -> None:
        before = self.bits.wrong
        self.bits.change(tensor)
        if self.bits.wrong > before:
            self.steps.append(self._step)

    def _at_rest(self, training: Training) -> None:
        """Tensors change in memory, while a step computes its forward or backward pass."""
        self._call = 0
        at_rest = weights_at_rest(training)
        name = self._random.choice([name for name, tensor in at_rest.items() if tensor.numel()])
        run = training.runner.train
        late = self._random.random() < 0.5

        def train(*given: Any) -> Tensor:
            if not late and self._now():
                self._change(at_rest[name])
            loss = run(*given)
            if late and self._now():
                self._change(at_rest[name])
            return loss

        training.runner.train = train  # type: ignore[method-assign, assignment]

    def _in_sums(self, training: Training) -> None:
        finish = training.data.finish_gradients
        parameter = self._random.choice([one for one in training.parameters if one.tensor.numel()])

        def finish_gradients() -> None:
            finish()
            gradient = parameter.tensor.grad
            if gradient is not None and self._now():
                self._change(gradient)

        training.data.finish_gradients = finish_gradients  # type: ignore[method-assign]

    def _in_modules(self, training: Training) -> None:
        """The module is one of those that are called: some only hold weights of another."""
        self._called: list[nn.Module] = []
        self._module: nn.Module | None = None
        for part in training.model_parts:
            for module in part.modules():
                module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or not torch.is_grad_enabled():
            return output
        if self._step < self.fault.step:
            self._called += [module] * (module not in self._called)
            return output
        self._module = self._module or self._random.choice(self._called)
        if module is not self._module:
            return output
        if self.fault.place == ACTIVATIONS:
            if not self._now():
                return output
            changed = output.detach().clone(memory_format=torch.contiguous_format)
            self._change(changed)
            return _Replaced.apply(output, changed)  # type: ignore[no-untyped-call]
        if output.requires_grad:
            output.register_hook(self._in_backward)
        return output

    def _in_backward(self, gradient: Tensor) -> Tensor:
        if not self._now():
            return gradient
        changed = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._change(changed)
        return changed


class _Replaced(torch.autograd.Function):
    """Gives other values, and passes gradients on as they are."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def run(overrides: dict[str, Any], fault: Fault | None, directory: Path) -> Outcome:
    """Train as this rank; a body of `run_ranks`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    training = build(tiny_config(overrides), tiny_plan(overrides), torch.device("cpu"))
    planted = Planted(fault, training) if fault is not None and fault.rank == rank else None
    beat: Callable[[int, str], None] = planted.heartbeat if planted else lambda step, phase: None
    context = WorkerContext(
        rank=rank, world=training.plan.world, local_rank=rank, device=torch.device("cpu"), directory=directory,
        heartbeat=beat, stop_requested=lambda: False, save_failed=lambda step: None, console_owner=False,
    )  # fmt: skip
    error = ""
    try:
        training_loop.train(training, context, Recorder(training, context))
    except (CorruptionError, NumericsError) as found:
        error = f"{type(found).__name__}{' elsewhere' if found.of_another_rank else ''}: {found}"
    finally:
        training.close()
    state = {name: int(digests([tensor])) for name, tensor in state_of(training).items()}
    steps = planted.steps if planted else []
    return Outcome(steps, _rows(directory / EVENTS), _losses(directory), state, error)


def run_all(cases: list[Case], directory: Path) -> list[Outcome]:
    """`run` several cases one after another, as this rank; a body of `run_ranks`."""
    outcomes = []
    for number, case in enumerate(cases):
        folder = directory / str(number)
        folder.mkdir(exist_ok=True)
        # The cases share a store, in which a case must not read what another has written about its first steps.
        with mock.patch.object(first_steps, "_key", partial("collectives/{}/{}/{}".format, number)):
            outcomes.append(run(case.all_overrides, case.fault, folder))
    return outcomes


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _losses(directory: Path) -> dict[int, float]:
    rows = _rows(directory / "metrics.jsonl")
    assert len({row["step"] for row in rows}) == len(rows), "a step has two rows"
    return {row["step"]: row["loss"] for row in rows}


@dataclass(frozen=True)
class Case:
    """A run with a fault. overrides: of the tiny configuration."""

    plan: str
    overrides: dict[str, Any]
    fault: Fault
    every: int
    recompute: bool

    @property
    def all_overrides(self) -> dict[str, Any]:
        return {**BASE, **self.overrides, "sdc.every": self.every, "sdc.recompute": self.recompute}


@dataclass(frozen=True)
class Result:
    """acted: bits were changed, with an effect; found: in the check that was due; named: exactly the right rank.

    ended: a passing fault was undone without a trace, a lasting one has ended the run with an error of its rank.
    """

    acted: bool
    found: bool
    named: bool
    ended: bool

    @property
    def is_right(self) -> bool:
        return self.found and self.named and self.ended


BASE: dict[str, Any] = {
    "model.layers": 2, "model.hidden": 32, "steps": 8, "eval.every": 0, "eval.batches": 1, "checkpoint.last": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"model.experts": 4, "model.expert_period": 2}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"dp": 2},
    "powersgd": {"dp": 2, "strategy.data.compression": "powersgd"},
    "ring": {"dp": 3, "global_batch": 6, "strategy.data.kind": "ring"},
    "zero1": {"dp": 2, "strategy.data.kind": "zero1"},
    "zero2": {"dp": 2, "strategy.data.kind": "zero2"},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "tp": {"tp": 2},
    "tp2d": {"tp": 4, "strategy.tensor.kind": "2d"},
    "ptdp": {"dp": 2, "pp": 2},
    "gshard": {"dp": 2, "ep": 2, **EXPERTS},
    "dropless": {"dp": 2, "ep": 2, **EXPERTS, "strategy.expert.kind": "dropless"},
    "context": {"cp": 2},
    "tp25d": {"tp": 8, "strategy.tensor.kind": "2.5d", "strategy.tensor.grid": "2x2", "strategy.tensor.depth": 2},
    "tp3d": {"tp": 8, "strategy.tensor.kind": "3d"},
    "local_sgd": {"dp": 2, "strategy.data.kind": "local_sgd", "strategy.data.sync_every": 3},
    "diloco": {"dp": 2, "strategy.data.kind": "diloco", "strategy.data.sync_every": 3},
    "horovod": {"dp": 2, "strategy.data.kind": "horovod"},
    "adasum": {"dp": 2, "strategy.data.kind": "horovod", "strategy.data.reduction": "adasum"},
}


def draw(seed: int, plans: list[str], kinds: tuple[str, ...] = (FLIP, SEVERAL, STUCK)) -> Case:
    """Return the case of a seed. A fault that passes is looked for in every step, by computing it twice; what lasts,
    and what leaves replicas that differ, every few steps."""
    choose = random.Random(seed)
    plan, kind = choose.choice(plans), choose.choice(kinds)
    overrides = PLANS[plan]
    world = tiny_plan({**BASE, **overrides}).world
    place = choose.choice((WEIGHTS, GRADIENTS, SUMS, ACTIVATIONS))
    fault = Fault(kind, place, choose.randrange(world), choose.randint(2, BASE["steps"] - 1), seed)
    passes = kind != STUCK and place != WEIGHTS
    alone = place == SUMS and plan in ("ddp", "ring", "horovod") and choose.random() < 0.5
    recompute = passes and not alone
    return Case(plan, overrides, fault, 1 if recompute else choose.choice((2, 3, 4)), recompute)


def judge(case: Case, clean: list[Outcome], ranks: list[Outcome]) -> Result:
    """Return what the run made of the fault. clean: of the same run without one."""
    fault, planted, events = case.fault, ranks[case.fault.rank].planted, ranks[0].events
    same = all(one.state == other.state and one.losses == other.losses for one, other in zip(clean, ranks))
    if not planted or (same and not events):
        return Result(False, False, False, False)
    found = bool(events) and 0 <= events[0]["step"] - planted[0] < case.every
    naming = [event["ranks"] for event in events if event["ranks"]]
    named = bool(naming) and all(ranks_named == [fault.rank] for ranks_named in naming)
    errors = [rank for rank, one in enumerate(ranks) if one.error and "elsewhere" not in one.error]
    if fault.kind == STUCK:
        return Result(True, found, named, errors == [fault.rank] and all(one.error for one in ranks))
    return Result(True, found, named, same and not errors)
