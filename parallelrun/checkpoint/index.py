"""`index.json`: the tensors of a checkpoint, the file of each part, and the sha256 of all files and of itself.

It needs no torch, so a checkpoint is checked against a model before any process is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.base.records import sha256_of
from parallelrun.checkpoint.files import size_of
from parallelrun.planner.contract.optimizers import OPTIMIZERS, update_rule
from parallelrun.planner.contract.plan import Plan

INDEX_FILE = "index.json"
DATA_FILE = re.compile(r"rank_\d{5,}\.safetensors")
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "int64": ("I64", 8),
    "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # torch's name -> (safetensors' name, bytes)  # fmt: skip
_REPLICA = re.compile(r"replica/\d+of\d+/")
_SHOWN = 5


@dataclass(frozen=True)
class Box:
    """The range [offset, offset + size) in each dim of a logical tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """Return the range that both have in common, or None."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes)]
        sizes = tuple(stop - start for start, stop in zip(offsets, stops))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, part: Box) -> tuple[slice, ...]:
        """Return where a part of this box is in a tensor that has this box's elements."""
        starts = [inner - outer for inner, outer in zip(part.offsets, self.offsets)]
        return tuple(slice(start, start + size) for start, size in zip(starts, part.sizes))


@dataclass(frozen=True)
class StoredPart(Box):
    """A box of a logical tensor, stored under the tensor's key in `file`."""

    file: str


@dataclass(frozen=True)
class StoredTensor:
    """One logical tensor: dtype as torch spells it, global shape, and the parts that together cover it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Index:
    """The content of `index.json`.

    tensors: by key, see `weight_key` and `state_key`. files: (bytes, sha256) by name. extra: the caller's JSON. plan:
    degrees and strategies under which it was saved, for messages. digest: sha256 of the index file.
    """

    step: int
    optimizer: str
    plan: Mapping[str, Any]
    extra: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, tuple[int, str]]
    digest: str = field(default="", compare=False)

    @property
    def num_bytes(self) -> int:
        """Size of all data files."""
        return sum(size for size, _ in self.files.values())

    def weights(self) -> dict[str, StoredTensor]:
        """The stored parameters by one-device name."""
        return {key[len("model/") :]: value for key, value in self.tensors.items() if key.startswith("model/")}

    @cached_property
    def state_kinds(self) -> dict[str, list[str]]:
        """The kinds of stored optimizer state (`exp_avg`, ...) by parameter name; empty before the first step."""
        kinds: dict[str, list[str]] = {}
        for _, kind, name in (key.split("/", 2) for key in self.tensors if key.startswith("optimizer/")):
            kinds.setdefault(name, []).append(kind)
        return kinds


def weight_key(name: str) -> str:
    return f"model/{name}"


def state_key(kind: str, name: str) -> str:
    return f"optimizer/{kind}/{name}"


def kept_key(kind: str, name: str) -> str:
    """The key of a data strategy's additional tensor (kind: `outer/shared`, ...). Other strategies do not read it."""
    return f"{kind}/{name}"


def replica_key(replica: int, num_replicas: int, key: str) -> str:
    """The key of one independent replica's own tensor. `key` itself names the mean over all replicas."""
    return f"replica/{replica}of{num_replicas}/{key}"


