"""Notices which tensors change while nobody may write to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from parallelrun.training.corruption.digests import Bits, Checksums, are_equal, numbers

Sums = Sequence[tuple[Sequence[str], Checksums]]  # names of tensors, and the checksum of each


class AtRest:
    """Notices which of some tensors change between updates. Their storage must stay the same.

    Tensors that are updated in chunks are read around the update of their chunk, while they are in the cache.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = dict(tensors)
        self._chunks: Sequence[Sequence[Tensor]] = ()
        self._rest, self._parts = _Part(self._tensors), list[_Part]()
        self._seen: list[str] = []

    def begin(self, chunks: Sequence[Sequence[Tensor]] = (), again: bool = False) -> None:
        """From now on the tensors rest, those of `chunks` until `updating` is entered.

        It takes the checksums, but for chunks whose checksums are known. again: of all: their values were replaced.
        """
        if chunks is not self._chunks:
            self._divide(chunks)
        self._rest.begin()
        for part in self._parts:
            if again or not part.is_known:
                part.begin()

    def _divide(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        rest, self._chunks, self._parts = dict(self._tensors), chunks, []
        name_of = {_place(tensor): name for name, tensor in rest.items()}
        for chunk in chunks:
            names = [name_of[_place(one)] for one in chunk if one.numel() and _place(one) in name_of]
            self._parts.append(_Part({name: rest.pop(name) for name in names}))
        self._rest = _Part(rest)

    @contextmanager
    def updating(self, number: int | None) -> Iterator[None]:
        """Around the update of a chunk, or of all tensors (None): checks them before and takes their checksums after.

        Of all: the next `begin` takes them.
        """
        parts = self._parts if number is None else self._parts[number : number + 1]
        self._seen += [name for part in parts for name in part.changed()]
        yield
        for part in parts:
            part.is_known = number is not None
            if part.is_known:
                part.begin()

    @property
    def sums(self) -> Sums:
        """The checksums of all tensors as they were at `begin`, which has been called."""
        return [(part.names, part.sums) for part in (self._rest, *self._parts)]

    def changed(self, *, chunks: bool = True) -> list[str]:
        """Return the names of the tensors that have changed since `begin`; none before the first one.

        chunks: look at those of chunks as well.
        """
        return [name for part in (self._rest, *(self._parts if chunks else ())) for name in part.changed()]

    def noted(self) -> list[str]:
        """Return the names that `updating` has found since this was last called."""
        seen, self._seen = self._seen, []
        return seen


def are_same(sums: Sums, others: Sums) -> bool:
    """Return whether two `sums` are equal, in whatever chunks they were taken."""
    return _by_name(sums) == _by_name(others)


def _by_name(sums: Sums) -> dict[str, int]:
    return {name: one for names, of_part in sums for name, one in zip(names, numbers(of_part))}


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


class _Part:
    """Some of the tensors, which are read together. is_known: `sums` are those of their present values."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.names, self._bits = list(tensors), Bits(list(tensors.values()))
        self.sums: Checksums = []
        self.is_known = False

    def begin(self) -> None:
        self.sums, self.is_known = self._bits.read(), True

    def changed(self) -> list[str]:
        if not self.is_known:
            return []
        now = self._bits.read()
        if are_equal(self.sums, now):
            return []
        return [name for name, old, new in zip(self.names, numbers(self.sums), numbers(now)) if old != new]
