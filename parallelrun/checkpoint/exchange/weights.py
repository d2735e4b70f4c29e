"""Stored weights by one-device name, of which any part can be read without the rest."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.checkpoint.index import Box, Index, verify_file, weight_key
from parallelrun.checkpoint.schema import check_header
from parallelrun.checkpoint.storage import read_slice
from parallelrun.config.stored_tensors import damaged, differ, files_of_keys, read_entries
from parallelrun.models.hugging_face import Family, FixedTensor, Piece
from parallelrun.planner.model.model_spec import ModelSpec

Ranges = Sequence[tuple[int, int]]  # [start, stop) of every dim
_SHOWN = 5
_NOT_LEARNED = re.compile(r".*(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias|embeddings\.position_ids)")
_MXFP4 = "_blocks"  # behind the name of a tensor whose numbers of 4 bits have scales of their own
_NUMBERS = ("F64", "F32", "F16", "BF16")


class Weights(ABC):
    """The logical tensors of one model. path: where they are, for messages."""

    def __init__(self, path: Path):
        self.path = path
        self._opened: dict[Path, Any] = {}

    @abstractmethod
    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The part `ranges` of a logical tensor, as stored. Reads no other bytes."""

    @abstractmethod
    def differences(self, spec: ModelSpec) -> list[str]:
        """Return a text for each tensor that is missing, unknown to the model, or of the wrong shape."""

    def holds(self, name: str) -> bool:
        """Return whether there is a parameter of that name. Of those that `differences` accepts, only adapters may be
        missing."""
        return True

    def verify(self) -> None:
        """Raise CheckpointError if a file is not what was written, where a sum of its bytes is known."""
        return None

    @property
    def unread(self) -> list[str]:
        """The keys of stored tensors with values of their own that the model does not have."""
        return []

    def whole(self, name: str, shape: Sequence[int]) -> Tensor:
        """A complete logical tensor of that shape."""
        return self.read(name, [(0, size) for size in shape])

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raise CheckpointError with the first differences from the model. where: the key of the user's request."""
        if differences := self.differences(spec):
            more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            message = f"{self.path} holds weights of another model: {'; '.join(differences[:_SHOWN])}{more}"
            raise CheckpointError(Problem(message, where))

    def _slice(self, file: Path, key: str, ranges: Ranges) -> Tensor:
        """A part of a tensor of a safetensors file. Raises CheckpointError."""
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt", device="cpu")
            return read_slice(self._opened[file], key, tuple(slice(*pair) for pair in ranges))
        except (OSError, SafetensorError) as error:
            raise damaged(file, f"{key} cannot be read ({error})") from error


class CheckpointWeights(Weights):
    """The weights of a checkpoint saved under any plan. Independent replicas: their mean."""

    def __init__(self, path: Path, index: Index):
        super().__init__(path)
        self.index = index
        self._tensors = index.weights()
        for name in index.files:
            check_header(index, path, name)

    def verify(self) -> None:
        for name in self.index.files:
            verify_file(self.index, self.path, name)

    def read(self, name: str, ranges: Ranges) -> Tensor:
        stored = self._tensors[name]
        box = Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))
        out = torch.empty(box.sizes, dtype=getattr(torch, stored.dtype))
        for part in stored.parts:
            if common := part.overlap(box):
                source = [(piece.start, piece.stop) for piece in part.slices(common)]
                out[box.slices(common)] = self._slice(self.path / part.file, weight_key(name), source)
        return out

    def differences(self, spec: ModelSpec) -> list[str]:
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        return _differences(shapes, {name: tuple(spec.parameters[name].shape) for name in stored_names(spec, shapes)})

    def holds(self, name: str) -> bool:
        return name in self._tensors


