"""Checkpoints in the memory of the hosts (`checkpoint.memory_every`): written there, copied to the next host, fetched.

Each host has a folder in its memory, which outlives its ranks. A rank writes its file into the folder of its host, and
sends the file to a rank of the next host (the hosts form a ring), so that the hosts that are left have all files after
one was lost. All hosts have the index. On one host nothing is sent.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallelrun.checkpoint.files import BLOCK
from parallelrun.checkpoint.held import has_file, remove_all
from parallelrun.checkpoint.index import Index, check_model, describe_plan, encode
from parallelrun.checkpoint.planners import LocalPart
from parallelrun.checkpoint.schema import read_index
from parallelrun.checkpoint.storage import SafetensorsWriter, rank_file
from parallelrun.checkpoint.store import write_with
from parallelrun.checkpoint.together import shared
from parallelrun.comm import gather_json
from parallelrun.errors import CheckpointError, Problem, SaveFailed
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import Plan

Parts = Callable[[Index], Sequence[LocalPart]]


@dataclass(frozen=True)
class MemoryHosts:
    """The hosts of a run as this rank sees them. folder: that of its own host; ranks: those of each host, ascending."""

    folder: Path
    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, folder: Path, mesh: Mesh) -> MemoryHosts:
        """Find out which ranks share a host, by their folders, whose names are unique. Collective over the world."""
        by_folder: dict[str, list[int]] = {}
        for rank, name in enumerate(gather_json(os.fspath(folder), mesh)):
            by_folder.setdefault(name, []).append(rank)
        return cls(folder, tuple(map(tuple, by_folder.values())), mesh.rank)

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return next(ranks for ranks in self.ranks if self.rank in ranks)

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank of each host must do."""
        return self.rank == self.own[0]

    def copies(self, files: Mapping[str, int]) -> list[FileTransfer]:
        """Return how the files of each host get to the next one."""
        found = []
        for number, ranks in enumerate(self.ranks if len(self.ranks) > 1 else ()):
            following = self.ranks[(number + 1) % len(self.ranks)]
            for local, rank in enumerate(ranks):
                if rank_file(rank) in files:
                    found.append(FileTransfer(rank_file(rank), rank, following[local % len(following)]))
        return found


@dataclass(frozen=True)
class FileTransfer:
    """A file that the rank `source` must send to the rank `target`."""

    name: str
    source: int
    target: int


