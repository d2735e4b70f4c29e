"""Attention inside documents that are packed into samples, one after the other (`dataset.pack`).

Fused attention runs for each document, or for several equal ones that follow each other: no tensor has seq x seq
elements, and the time is that of the documents apart. The boundaries are numbers on the host, which every rank reads
from the dataset itself, so they are in no message.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.models import functions
from parallelrun.models.autograd import apply
from parallelrun.planner.model.definitions import IGNORED


class DocumentBounds:
    """The documents of the samples of a batch.

    lengths: of the documents of each sample, in order; what they leave of a sample is padding. positions: int64
    (samples, seq), of each token inside its document; 0 in padding. No dataclass: torch.compile would read the lengths
    of a frozen one, and compile again for others.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], positions: Tensor):
        self.lengths, self.positions = lengths, positions

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], seq: int) -> DocumentBounds:
        """The documents of samples of `seq` tokens."""
        positions = torch.zeros(len(lengths), seq, dtype=torch.int64)
        for row, each in zip(positions, lengths):
            sizes = torch.tensor(each, dtype=torch.int64)
            ends = sizes.cumsum(0)
            used = int(ends[-1]) if each else 0
            row[:used] = torch.arange(used) - torch.repeat_interleave(ends - sizes, sizes)
        return cls([tuple(map(int, each)) for each in lengths], positions)

    @cached_property
    def is_token(self) -> Tensor | None:
        """bool (samples, seq): False in padding. None: there is none."""
        seq, used = self.positions.size(1), [sum(each) for each in self.lengths]
        if min(used) == seq:
            return None
        device = self.positions.device
        return torch.arange(seq, device=device) < torch.tensor(used, device=device).unsqueeze(1)

    def samples(self, start: int, stop: int) -> DocumentBounds:
        """Return the bounds of the samples [start, stop)."""
        return DocumentBounds(self.lengths[start:stop], self.positions[start:stop])

    def part(self, index: int, count: int) -> DocumentBounds:
        """Return the bounds of part `index` of `count` equal parts of the samples."""
        size = len(self.lengths) // count
        return self if count == 1 else self.samples(index * size, (index + 1) * size)

    def positions_of(self, indices: Tensor) -> Tensor:
        """int64 (samples, len(indices)): the positions, in their documents, of these tokens of each sample."""
        return self.positions.index_select(1, indices)

    def map(self, change: Callable[[Tensor], Tensor]) -> DocumentBounds:
        """The same with `change` of the positions."""
        return DocumentBounds(self.lengths, change(self.positions))


class _Scope(threading.local):
    """One per thread, as that of `dropout`. documents: of the innermost open `scope`; None: samples are no packs."""

    documents: DocumentBounds | None = None


SCOPE = _Scope()


@contextmanager
def _opened(documents: DocumentBounds) -> Iterator[None]:
    outer = SCOPE.documents
    SCOPE.documents = documents
    try:
        yield
    finally:
        SCOPE.documents = outer


def scope(documents: DocumentBounds | None) -> AbstractContextManager[None]:
    """While open, attention stays inside these documents and positions restart in each. None: samples are no packs."""
    return nullcontext() if documents is None else _opened(documents)


def tokens_ahead(samples: Tensor, documents: DocumentBounds | None, depth: int) -> Tensor:
    """What multi-token prediction reads of samples (n, 2, seq), inputs and targets, 1, ..., depth tokens further ahead:
    (n, 2, depth, seq). Its targets end with the sample or document; inputs repeat the last one where there is none."""
    places = torch.arange(samples.size(-1))
    own = places.expand(len(samples), -1) if documents is None else documents.positions
    later = (places + torch.arange(1, depth + 1).unsqueeze(1)).clamp(max=len(places) - 1)
    inputs, targets = samples[..., later].unbind(1)
    follows = own[:, later] == own.unsqueeze(1) + torch.arange(1, depth + 1).unsqueeze(1)
    return torch.stack((inputs, targets.where(follows, IGNORED)), 1)


