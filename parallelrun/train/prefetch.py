"""Reading ahead: the batches of the next steps are read while the current one trains.

A thread is enough where a sample is a slice of an array. Decoding image files takes processor time under Python's lock,
so worker processes do that: torch's DataLoader, one whole step a worker at a time. Neither changes which samples a
step has: `samples[step]` says that.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parallelrun.errors import EnvironmentProblem, ParallelrunError, Problem
from parallelrun.train.batch import Batch

STEPS_AHEAD = 2  # of each worker process


class Samples(Protocol):
    """Batches by step, in host memory. Read from other threads and processes: a pure function of the step."""

    def __getitem__(self, step: int) -> Batch: ...


class ReadAhead(Protocol):
    """Gives the batch of one step after another, each read beforehand where it was foreseeable."""

    def take(self, step: int) -> Batch:
        """The batch of `step`, waiting for it if need be. Raises what reading raised."""
        ...

    def close(self) -> None:
        """End the thread or the processes. Nothing may be taken after that."""
        ...


class InBackgroundThread:
    """Reads step s + 1 in a thread as soon as step s is taken, up to `last_step`. pin: into page-locked memory."""

    def __init__(self, samples: Samples, last_step: int, pin: bool):
        self._samples, self._last_step, self._pin = samples, last_step, pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._next: tuple[int, Future[Batch]] | None = None

    def take(self, step: int) -> Batch:
        expected, future = self._next or (0, None)
        self._next = None
        batch = future.result() if future is not None and expected == step else self._read(step)
        if step < self._last_step:
            self._next = step + 1, self._thread.submit(self._read, step + 1)
        return batch

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> Batch:
        batch = self._samples[step]
        return pinned(batch) if self._pin else batch


def pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, from which the GPU copies without the processor."""

    def pin(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.pin_memory()

    return replace(batch, inputs=pin(batch.inputs), targets=pin(batch.targets))


class _Steps(Dataset):
    """Steps as DataLoader's items. An error for the user travels as a value: DataLoader would rewrite its message."""

    def __init__(self, samples: Samples):
        self._samples = samples

    def __getitem__(self, step: int) -> tuple[Tensor | None, Tensor | None, Tensor] | ParallelrunError:
        try:
            batch = self._samples[step]
        except ParallelrunError as error:
            return error
        return batch.inputs, batch.targets, batch.sample_ids


class InWorkerProcesses:
    """Reads in `num_workers` processes, each up to two steps ahead. They start when the first step is taken, and again
    when a step is taken that does not follow the one before (a new round of evaluation)."""

    def __init__(self, samples: Samples, last_step: int, num_workers: int, pin: bool):
        self._steps, self._last_step = _Steps(samples), last_step
        self._num_workers, self._pin = num_workers, pin
        self._expected = 0
        self._loaded: Iterator[Any] = iter(())

    def take(self, step: int) -> Batch:
        if step != self._expected or step > self._last_step:
            self._loaded = self._start(step)
        self._expected = step + 1
        try:
            found = next(self._loaded)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise _worker_died(error) from error
        if isinstance(found, ParallelrunError):
            raise found
        return Batch(*found)

    def close(self) -> None:
        self._loaded = iter(())

    def _start(self, step: int) -> Iterator[Any]:
        steps = range(step, max(self._last_step, step) + 1)
        return iter(
            DataLoader(
                self._steps,
                batch_size=None,
                sampler=steps,
                num_workers=min(self._num_workers, len(steps)),
                prefetch_factor=STEPS_AHEAD,
                pin_memory=self._pin,
                worker_init_fn=leave_signals_to_the_rank,
                multiprocessing_context="fork",  # the rank has the dataset open; a new interpreter would open it again
            )
        )


def _worker_died(error: RuntimeError) -> EnvironmentProblem:
    what = f"a process that reads the dataset has ended: {str(error).splitlines()[0]}"
    return EnvironmentProblem(Problem(what, "dataset.num_workers", "dataset.num_workers=0, which reads in the rank"))


def leave_signals_to_the_rank(worker: int) -> None:
    """Undo the rank's handlers. Ctrl-C and a closed terminal reach the whole process group, and the rank answers them;
    DataLoader ends a worker by SIGTERM."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
