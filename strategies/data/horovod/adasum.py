"""Adasum (Maleki et al. 2021): updates are combined in pairs, orthogonal ones added, parallel ones averaged.

    a + b  becomes  (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b        per tensor

`combine` is the arithmetic; `all_combine` does it over a group, each rank on its part of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh import Group

from .halving import HalvingLevel, levels


def dots(a: Tensor, b: Tensor) -> Tensor:
    """(a.b, |a|^2, |b|^2) of two flat tensors, fp64."""
    a, b = a.double(), b.double()
    return torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])


def weigh(a: Tensor, b: Tensor, products: Tensor) -> Tensor:
    """The combination of a and b, given `dots` of the whole tensors that they are parts of. fp16 sums in fp32."""
    dot, of_a, of_b = products.unbind()
    for_a = torch.where(of_a > 0, 1 - dot / (2 * of_a).clamp_min(1e-300), 1.0)
    for_b = torch.where(of_b > 0, 1 - dot / (2 * of_b).clamp_min(1e-300), 1.0)
    wide = torch.float32 if a.dtype == torch.float16 else a.dtype
    return (a.to(wide) * for_a.to(wide) + b.to(wide) * for_b.to(wide)).to(a.dtype)


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Two whole tensors of the same shape, combined."""
    return weigh(a, b, dots(a.flatten(), b.flatten()))


def all_combine(vector: Tensor, lengths: Sequence[int], group: Group) -> None:
    """Combine the flat `vector`, made of tensors of those lengths, over the group, in place; all get the same bits.

    The group's size is a power of two. Every member calls it with the same lengths.
    """
    steps = levels(vector.numel(), group.size, group.index)
    spans = _spans(lengths)
    for number, level in enumerate(steps, start=1):
        kept = vector[slice(*level.keep)]
        theirs = torch.empty_like(kept)
        _swap(vector[slice(*level.give)], theirs, group, level.distance)
        own_is_second = bool(group.index & level.distance)
        first, second = (theirs, kept) if own_is_second else (kept, theirs)
        inside = _inside(spans, level)
        products = torch.zeros(len(lengths), 3, dtype=torch.float64, device=vector.device)
        for tensor, start, stop in inside:
            products[tensor] = dots(first[start:stop], second[start:stop])
        for power in range(number):  # sums of pairs of pairs: the same bits on both sides of each swap
            other = torch.empty_like(products)
            _swap(products, other, group, 2**power)
            products += other
        for tensor, start, stop in inside:
            kept[start:stop] = weigh(first[start:stop], second[start:stop], products[tensor])
    for level in reversed(steps):
        _swap(vector[slice(*level.keep)], vector[slice(*level.give)], group, level.distance)


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    out, start = [], 0
    for length in lengths:
        out.append((start, start + length))
        start += length
    return out


def _inside(spans: Sequence[tuple[int, int]], level: HalvingLevel) -> list[tuple[int, int, int]]:
    """(tensor, start, stop) of what of each tensor lies in the kept part, counted from that part's start."""
    low, high = level.keep
    found = [(n, max(start, low) - low, min(stop, high) - low) for n, (start, stop) in enumerate(spans)]
    return [(tensor, start, stop) for tensor, start, stop in found if start < stop]


def _swap(mine: Tensor, theirs: Tensor, group: Group, distance: int) -> None:
    """Send `mine` to the member at that distance, receive its into `theirs`."""
    peer = group.index ^ distance
    for work in comm.exchange([(mine, peer)], [(theirs, peer)], group, "parameters"):
        work.wait()
