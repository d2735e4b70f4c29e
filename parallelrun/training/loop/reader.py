"""Reads the samples of each step: a function of (seed, step, dp coordinate) alone.

`HostSamples` reads one step into host memory. `Reader` copies it to the device and lets the next steps be read in the
background while the current one trains. A thread is enough where a sample is a slice of an array. Decoding image files
holds Python's lock, so worker processes do it: torch's DataLoader, one step at a time per worker.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parallelrun.base.errors import EnvironmentProblem, ParallelrunError, Problem
from parallelrun.data.order import Sampler
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.documents import DocumentBounds, tokens_ahead
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.definitions import Split

MAX_WORKERS = 4  # per rank, unless `dataset.num_workers` is set: more rarely help one rank
STEPS_AHEAD = 2  # of each worker process


Inputs: TypeAlias = "Tensor | dict[str, Tensor]"


def _mapped(change: Callable[[Tensor], Tensor], inputs: Inputs | None) -> Inputs | None:
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return None if inputs is None else change(inputs)


@dataclass(frozen=True)
class Batch:
    """The samples of one data replica in one step, along dim 0. inputs and targets are None on ranks without need.

    inputs: (n, *sample_shape), int64 tokens or features in the compute dtype, or a dict of such tensors. targets:
    (n, *target_shape), int64, below 0 where ignored. sample_ids: (n,) int64, the samples' global numbers, known to
    every rank. documents: those that are packed into the samples, known to every rank too; None if samples are no
    packs. ahead: beside targets, for multi-token prediction, (n, 2, depth, seq): the tokens that each depth reads, and
    its targets.
    """

    inputs: Inputs | None
    targets: Tensor | None
    sample_ids: Tensor
    documents: DocumentBounds | None = None
    ahead: Tensor | None = None

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    def microbatch(self, index: int, size: int) -> Batch:
        """Return views of microbatch `index` of `size` consecutive samples."""
        rows = slice(index * size, (index + 1) * size)
        assert rows.stop <= len(self), f"microbatch {index} of {size} samples lies outside a batch of {len(self)}"
        packed = None if self.documents is None else self.documents.samples(rows.start, rows.stop)
        return replace(replace(self, documents=None).map(lambda tensor: tensor[rows]), documents=packed)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch of `change` of each tensor."""
        targets, ahead = (None if tensor is None else change(tensor) for tensor in (self.targets, self.ahead))
        inputs = _mapped(change, self.inputs)
        documents = None if self.documents is None else self.documents.map(change)
        return Batch(inputs, targets, change(self.sample_ids), documents, ahead)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory. torch's DataLoader calls this too."""
        return self.map(Tensor.pin_memory)


@dataclass(frozen=True)
class HostSamples:
    """The samples [start, stop) of every global batch, in host memory. `samples[step]` is the batch of a step, from 1.

    Read from other threads and processes: a pure function of the step.
    has_inputs, has_targets: whether this rank needs them. floats: the dtype of inputs that are not token ids. seq:
    tokens of a sample. positions: of the tokens of each sample that this rank holds; None: all. depth: of multi-token
    prediction.
    """

    split: Split
    sampler: Sampler
    start: int
    stop: int
    has_inputs: bool
    has_targets: bool
    floats: torch.dtype
    seq: int = 0
    positions: Tensor | None = None
    depth: int = 0

    def __getitem__(self, step: int) -> Batch:
        indices, sample_ids = self.sampler.indices(step, self.start, self.stop)
        inputs = targets = documents = ahead = None
        if self.split.packs:
            lengths = [self.split.document_lengths(int(index)).tolist() for index in indices]
            documents = DocumentBounds.of(lengths, self.seq)
        if self.has_inputs or self.has_targets:
            samples = [self.split.augmented(int(index), int(number)) for index, number in zip(indices, sample_ids)]
            inputs = self._inputs([sample[0] for sample in samples]) if self.has_inputs else None
            targets = self._stacked([sample[1] for sample in samples]) if self.has_targets else None
            if self.depth and self.has_targets:
                own = tokens_ahead(torch.from_numpy(np.stack(samples)), documents, self.depth)
                ahead = own if self.positions is None else own[..., self.positions]
        return Batch(inputs, targets, torch.from_numpy(np.asarray(sample_ids, dtype=np.int64)), documents, ahead)

    def _inputs(self, samples: list[Any]) -> Inputs:
        if not isinstance(samples[0], dict):
            return self._stacked(samples)
        return {name: self._stacked([sample[name] for sample in samples]) for name in samples[0]}

    def _stacked(self, arrays: list[np.ndarray]) -> Tensor:
        stacked = torch.from_numpy(np.stack(arrays))
        if self.positions is not None:
            stacked = stacked[:, self.positions]
        return stacked.to(self.floats if stacked.is_floating_point() else torch.int64)


class _Steps(Dataset[Any]):
    """Steps as DataLoader's items. A ParallelrunError is returned as a value: DataLoader would rewrite its message."""

    def __init__(self, samples: HostSamples):
        self._samples = samples

    def __getitem__(self, step: int) -> Batch | ParallelrunError:
        try:
            return self._samples[step]
        except ParallelrunError as error:
            return error


