"""Writes a checkpoint beside training: a thread copies its tensors to host memory, and then writes the copies.

Forward and backward of the next step only read what is saved. The optimizer changes it in place, also on CPU, so the
update waits for the copies. Their memory is kept between saves: the kernel needs longer to provide fresh memory than to
copy into it. A forked writer would not copy at all, but every page that the next update changes would cost a fault,
which takes longer than the copy, and a process that uses CUDA cannot fork.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelrun.base.background_thread import BackgroundThread
from parallelrun.checkpoint.storage import LocalPart
from parallelrun.checkpoint.store import write_parts
from parallelrun.distributed import torch_private
from parallelrun.distributed.comm.counter import KERNELS
from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.plan import Plan

_ALIGNMENT = 64


class HostMemory:
    """Host memory of one rank for the copies of its parts, kept between saves. pinned: page-locked, for CUDA."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, parts: Sequence[LocalPart], after: torch.cuda.Event | None) -> list[LocalPart]:
        """Return copies of the parts, valid until the next call, when the tensors may change again.

        after: the event in the computing stream from which on the tensors have their values; None on CPU.
        """
        num_bytes = sum(map(_aligned_bytes, parts))
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before its successor is obtained
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        copies, start = [], 0
        for part in parts:
            view = self._buffer[start : start + part.tensor.nbytes].view(part.tensor.dtype).view(part.tensor.shape)
            copies.append(replace(part, tensor=view))
            start += _aligned_bytes(part)
        targets, sources = [part.tensor for part in copies], [part.tensor.detach() for part in parts]
        if after is None:
            torch_private.copy_all(targets, sources)
            return copies
        with torch.cuda.stream(torch.cuda.Stream()):
            after.wait()
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return copies


def _aligned_bytes(part: LocalPart) -> int:
    return -(-part.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class BackgroundWriter:
    """Writes the checkpoints of one rank beside training, at most one at a time.

    seconds: that the last one took. Its threads exchange messages in a group of their own, so that these cannot match
    those of the training. group: the ranks that write a checkpoint together.
    """

    def __init__(self, plan: Plan, group: Group, device: torch.device, timeout_s: float):
        self._plan, self._ranks = plan, group.ranks
        self._on_cuda = device.type == "cuda"
        self._timeout = timedelta(seconds=2 * timeout_s + 60)
        self._memory = HostMemory(pinned=self._on_cuda)
        self._thread = BackgroundThread("checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._copied: Future[None] | None = None
        self._pending: Future[None] | None = None
        self.seconds = 0.0

    def start(
        self, parts: Sequence[LocalPart], directory: Path, step: int, extra: Mapping[str, Any], keep: int
    ) -> None:
        """Copy the parts, write `directory/step_<step>`, and delete all but the newest `keep`, beside training.

        Collective over the group. The save before it must have been collected. The tensors must not change
        until `wait_for_copies` has returned.
        """
        assert self._pending is None, "a second save was started beside the first"
        self.join()
        copied: Future[None] = Future()
        after = torch.cuda.current_stream().record_event() if self._on_cuda else None

        def copy_and_write() -> None:
            began = time.perf_counter()
            try:
                copies = self._memory.copy(parts, after)
            finally:
                copied.set_result(None)
            alone = len(self._ranks) == 1
            write_parts(directory, step, copies, extra, self._plan, keep=keep, group=self._group, alone=alone)
            self.seconds = time.perf_counter() - began

        self._copied = copied
        KERNELS.acquire()
        self._pending = self._thread.run(copy_and_write)

    def wait_for_copies(self) -> None:
        """Wait until the tensors of the save that was started last may change."""
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def join(self) -> None:
        """Create the group of the messages, if several ranks have none yet. Collective."""
        if self._group is None and len(self._ranks) > 1:
            self._group = dist.new_group(
                list(self._ranks), backend="gloo", timeout=self._timeout, use_local_synchronization=True
            )

    @property
    def is_pending(self) -> bool:
        """Whether a save was started and not collected."""
        return self._pending is not None

    @property
    def is_done(self) -> bool:
        """Whether a save was started, has ended and was not collected."""
        return self._pending is not None and self._pending.done()

    def collect(self) -> None:
        """Wait for the save that was started, and raise what writing it has raised."""
        pending, self._pending = self._pending, None
        assert pending is not None, "no save was started"
        try:
            pending.result()
        finally:
            KERNELS.release()