class MemoryWriter(SafetensorsWriter):
    """Writes each rank's file into a hidden directory of its own host's folder; `write` does the rest."""

    def __init__(self, folder: Path, step: int, plan: Plan, extra: Mapping[str, Any]):
        super().__init__(folder, step, plan.optimizer, describe_plan(plan), extra)
        self.aside: Path | None = None  # known once the ranks have agreed on it
        self.index: Index | None = None  # on the coordinator

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.aside = (self.directory / plan.storage_data).parent
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: keep the index, which all hosts get."""
        self.index = self.complete_index(metadata, results)


def write(
    hosts: MemoryHosts,
    step: int,
    extra: Mapping[str, Any],
    plan: Plan,
    parts: Sequence[LocalPart],
    group: dist.ProcessGroup | None,
) -> None:
    """Write one rank's parts of a checkpoint into the memory of its host and the next one; then remove older ones.

    Collective over the group, of all ranks. A failure at any moment leaves the older checkpoint on all hosts. Raises
    SaveFailed on all ranks if the memory of a host is too small.
    """
    writer = MemoryWriter(hosts.folder, step, plan, extra)
    try:
        write_with(writer, parts, plan, hosts.rank, group, alone=group is None)
        assert writer.aside is not None
        index = encode(writer.index) if writer.index is not None else b""
        error = None
        if group is not None:
            index = shared(index, group)
            files = {name: size for name, (size, _) in json.loads(index)["files"].items()}
            error = transfer(hosts.copies(files), files, writer.aside, hosts.rank, group)
        _agree(error, step, group)
        _agree(_publish(writer, index) if hosts.leads else None, step, group)
    finally:
        if hosts.leads and writer.aside is not None:
            shutil.rmtree(writer.aside, ignore_errors=True)
    if hosts.leads:
        with contextlib.suppress(OSError):
            remove_all(hosts.folder, writer.target)


def _publish(writer: MemoryWriter, index: bytes) -> OSError | None:
    """Make the checkpoint visible on this host; return an error of its memory."""
    assert writer.aside is not None
    try:
        writer.aside.mkdir(exist_ok=True)  # neither a rank of this host nor of the one before may have had a part
        writer.publish(writer.aside, index)
    except OSError as error:
        return error
    return None


def fetch(path: Path, hosts: MemoryHosts, parts: Parts, plan: Plan, mesh: Mesh, group: dist.ProcessGroup) -> list[str]:
    """Get the files of the checkpoint `path` that this host's ranks need and other hosts have. Collective.

    parts: a function that returns the parts that this rank must fill, from the index. Return the files that this rank
    must check. Raises CheckpointError on all ranks.
    """
    index, needs, here, error = None, set[str](), set[str](), ""
    try:
        index = read_index(path)
        check_model(index, plan, path)
        needs = _files_of(index, parts(index))
        here = {name for name, (size, _) in index.files.items() if has_file(path, name, size)}
    except CheckpointError as caught:
        error = str(caught)
    told = {"digest": index.digest if index else "", "needs": sorted(needs), "here": sorted(here), "error": error}
    everyone = gather_json(told, mesh)
    problems = [f"rank {rank}: {one['error']}" for rank, one in enumerate(everyone) if one["error"]]
    if not problems and len({one["digest"] for one in everyone}) > 1:
        problems = [f"ranks see different checkpoints under {path}"]
    if problems:
        raise CheckpointError(Problem(problems[0], where="resume"))
    assert index is not None
    needed = {ranks: set().union(*(everyone[rank]["needs"] for rank in ranks)) for ranks in hosts.ranks}
    sizes = {name: size for name, (size, _) in index.files.items()}
    failed = transfer(_wanted(hosts, needed, everyone, path), sizes, path, hosts.rank, group)
    if any(gather_json(str(failed or ""), mesh)):
        raise CheckpointError(Problem(f"files of {path} could not be sent between hosts: {failed or 'elsewhere'}"))
    own = hosts.own
    return sorted(needed[own])[own.index(hosts.rank) :: len(own)]


def _wanted(
    hosts: MemoryHosts, needed: Mapping[tuple[int, ...], set[str]], everyone: Sequence[Mapping[str, Any]], path: Path
) -> list[FileTransfer]:
    """Return the transfers that give each host the files that it needs. Raises CheckpointError if one is lost."""
    found = []
    for ranks in hosts.ranks:
        for number, name in enumerate(sorted(needed[ranks] - set(everyone[ranks[0]]["here"]))):
            sources = [other for other in hosts.ranks if name in everyone[other[0]]["here"]]
            if not sources:
                raise CheckpointError(Problem(f"{path / name} is lost: no host has it", where="resume"))
            source = sources[number % len(sources)]
            found.append(FileTransfer(name, source[number % len(source)], ranks[number % len(ranks)]))
    return found


def _files_of(index: Index, parts: Sequence[LocalPart]) -> set[str]:
    """Return the files with elements of these parts."""
    found = set()
    for part in parts:
        stored = index.tensors.get(part.key)
        for box in stored.parts if stored is not None and part.tensor.numel() else ():
            sizes = zip(box.offsets, box.sizes, part.offsets, part.tensor.shape)
            if all(start < other + size and other < start + length for start, length, other, size in sizes):
                found.add(box.file)
    return found


def transfer(
    transfers: Sequence[FileTransfer], sizes: Mapping[str, int], directory: Path, rank: int, group: dist.ProcessGroup
) -> OSError | None:
    """Send and receive this rank's files, one after the other, in an order that is the same on all ranks.

    Return an error of this rank's memory; the others do not wait for a rank that has one. The files are checked when
    they are loaded. The transfer that is first among those not done has both its ranks waiting for it: no deadlock.
    """
    error: OSError | None = None
    buffer = bytearray(min(BLOCK, max(sizes.values(), default=0)))
    for one in transfers:
        if rank not in (one.source, one.target):
            continue
        with _File(directory / one.name, writes=rank == one.target) as file:
            for start in range(0, sizes[one.name], len(buffer)):
                view = memoryview(buffer)[: min(len(buffer), sizes[one.name] - start)]
                if rank == one.source:
                    file.read(view)
                    dist.send(torch.frombuffer(view, dtype=torch.uint8), one.target, group=group)
                else:
                    dist.recv(torch.frombuffer(view, dtype=torch.uint8), one.source, group=group)
                    file.write(view)
        error = error or file.error
    return error


class _File:
    """A file that is read or written in blocks. After an error nothing is read or written any more."""

    def __init__(self, path: Path, writes: bool):
        self._stream: BinaryIO | None = None
        self.error: OSError | None = None
        try:
            path.parent.mkdir(exist_ok=True)
            self._stream = path.open("wb" if writes else "rb", buffering=0)
        except OSError as error:
            self.error = error

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def read(self, block: memoryview) -> None:
        self._try(lambda stream, part: cast(io.RawIOBase, stream).readinto(part) or 0, block)

    def write(self, block: memoryview) -> None:
        self._try(lambda stream, part: stream.write(part), block)

    def _try(self, do: Callable[[BinaryIO, memoryview], int], block: memoryview) -> None:
        try:
            while block and self.error is None and self._stream is not None:
                done = do(self._stream, block)
                if not done:
                    raise OSError("a file of the checkpoint is too short")
                block = block[done:]
        except OSError as error:
            self.error = error


def _agree(error: OSError | None, step: int, group: dist.ProcessGroup | None) -> None:
    """Raise SaveFailed on all ranks if one has an error. Collective, and no rank goes on before all have come here."""
    failed = torch.tensor([int(error is not None)])
    if group is not None:
        dist.all_reduce(failed, group=group)
    if failed.item():
        why = f": {error.strerror or error}" if error is not None else " on another rank"
        raise SaveFailed(Problem(f"the checkpoint of step {step} could not be kept in memory{why}"))
