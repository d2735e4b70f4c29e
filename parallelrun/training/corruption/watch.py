"""Looks for silent data corruption every `sdc.every` steps, names the rank, and undoes the steps since the last check.

Weights may only change in the update, so their checksums are compared in every step, on each rank alone. In a check
replicas compare their digests, and a small batch with a known answer is computed again (`probe`), in the last check
all of them. With `sdc.recompute` the step of a check is computed twice as well, which finds faults that pass.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import CorruptionError, Problem
from parallelrun.base.records import append_jsonl
from parallelrun.base.wording import counted
from parallelrun.distributed import comm
from parallelrun.planner.contract.plan import WORLD
from parallelrun.report.records.find import EVENTS
from parallelrun.training.corruption.blame import Difference, Evidence, Verdict, verdict
from parallelrun.training.corruption.digests import AtRest
from parallelrun.training.corruption.probe import NUM_BATCHES, PassBits, PassRecorder, Probe, bits_of_pass
from parallelrun.training.corruption.replicas import Replicas
from parallelrun.training.corruption.state import Snapshot, weights_at_rest
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.schedules import LossScaler

NOT_FINITE = "the loss or a gradient is not finite"


class CorruptionWatch:
    """Hooks that the training loop calls. They do nothing unless `sdc.every` is set. start: the last step before."""

    def __init__(self, training: Training, scaler: LossScaler, context: WorkerContext, start: int):
        self._training, self._scaler, self._context = training, scaler, context
        self._every = training.config.sdc.every
        if not self._every:
            return
        self._snapshot, self._replicas = Snapshot(training, scaler), Replicas(training)
        self._snapshot.take(start)
        self._probe = Probe(training)
        self._repeats = not any(self._on_any_rank([not self._probe.repeats]))
        if not self._repeats:
            self._say("warning: sdc: a repeated pass has other bits here, so that only weights at rest are watched")
        self._at_rest = AtRest(weights_at_rest(training))
        self._at_rest.begin()
        self._changed: list[tuple[int, str]] = []
        self._first: PassBits | None = None  # of the step that is computed twice
        self._recorder: PassRecorder | None = None
        self._in_step = Difference()  # between the two passes of that step
        self._step, self._is_cold = start, True
        self._undone = 0  # the step of the check that has noticed a fault, until it is passed
        self._num_checks = self._num_found = 0

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Around a training step. After it nothing writes to the weights until the next update."""
        if not self._every:
            yield
            return
        self._step, self._first = step, None
        if self._training.config.sdc.recompute and step % self._every == 0 and self._repeats:
            for _ in range(2 if self._is_cold else 1):  # the first pass of a pipeline sends more messages
                self._first = bits_of_pass(self._training, step, self._scaler.scale)
        self._is_cold = False
        with nullcontext() if self._first is None else PassRecorder(self._training.mesh) as self._recorder:
            yield
        self._at_rest.begin()

    def before_update(self, training: Training) -> None:
        """Called with the final gradients of a step."""
        if not self._every:
            return
        self._changed += [(self._step, name) for name in self._at_rest.changed()]
        if self._first is not None and self._recorder is not None:
            self._in_step = self._recorder.bits(training).compared(self._first)

    def check(self, step: int, *, saves: bool, finite: bool = True) -> int:
        """Return the step after which training continues: `step`, or an earlier one to whose state it has returned.

        Called on all ranks after each step. saves: the state is about to be saved; finite: whether loss and gradients
        are, or may overflow. Collective. Raises CorruptionError on all ranks.
        """
        is_due = saves or not finite or step == self._training.config.steps
        if not self._every or not (is_due or step % self._every == 0):
            return step
        self._num_checks += 1
        evidence = self._evidence(step)
        if finite and not evidence:
            if step >= self._undone:
                self._undone = 0
            self._snapshot.take(step)
            return step
        judged = verdict(evidence) if evidence else Verdict((), NOT_FINITE)
        return self._undo(step, judged, evidence, finite)

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json."""
        return {"sdc_checks": self._num_checks, "sdc_found": self._num_found} if self._every else {}

    def _evidence(self, step: int) -> list[Evidence]:
        """Return what each rank has seen since the last check, nothing if none has seen anything. Collective."""
        self._changed += [(step, name) for name in self._at_rest.changed()]
        replicas = self._replicas.differing()
        is_last = step == self._training.config.steps
        answers = range(NUM_BATCHES) if is_last else (self._num_checks % NUM_BATCHES,)
        is_wrong, answer = self._wrong_answer(answers)
        seen = self._on_any_rank([bool(each) for each in (self._changed, replicas, self._in_step)])
        if not (is_wrong or any(seen)):
            return []
        _, in_doubt, in_step = seen
        if in_doubt and not (in_step or is_wrong):
            _, answer = self._wrong_answer()
        difference = self._in_step if in_step else answer
        own = Evidence(**vars(difference), host=socket.gethostname(), at_rest=self._changed, replicas=replicas)
        self._changed, self._in_step = [], Difference()
        return [Evidence.from_json(document) for document in comm.gather_json(vars(own), self._training.mesh)]

    def _wrong_answer(self, numbers: Iterable[int] = range(NUM_BATCHES)) -> tuple[bool, Difference]:
        """Compute known answers again, up to the first one that is wrong on any rank. Collective.

        Return whether there is one, and how it differs on this rank.
        """
        for number in numbers if self._repeats else ():
            answer = self._probe.answer(number)
            if any(self._on_any_rank([bool(answer)])):
                return True, answer
        return False, Difference()

    def _on_any_rank(self, seen: Sequence[bool]) -> list[bool]:
        """Return which of several things any rank has seen. Collective."""
        mesh = self._training.mesh
        flags = torch.tensor(seen, dtype=torch.int32, device=mesh.device)
        comm.all_reduce(flags, mesh.group(WORLD), "control", op="max")
        return [bool(flag) for flag in flags.tolist()]

    def _undo(self, step: int, judged: Verdict, evidence: list[Evidence], finite: bool) -> int:
        """Return to the state of the last check, unless steps are being repeated already. Returns that step."""
        before, self._undone = self._undone, step
        if before == step and not finite and not judged.ranks:
            return step  # the repetition is not finite either: a matter of numerics
        if before or (judged.ranks and self._wrong_answer()[0]):
            raise self._broken(step, judged, evidence)
        back = self._snapshot.restore()
        self._at_rest.begin()
        self._report(step, judged, evidence, back)
        return back

    def _broken(self, step: int, judged: Verdict, evidence: list[Evidence]) -> CorruptionError:
        """Return the error that ends the run. The rank that is wrong raises it as the cause, the others as victims."""
        ranks, who = judged.ranks or judged.among, _who(judged, evidence)
        self._report(step, judged, evidence, None)
        message = f"step {step}: silent data corruption again on {who}: {judged.what}"
        hosts = ", ".join(sorted({evidence[rank].host for rank in ranks}))
        fix = f"test the device, or leave it out: its host is {hosts}" if hosts else "test the devices of this run"
        error = CorruptionError(Problem(message, who, command=fix))
        error.of_another_rank = bool(ranks) and self._training.mesh.rank != ranks[0]
        return error

    def _report(self, step: int, judged: Verdict, evidence: list[Evidence], back: int | None) -> None:
        """Tell the user and write to events.jsonl, on rank 0. back: the step to which training returns, if it does."""
        self._num_found += 1
        undone = f"; {counted(step - back, 'step')} since step {back} undone and repeated" if back is not None else ""
        who = _who(judged, evidence)
        self._say(f"warning: step {step}: silent data corruption on {who}: {judged.what}{undone}")
        if self._context.rank == 0:
            hosts = [evidence[rank].host for rank in judged.ranks]
            row = {"event": "silent_data_corruption", "step": step, **vars(judged), "hosts": hosts, "undone_to": back}
            append_jsonl(self._context.directory / EVENTS, row)

    def _say(self, text: str) -> None:
        if self._context.console_owner:
            print(text, flush=True)


def _who(judged: Verdict, evidence: list[Evidence]) -> str:
    """Return the ranks that are wrong, or those of which one is, in words."""
    named = ", ".join(f"rank {rank} ({evidence[rank].host})" for rank in judged.ranks or judged.among)
    return f"one of {named}" if judged.among and not judged.ranks else named or "an unknown rank"