def stored_tensors(parts_by_rank: Sequence[Sequence[Any]], files: Sequence[str]) -> dict[str, StoredTensor]:
    """Return the tensors by key, from the description of each rank's parts (`LocalPart.described`) and its file."""
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    stored: dict[str, list[StoredPart]] = {}
    for parts, file in zip(parts_by_rank, files, strict=True):
        for key, dtype, shape, offsets, sizes in parts:
            described[key] = dtype, tuple(shape)
            stored.setdefault(key, []).append(StoredPart(tuple(offsets), tuple(sizes), file))
    return {key: StoredTensor(*described[key], tuple(parts)) for key, parts in stored.items()}


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Describe the plan in a few plain values, for messages."""
    return {
        "world": plan.world,
        "degrees": plan.degrees,
        "data": plan.data.kind,
        "shard": plan.data.shard,
        "tensor": plan.tensor.kind,
        "pipeline": plan.pipeline.kind,
        "chunks": plan.pipeline.virtual_stages,
        "precision": plan.precision.name,
    }


def reshard_note(index: Index, plan: Plan) -> str | None:
    """Return a sentence if the checkpoint was saved under another plan than `plan`, else None."""
    before, now = dict(index.plan), describe_plan(plan)
    if before == now:
        return None

    def words(described: Mapping[str, Any]) -> str:
        degrees = " ".join(f"{axis}={degree}" for axis, degree in described.get("degrees", {}).items() if degree > 1)
        return f"{degrees or 'one device'} ({described.get('data')}, {described.get('pipeline')})"

    return f"resharding the checkpoint of step {index.step}: {words(before)} -> {words(now)}"


def missing_files(index: Index, path: Path) -> list[str]:
    """Return messages about data files that are absent or have another size."""
    wrong = []
    for name, (expected, _) in index.files.items():
        size = size_of(path / name)
        if size != expected:
            difference = "is missing" if size is None else f"has {size} bytes, expected {expected}"
            wrong.append(f"{path / name} {difference}")
    return wrong


def verify_file(index: Index, path: Path, name: str) -> None:
    """Raise CheckpointError unless a data file has the size and sha256 with which it was written."""
    expected = index.files[name]
    if wrong := missing_files(replace(index, files={name: expected}), path):
        raise _unusable(wrong[0])
    try:
        digest = sha256_of(path / name)
    except OSError as error:
        raise CheckpointError(Problem(f"cannot read {path / name}: {error.strerror}")) from error
    if digest != expected[1]:
        raise broken(path / name, f"its sha256 is {digest}, expected {expected[1]}")


def check_model(index: Index, plan: Plan, path: Path) -> None:
    """Raise CheckpointError with the first differences and their counts if the checkpoint is of another model.

    Degrees, strategies and world may differ. Parameter names, shapes, dtype, and the optimizer with its state must not.
    """
    stored = index.weights()
    wanted = plan.spec.parameters
    dtype = plan.precision.stored
    missing = [f"{name} {list(p.shape)} is not in the checkpoint" for name, p in wanted.items() if name not in stored]
    surplus = [f"{name} {list(t.shape)} is not in the model" for name, t in stored.items() if name not in wanted]
    both = [(name, tensor, wanted[name]) for name, tensor in stored.items() if name in wanted]
    shapes = [
        f"{name} is {list(tensor.shape)} in the checkpoint, {list(parameter.shape)} in the model"
        for name, tensor, parameter in both
        if tensor.shape != tuple(parameter.shape)
    ]
    dtypes = [
        f"{name} is {tensor.dtype} in the checkpoint, {p.stored or dtype} under precision={plan.precision.name}"
        for name, tensor, p in both
        if tensor.dtype != (p.stored or dtype)
    ]
    differences = [*missing, *surplus, *shapes, *dtypes]
    if differences:
        counts = f"{len(missing)} missing, {len(surplus)} unknown, {len(shapes)} of another shape"
        counts += f", {len(dtypes)} of another dtype; {len(stored)} stored, {len(wanted)} wanted"
        first = "; ".join(differences[:_SHOWN])
        raise CheckpointError(Problem(f"{path} is a checkpoint of another model ({counts}): {first}", where="resume"))
    if index.optimizer != plan.optimizer:
        message = f"{path} was saved with optimizer={index.optimizer}, this run has optimizer={plan.optimizer}"
        raise CheckpointError(Problem(message, where="optimizer", suggestion=f"optimizer={index.optimizer}"))
    if differences := _wrong_state(index, plan):
        message = f"{path / INDEX_FILE} has {len(differences)} tensors that no training of this model saves: "
        raise CheckpointError(Problem(message + "; ".join(differences[:_SHOWN]), where="resume"))


def _wrong_state(index: Index, plan: Plan) -> list[str]:
    """Return messages about tensors that are neither weights nor state of the plan's parameters in shape and dtype."""
    additional = tuple(f"{kind}/" for kind in index.extra.get("kept", ()))
    names = {name: tuple(parameter.shape) for name, parameter in plan.spec.parameters.items()}
    kinds_of = plan.precision.stored, plan.precision.accurate  # of weights, and of what is kept beside them
    dtypes = {name: [p.stored or dtype for dtype in kinds_of] for name, p in plan.spec.parameters.items()}
    wrong = []
    for key, tensor in index.tensors.items():
        base = _REPLICA.sub("", key, count=1)
        prefix = next((start for start in ("model/", *additional) if base.startswith(start)), "")
        kind, name = ("", base[len(prefix) :]) if prefix else (base.split("/", 2) + ["", ""])[1:3]
        if name not in names or not (prefix or base.startswith("optimizer/")):
            wrong.append(f"{key} belongs to no parameter")
        elif tensor.shape != _own_shape(prefix, names[name]) and not (kind and tensor.shape == ()):
            wrong.append(f"{key} is {list(tensor.shape)}, its parameter {list(names[name])}")
        elif tensor.dtype != (dtype := dtypes[name][prefix != "model/"]) and (kind, tensor.dtype) != (
            "step",
            "float32",
        ):
            wrong.append(f"{key} is {tensor.dtype}, expected {dtype}")
    for name, kinds in index.state_kinds.items():
        rule = update_rule(plan.spec.parameters[name], plan) if name in names else plan.optimizer
        wanted = OPTIMIZERS[rule].state_names
        if set(kinds) != wanted:
            wrong.append(f"the state of {name} is {sorted(kinds)}, {rule} has {sorted(wanted)}")
    return wrong


def _own_shape(prefix: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a kind of additional tensors has in its name (`powersgd/error of 4x16`), else the parameter's."""
    sized = re.fullmatch(r".* of (\d+(?:x\d+)*)/", prefix)
    return tuple(map(int, sized[1].split("x"))) if sized else shape


def broken(path: Path, cause: str) -> CheckpointError:
    """Return the error for a damaged file of a checkpoint."""
    return _unusable(f"{path} is damaged: {cause}")


def _unusable(message: str) -> CheckpointError:
    earlier = "resume=<an earlier step of the same run>; nothing was loaded"
    return CheckpointError(Problem(message, where="resume", suggestion=earlier))
