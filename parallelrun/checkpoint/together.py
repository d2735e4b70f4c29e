"""The ranks that save or load a checkpoint together: they exchange JSON, and all raise if one of them fails.

Pickles, which `torch.distributed` exchanges, could run code when a stranger has sent them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from parallelrun.base import errors
from parallelrun.base.errors import CheckpointError, ParallelrunError, PeerFailed, Problem, SaveFailed, full_disk
from parallelrun.distributed import torch_private


class CheckpointRanks:
    """The ranks of a group (None: all ranks), or this process alone. Rank 0 of them decides.

    action: what fails if a rank fails, for messages. saving: whether they save, or load.
    """

    def __init__(self, action: str, saving: bool, group: dist.ProcessGroup | None = None, alone: bool = False):
        self._action, self._saving, self._group, self._alone = action, saving, group, alone
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)

    def agree(self, do: Callable[[], Any], decide: Callable[[Sequence[Any]], Any] = lambda values: None) -> Any:
        """Return what `decide` makes, on rank 0, of what `do` has returned on each rank. All values are JSON's.

        If a rank raises anything, all raise, for the first such rank: SaveFailed if a disk cannot be written,
        CheckpointError if a checkpoint cannot be read, its own ParallelrunError or interrupt. Any other exception is
        raised again on its own rank, and PeerFailed on the other ranks.
        """
        own, value = _tried(do)
        reports = self._gathered({"value": value, "failure": own and self._described(own)})
        decision: dict[str, Any] = {}
        if self.rank == 0:
            failures = [{"rank": rank, **row["failure"]} for rank, row in enumerate(reports) if row["failure"]]
            failed = failures[0] if failures else None
            if failed is None:
                own, value = _tried(lambda: decide([row["value"] for row in reports]))
                failed = {"rank": 0, **self._described(own)} if own else None
            decision = {"value": value, "failed": failed}
        decision = self._from_first(decision)
        if decision["failed"]:
            self._raise(decision["failed"], own)
        return decision["value"]

    def _described(self, cause: BaseException) -> dict[str, Any]:
        """Return as JSON what the other ranks raise for an exception of this rank."""
        if isinstance(cause, (KeyboardInterrupt, SystemExit)):
            return {"ends": cause.code if isinstance(cause, SystemExit) and isinstance(cause.code, int) else None}
        disk = _disk_error(cause)
        text = f"{self._action}: rank {self.rank}: {_words(disk or cause)}"
        error: ParallelrunError = PeerFailed(Problem(text))
        if isinstance(cause, ParallelrunError):
            error = cause
        elif disk and self._saving:
            error = SaveFailed(Problem(f"{text}; earlier checkpoints are untouched", where="runs"))
        elif not self._saving and (disk or isinstance(cause, SafetensorError)):
            error = CheckpointError(Problem(text, where="resume"))
        problems = [vars(problem) for problem in error.problems]
        return {"error": type(error).__name__, "problems": problems, "exit_code": error.exit_code}

    def _raise(self, failed: Mapping[str, Any], own: BaseException | None) -> None:
        """Raise for the first rank that has failed. own: what this rank has raised, if it did."""
        cause = own if failed["rank"] == self.rank else None
        if "ends" in failed:
            raise KeyboardInterrupt if failed["ends"] is None else SystemExit(failed["ends"])
        if cause is not None and (isinstance(cause, ParallelrunError) or failed["error"] == PeerFailed.__name__):
            raise cause
        kind = vars(errors).get(failed["error"])
        error_class = kind if isinstance(kind, type) and issubclass(kind, ParallelrunError) else ParallelrunError
        problems = [Problem(**problem) for problem in failed["problems"]]
        error = error_class(*problems, exit_code=failed["exit_code"])
        error.of_another_rank = cause is None
        raise error from cause

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, elsewhere nothing."""
        if self._alone:
            return [value]
        data = self._tensor(json.dumps(value).encode())
        lengths = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()], device=data.device), group=self._group)
        padded = data.new_zeros(int(max(lengths)))
        padded[: data.numel()] = data
        rows = [torch.zeros_like(padded) for _ in lengths] if self.rank == 0 else None
        dist.gather(padded, rows, group=self._group, group_dst=0)
        return [_parsed(row[: int(length)]) for row, length in zip(rows or (), lengths)]

    def _from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self._alone:
            return value
        content = self._tensor(json.dumps(value).encode())
        length = torch.tensor([content.numel()], device=content.device)
        dist.broadcast(length, group=self._group, group_src=0)
        if self.rank != 0:
            content = content.new_zeros(int(length))
        dist.broadcast(content, group=self._group, group_src=0)
        return _parsed(content)

    def _tensor(self, data: bytes) -> Tensor:
        return torch.tensor(bytearray(data), dtype=torch.uint8, device=torch_private.device_for_objects(self._group))


def _parsed(content: Tensor) -> Any:
    return json.loads(content.cpu().numpy().tobytes())


def _tried(do: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    """Call a function; return what it has raised, and what it has returned."""
    try:
        return None, do()
    except BaseException as error:  # an interrupt, too: the other ranks wait for this one
        return error, None


def _words(cause: BaseException) -> str:
    """An exception in a message to the user."""
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}"
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def _disk_error(cause: BaseException) -> OSError | None:
    """Return the failed operation on a file that `cause` is; of a full disk also if another exception wraps it."""
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
        return cause
    return full_disk(cause)