class LoadedWeights(Weights):
    """Weights that are in memory as a whole, by one-device name."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]):
        super().__init__(path)
        self._tensors = tensors

    def read(self, name: str, ranges: Ranges) -> Tensor:
        return self._tensors[name][tuple(slice(*pair) for pair in ranges)]

    def differences(self, spec: ModelSpec) -> list[str]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        return _differences(shapes, {name: tuple(spec.parameters[name].shape) for name in stored_names(spec, shapes)})

    def holds(self, name: str) -> bool:
        return name in self._tensors


class FileWeights(Weights):
    """The weights of safetensors files in which parameters are stored as `pieces` say, beside constants.

    family: names the spellings of keys and those that may be left unread; None for our own names. has_more: tensors
    that the model does not have are left unread.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        pieces: Iterable[Piece],
        constants: Mapping[str, FixedTensor] | None = None,
        family: Family | None = None,
        has_more: bool = False,
    ):
        super().__init__(path)
        self._has_more = has_more
        self._family, self._constants = family, constants or {}
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.parameter, []).append(piece)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in spec.parameters.items()}
        self._file_of = files_of_keys(path)

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """Shape and dtype of every stored tensor, by its key. Raises CheckpointError."""
        entries: dict[str, dict[str, Any]] = {}
        for file in sorted(set(self._file_of.values())):
            for key, entry in read_entries(file).items():
                if self._file_of.get(key) == file:
                    entries[key] = entry
        if lost := sorted(self._file_of.keys() - entries.keys()):
            raise damaged(self.path, f"{lost[0]} is not in {self._file_of[lost[0]].name}")
        return entries

    def _spelled(self, key: str) -> str:
        spellings = self._family.spellings(key) if self._family else (key,)
        return next((spelling for spelling in spellings if spelling in self._file_of), key)

    def holds(self, name: str) -> bool:
        return name in self._pieces

    def read(self, name: str, ranges: Ranges) -> Tensor:
        part = self._read_pieces(name, ranges)
        for key in self._added_to(name):
            row = self._slice(self._file_of[key], key, [(0, 1), *ranges[1:]])
            part = part.to(torch.promote_types(part.dtype, torch.float32)) + row
        return part

    def _added_to(self, name: str) -> list[str]:
        """The keys of stored tensors whose row 0 is added to a parameter."""
        spelled = (self._spelled(key) for key, constant in self._constants.items() if constant.added_to == name)
        return [key for key in spelled if key in self._file_of]

    def _read_pieces(self, name: str, ranges: Ranges) -> Tensor:
        pieces = self._pieces[name]
        if pieces[0].index is None:
            return self._read_piece(pieces[0], ranges)
        wanted = [piece for piece in pieces if piece.index is not None and ranges[0][0] <= piece.index < ranges[0][1]]
        parts = [self._read_piece(piece, ranges[1:]) for piece in sorted(wanted, key=lambda piece: piece.index or 0)]
        if parts:
            return torch.stack(parts)
        return torch.empty([stop - start for start, stop in ranges])

    def _read_piece(self, piece: Piece, ranges: Ranges) -> Tensor:
        """ranges: of the piece, seen as the parameter is."""
        (first, last), *others = ranges
        start, key = piece.start + first * piece.step, self._spelled(piece.key)
        shifted = [(start, max(start, piece.rows(last).stop)), *others]
        stack = [(piece.index, piece.index + 1)] if piece.stacked and piece.index is not None else []
        part = self._slice(self._file_of[key], key, [*stack, *(shifted[::-1] if piece.transposed else shifted)])
        part = part[0] if stack else part
        part = (part.t() if piece.transposed else part)[:: piece.step]
        return part.to(torch.promote_types(part.dtype, torch.float32)) + piece.offset if piece.offset else part

    def differences(self, spec: ModelSpec) -> list[str]:
        wanted = stored_shapes(self._pieces, self._shapes, self._constants)
        ours: dict[str, str] = {}
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            ours[piece.key] = f"{ours[piece.key]}, {piece.parameter}" if piece.key in ours else piece.parameter
        spelled = {self._spelled(key): key for key in wanted}
        known = [key for key in self._entries if key in spelled or key.removesuffix(_MXFP4) in spelled]
        if quantised := [key for key in known if not _holds_numbers(self._entries[key])]:
            others = f" (and {len(quantised) - 1} more)" if len(quantised) > 1 else ""
            kind = "MXFP4" if quantised[0].endswith(_MXFP4) else self._entries[quantised[0]].get("dtype")
            return [f"{quantised[0]}{others} is stored as {kind}: quantised weights are not read; convert them to bf16"]
        stored = {
            spelled.get(key, key): tuple(entry["shape"])
            for key, entry in self._entries.items()
            if key in spelled or not (self._family.is_skipped(key) if self._family else self._has_more)
        }
        needed = {key: shape for key, shape in wanted.items() if key in stored or key not in self._constants}
        for key, constant in self._constants.items():
            if constant.added_to and key in stored:
                needed[key] = (max(1, stored[key][0]), *constant.shape[1:])
        return _differences(stored, needed, ours) or self._wrong_constants() or self._wrong_copies(wanted)

    @property
    def unread(self) -> list[str]:
        keys_read = {self._spelled(piece.key) for pieces in self._pieces.values() for piece in pieces}
        keys_read |= {self._spelled(key) for key in self._constants} | {copy for copy, _ in self._copies}
        return [key for key in self._file_of if key not in keys_read and not _NOT_LEARNED.fullmatch(key)]

    @property
    def _copies(self) -> tuple[tuple[str, str], ...]:
        return self._family.copies if self._family else ()

    def _wrong_copies(self, wanted: Mapping[str, Any]) -> list[str]:
        """Messages about tensors that are not read, because a file should hold them twice, but have other values."""
        return [
            f"{copy} differs from {self._spelled(original)}, and the model has one tensor for both"
            for copy, original in self._copies
            if copy not in wanted and differ(self.path, copy, (self._spelled(original),))
        ]

    def _wrong_constants(self) -> list[str]:
        messages = []
        for key, constant in self._constants.items():
            name = self._spelled(key)
            if name in self._file_of and not constant.added_to:
                stored = self._slice(self._file_of[name], name, [(0, size) for size in self._entries[name]["shape"]])
                if not bool((stored == constant.value).all()):
                    messages.append(f"{name} is not {constant.value:g} everywhere, and our model has no such tensor")
        return messages


