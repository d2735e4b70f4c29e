"""Saves and loads on several ranks, in the order of calls of `torch.distributed.checkpoint.save` and `load`.

Those exchange pickles, with which a stranger's message could run code. Here ranks exchange JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from parallelrun.base import errors
from parallelrun.base.errors import ParallelrunError, Problem, full_disk
from parallelrun.checkpoint.planners import PartLoadPlanner, PartSavePlanner
from parallelrun.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from parallelrun.distributed import torch_private


class RanksFailed(Exception):
    """Raised on all ranks. failures: by rank, this rank's own as it was raised, others as they have been told."""

    def __init__(self, failures: Mapping[int, BaseException]):
        self.failures = failures
        super().__init__("; ".join(f"rank {rank}: {words(cause)}" for rank, cause in failures.items()))


def save(writer: SafetensorsWriter, planner: PartSavePlanner, group: dist.ProcessGroup | None, alone: bool) -> None:
    """Write a checkpoint. Collective over the group (None: all ranks) unless `alone`. Raises RanksFailed."""
    ranks = _Ranks(group, alone)
    metadata = Metadata({})  # of all ranks' parts, on the first rank

    def planned() -> Any:
        planner.set_up_planner({}, None, ranks.leads)
        return planner.encoded(writer.prepare_local_plan(planner.create_local_plan()))

    def decide(plans: Sequence[Any]) -> list[Any]:
        nonlocal metadata
        decided, metadata = planner.create_global_plan([planner.decoded(plan) for plan in plans])
        return [plan.storage_data for plan in writer.prepare_global_plan(decided)]

    def write() -> list[Any]:
        plan = planner.finish_plan(SavePlan([], storage_data=files[ranks.rank]))
        written = writer.write_data(plan, planner).wait()
        return [(row.index.fqn, row.index.offset, row.size_in_bytes, row.storage_data) for row in written]

    def finish(results: Sequence[Any]) -> None:
        writer.finish(metadata, [[_result(*row) for row in rows] for rows in results])

    files = ranks.agree(planned, decide)
    ranks.agree(write, finish)


def _result(key: str, offsets: Sequence[int], num_bytes: int, written: Any) -> WriteResult:
    name, (file_bytes, sha256) = written
    return WriteResult(MetadataIndex(key, offsets), num_bytes, (name, (file_bytes, sha256)))


def load(reader: SafetensorsReader, planner: PartLoadPlanner, alone: bool) -> None:
    """Fill the planner's parts. Collective over all ranks unless `alone`. Raises RanksFailed, before any part changes
    if files are damaged."""
    ranks = _Ranks(None, alone)
    plan = LoadPlan([])

    def planned() -> Any:
        nonlocal plan
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata, ranks.leads)
        reader.set_up_storage_reader(metadata, ranks.leads)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        return plan.storage_data

    def decide(seen: Sequence[Any]) -> None:
        reader.prepare_global_plan([LoadPlan([], storage_data=digest) for digest in seen])

    def read() -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    ranks.agree(planned, decide)
    ranks.agree(read, lambda done: None)