class ReadAhead:
    """Reads the next steps, up to `last_step`, while one trains: one step in a thread, or two in each worker process
    and one that the thread has taken from them.

    Reading starts when the first step is taken, and again when a step is taken that does not follow the one before (a
    new round of evaluation). num_workers: of processes; 0: a thread. pin: into page-locked memory.
    """

    def __init__(self, samples: HostSamples, last_step: int, num_workers: int, pin: bool):
        self._samples, self._last_step = samples, last_step
        self._num_workers, self._pin = num_workers, pin
        self._expected = 0
        self._loaded: Iterator[Batch | ParallelrunError] = iter(())

    def take(self, step: int) -> Batch:
        """Return the batch of `step`; wait for it if it is not ready. Raises what reading raised."""
        if step != self._expected or step > self._last_step:
            self.close()
            steps = range(step, max(self._last_step, step) + 1)
            self._loaded = self._in_thread(self._in_processes(steps) if self._num_workers else map(self._read, steps))
        self._expected = step + 1
        try:
            batch = next(self._loaded)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            message = f"a process that reads the dataset has ended: {str(error).splitlines()[0]}"
            fix = "dataset.num_workers=0, which reads in the rank"
            raise EnvironmentProblem(Problem(message, "dataset.num_workers", fix)) from error
        if isinstance(batch, ParallelrunError):
            raise batch
        return batch

    def close(self) -> None:
        """End the thread and the processes. What was read ahead is lost."""
        self._loaded = iter(())

    def _in_thread(self, batches: Iterator[Batch | ParallelrunError]) -> Iterator[Batch | ParallelrunError]:
        """Take each batch while the one before is used. Of processes too: to take a batch from one means to ask that
        process for every tensor's memory and to wait until it answers, which it does between two images."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        try:
            batch = next(batches, None)
            while batch is not None:
                following = thread.submit(next, batches, None)
                yield batch
                batch = following.result()
        finally:
            thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> Batch:
        batch = self._samples[step]
        return batch.pin_memory() if self._pin else batch

    def _in_processes(self, steps: range) -> Iterator[Batch | ParallelrunError]:
        return iter(
            DataLoader(
                _Steps(self._samples),
                batch_size=None,
                sampler=steps,
                num_workers=min(self._num_workers, len(steps)),
                prefetch_factor=STEPS_AHEAD,
                pin_memory=self._pin,
                worker_init_fn=leave_signals_to_the_rank,
                multiprocessing_context="fork",  # the rank has the dataset open; a new interpreter would open it again
            )
        )


def leave_signals_to_the_rank(worker: int) -> None:
    """Undo the rank's signal handlers in a worker process.

    Ctrl-C and a closed terminal reach the whole process group, and the rank handles them. DataLoader ends a worker by
    SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Reader:
    """Reads dp coordinate c's contiguous samples [c B/dp, (c+1) B/dp) of every global batch; `replica` sets another c.

    Ranks of the first stage read inputs, ranks of the last stage read targets, other ranks read neither. All read the
    boundaries of packed documents.

    last_step: the last step that is read ahead; 0 turns reading ahead off, for readers that skip steps.
    num_workers: processes that decode a split whose samples are files (`decodes_files`); None: the cores that the ranks
    of this host do not use, at most 4. Other splits are read ahead by one thread.
    samples: the batches in host memory. seconds: how long all calls of `batch` took, including copies to the device.
    """

    def __init__(
        self,
        split: Split,
        sampler: Sampler,
        plan: Plan,
        mesh: Mesh,
        replica: int | None = None,
        *,
        last_step: int = 0,
        num_workers: int | None = None,
    ):
        replica = mesh.coordinate.get("dp", 0) if replica is None else replica
        size = plan.batch.replica_batch
        pp_rank = mesh.coordinate.get("pp", 0)
        self.samples = HostSamples(
            split,
            sampler,
            start=replica * size,
            stop=(replica + 1) * size,
            has_inputs=pp_rank == plan.stages[0].pp_rank,
            has_targets=pp_rank == plan.last_stage_pp_rank,
            floats=getattr(torch, plan.precision.compute),
            seq=plan.spec.seq,
            positions=_positions(plan, mesh),
            depth=plan.spec.mtp_depth,
        )
        self._device = mesh.device
        self._ahead: ReadAhead | None = None
        if last_step and (self.samples.has_inputs or self.samples.has_targets or split.packs):
            pin = self._device.type == "cuda"  # a copy overlaps with kernels only from pinned memory
            self._ahead = ReadAhead(self.samples, last_step, _num_workers(split, num_workers, plan.world), pin)
        self.seconds = 0.0

    def batch(self, step: int) -> Batch:
        """Return the samples of step `step` (from 1) on the device. Raises what reading them raised."""
        began = time.perf_counter()
        batch = self._ahead.take(step) if self._ahead else self.samples[step]
        if self._device.type != "cpu":  # there, even a copy of nothing would give Python's lock to the reading thread
            batch = batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        self.seconds += time.perf_counter() - began
        return batch

    def close(self) -> None:
        """End the thread or the processes that read ahead."""
        if self._ahead:
            self._ahead.close()


def _positions(plan: Plan, mesh: Mesh) -> Tensor | None:
    """The positions of the tokens that this rank holds of each sample; None: all."""
    if plan.context is None:
        return None
    return torch.tensor(plan.context.positions(mesh.coordinate["cp"], plan))


def _num_workers(split: Split, requested: int | None, world: int) -> int:
    if not split.decodes_files:
        return 0
    if requested is not None:
        return requested
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // local_ranks))