def stored_names(spec: ModelSpec, stored: Collection[str]) -> list[str]:
    """Return the names of the parameters that weights must have: adapters only if some of them are in `stored`."""
    has_adapters = any(parameter.is_adapter and name in stored for name, parameter in spec.parameters.items())
    return [name for name, parameter in spec.parameters.items() if has_adapters or not parameter.is_adapter]


def _holds_numbers(entry: dict[str, Any]) -> bool:
    """Whether a tensor means something without scales beside it, unlike integers and fp8."""
    return entry.get("dtype") in _NUMBERS


def stored_shapes(
    pieces: Mapping[str, Sequence[Piece]], shapes: Mapping[str, tuple[int, ...]], constants: Mapping[str, FixedTensor]
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a file holds, by its key. pieces, shapes: by parameter."""
    shape_of: dict[str, tuple[int, ...]] = {}
    for name, parts in pieces.items():
        for piece in parts:
            shape_of[piece.key] = piece.stored_shape(shapes[name], len(parts), shape_of.get(piece.key))
    return {**shape_of, **{key: constant.shape for key, constant in constants.items()}}


def _differences(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], ours: Mapping[str, str] | None = None
) -> list[str]:
    """Messages about the stored tensors that are not the wanted ones. ours: our name of each, if it has another."""

    def named(key: str) -> str:
        name = (ours or {}).get(key, key)
        return key if name == key else f"{key} ({name})"

    shapes = [
        f"{named(key)} is {list(stored[key])} there, {list(shape)} in the model"
        for key, shape in wanted.items()
        if key in stored and stored[key] != shape
    ]
    missing = [f"{named(key)} {list(shape)} is not there" for key, shape in wanted.items() if key not in stored]
    unknown = [f"{key} {list(shape)} is not in the model" for key, shape in stored.items() if key not in wanted]
    return [*shapes, *missing, *unknown]