class _Ranks:
    """The ranks that save or load together. leads: whether this is the first of them, which decides."""

    def __init__(self, group: dist.ProcessGroup | None, alone: bool):
        self._group, self._alone = group, alone
        self.rank = 0 if alone else dist.get_rank(group)
        self.leads = self.rank == 0

    def agree(self, do: Callable[[], Any], decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Return what `decide` makes, on the first rank, of what `do` has returned on each. All values are JSON's.

        Raises RanksFailed on all ranks if one of them raises anything.
        """
        own, value = _tried(do)
        reports = self._gathered({"value": value, "failure": own and _described(own)})
        decision: dict[str, Any] = {}
        if self.leads:
            failures = {rank: one["failure"] for rank, one in enumerate(reports) if one["failure"]}
            decided = None
            if not failures:
                own, decided = _tried(lambda: decide([one["value"] for one in reports]))
                failures = {0: _described(own)} if own else {}
            decision = {"value": decided, "failures": failures}
        if not self._alone:
            decision = json.loads(shared(json.dumps(decision).encode() if self.leads else b"", self._group))
        if failed := {int(rank): failure for rank, failure in decision["failures"].items()}:
            raise RanksFailed(
                {r: own if own and r == self.rank else _rebuilt(one) for r, one in failed.items()}
            ) from own
        return decision["value"]

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on the first rank; elsewhere nothing."""
        if self._alone:
            return [value]
        data = _as_tensor(json.dumps(value).encode(), self._group)
        size = dist.get_world_size(self._group)
        lengths = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([data.numel()], device=data.device), group=self._group)
        longest = int(max(lengths))
        padded = data.new_zeros(longest)
        padded[: data.numel()] = data
        gathered = [torch.zeros_like(padded) for _ in range(size)] if self.leads else None
        dist.gather(padded, gathered, group=self._group, group_dst=0)
        return [json.loads(_as_bytes(one[: int(length)])) for one, length in zip(gathered or (), lengths)]


def shared(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """Return the bytes of the group's first rank. Collective."""
    content = _as_tensor(data, group)
    length = torch.tensor([content.numel()], device=content.device)
    dist.broadcast(length, group=group, group_src=0)
    if not data:
        content = content.new_zeros(int(length))
    dist.broadcast(content, group=group, group_src=0)
    return _as_bytes(content)


def _as_tensor(data: bytes, group: dist.ProcessGroup | None) -> Tensor:
    return torch.tensor(bytearray(data), dtype=torch.uint8, device=torch_private.device_for_objects(group))


def _as_bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()


def _tried(do: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    """Call a function; return what it has raised, and what it has returned."""
    try:
        return None, do()
    except BaseException as error:  # an interrupt, too: the other ranks wait for this one
        return error, None


def words(cause: BaseException) -> str:
    """An exception in a message to the user."""
    if isinstance(cause, _Told):
        return str(cause)
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}"
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def disk_error(cause: BaseException) -> OSError | None:
    """Return the failed operation on a file that `cause` is; of a full disk also if another exception wraps it."""
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
        return cause
    return full_disk(cause)


class _Told(Exception):
    """An exception of another rank, in its words."""


def _described(cause: BaseException) -> dict[str, Any]:
    """Return what another rank must know of an exception, as JSON."""
    document: dict[str, Any] = {"words": words(cause)}
    if isinstance(cause, ParallelrunError):
        problems = [vars(problem) for problem in cause.problems]
        document |= {"error": type(cause).__name__, "problems": problems, "exit_code": cause.exit_code}
    elif (error := cause if isinstance(cause, OSError) else full_disk(cause)) and error.errno is not None:
        document["os"] = [error.errno, error.strerror, error.filename and str(error.filename)]
    elif isinstance(cause, SafetensorError):
        document["safetensors"] = str(cause)
    elif isinstance(cause, (KeyboardInterrupt, SystemExit)):
        document["ends"] = cause.code if isinstance(cause, SystemExit) and isinstance(cause.code, int) else None
    return document


def _rebuilt(document: Mapping[str, Any]) -> BaseException:
    """Return the exception that another rank has described: only of the classes that are named here."""
    if "error" in document:
        kind = vars(errors).get(document["error"])
        error_class = kind if isinstance(kind, type) and issubclass(kind, ParallelrunError) else ParallelrunError
        return error_class(*(Problem(**problem) for problem in document["problems"]), exit_code=document["exit_code"])
    if "os" in document:
        return OSError(*document["os"])
    if "safetensors" in document:
        return SafetensorError(document["safetensors"])
    if "ends" in document:
        return KeyboardInterrupt() if document["ends"] is None else SystemExit(document["ends"])
    return _Told(document["words"])