@dataclass(frozen=True)
class _Run:
    """`count` documents of `length` tokens each, one after the other from token `start` of a sample on."""

    sample: int
    start: int
    count: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """The view (count, heads, length, ...) of x (samples, heads, seq, ...)."""
        if self.count == 1:
            return x[self.sample : self.sample + 1, :, self.start : self.start + self.length]
        mine = x[self.sample, :, self.start : self.start + self.count * self.length]
        return mine.view(mine.size(0), self.count, self.length, *mine.shape[2:]).transpose(0, 1)


def _runs(documents: DocumentBounds) -> Iterator[_Run]:
    for sample, lengths in enumerate(documents.lengths):
        start = 0
        for length, equal in itertools.groupby(lengths):
            count = len(list(equal))
            yield _Run(sample, start, count, length)
            start += count * length


def _new_heads(like: Tensor, documents: DocumentBounds) -> Tensor:
    """A new tensor like (samples, heads, seq, head_dim), with the heads of a token together and padding 0."""
    samples, heads, seq, size = like.shape
    new = like.new_empty(samples, seq, heads, size)
    for row, lengths in zip(new, documents.lengths):
        row[sum(lengths) :] = 0
    return new.transpose(1, 2)


class _DocumentAttention(torch.autograd.Function):
    """Fused attention of every document into one result, which the next layer keeps too."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: DocumentBounds, causal: bool) -> Tensor:
        out = _new_heads(query, documents)
        lse = query.new_empty(query.shape[:3], dtype=functions.accurate_dtype(query.dtype))
        for run in _runs(documents):
            result, statistic = torch_private.fused_attention(run.of(query), run.of(key), run.of(value), causal)
            run.of(out).copy_(result)
            run.of(lse).copy_(statistic)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.documents, ctx.causal = documents, causal
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        gradients = [_new_heads(tensor, ctx.documents) for tensor in (query, key, value)]
        for run in _runs(ctx.documents):
            q, k, v = (run.of(tensor) for tensor in (query, key, value))
            parts = torch_private.fused_attention_backward(
                run.of(gradient), q, k, v, run.of(out), run.of(lse), ctx.causal
            )
            for target, part in zip(gradients, parts, strict=True):
                run.of(target).copy_(part)
        return (*gradients, None, None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: DocumentBounds, causal: bool, window: int | None = None
) -> Tensor:
    """Attention (samples, heads, seq, head_dim) of every document to itself; 0 in padding."""
    if window is not None and window >= max(map(max, filter(None, documents.lengths)), default=0):
        window = None
    if window is None and torch_private.has_fused_attention(query, key):
        return apply(_DocumentAttention, query, key, value, documents, causal)

    def attend_one(q: Tensor, k: Tensor, v: Tensor, sample: int, start: int) -> Tensor:
        return functions.attend(q, k, v, causal, window)

    return attend_each(query, key, value, documents, attend_one)


# Called with query, key and value of one document, (1, heads, length, head_dim), its sample and its first token.
Attend = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def attend_each(query: Tensor, key: Tensor, value: Tensor, documents: DocumentBounds, attend_one: Attend) -> Tensor:
    """The same by `attend_one` for each document; autograd finds the gradients."""
    samples, seq = [], query.size(2)
    for sample, lengths in enumerate(documents.lengths):
        sizes = [*lengths, seq - sum(lengths)]
        *queries, padding = query[sample : sample + 1].split(sizes, dim=2)
        keys, values = (x[sample : sample + 1].split(sizes, dim=2) for x in (key, value))
        starts = itertools.accumulate(lengths, initial=0)
        outputs = [attend_one(q, k, v, sample, start) for q, k, v, start in zip(queries, keys, values, starts)]
        samples.append(torch.cat([*outputs, torch.zeros_like(padding)], dim=2))
    return torch.cat(samples)
