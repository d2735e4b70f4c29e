"""Adasum (Maleki et al. 2021): updates are combined in pairs; orthogonal ones are added, parallel ones averaged.

    a + b  becomes  (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b        per tensor

`dots` and `weigh` are the arithmetic; `all_combine` does it over a group, each rank on its part of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group

from ..common.allreduce.rounds import halvings


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return (a.b, |a|^2, |b|^2) of two flat tensors in fp64."""
    a, b = a.double(), b.double()
    return torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])


def weigh(a: Tensor, b: Tensor, products: Tensor) -> Tensor:
    """Return the combination of a and b, given `dots` of the tensors that they are parts of.

    fp16 and bf16 are added in fp32.
    """
    dot, of_a, of_b = products.unbind()
    for_a = torch.where(of_a > 0, 1 - dot / (2 * of_a).clamp_min(1e-300), 1.0)
    for_b = torch.where(of_b > 0, 1 - dot / (2 * of_b).clamp_min(1e-300), 1.0)
    wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
    return (a.to(wide) * for_a.to(wide) + b.to(wide) * for_b.to(wide)).to(a.dtype)


def all_combine(vector: Tensor, lengths: Sequence[int], group: Group) -> None:
    """Combine the flat `vector`, made of tensors of those lengths, over the group, in place; all get the same bits.

    The group's size is a power of two. Every member calls it with the same lengths.
    """
    steps = halvings(vector.numel(), group.size, group.index)
    spans = list(pairwise(accumulate(lengths, initial=0)))
    for number, step in enumerate(steps, start=1):
        low, high = step.keep
        half = vector[low:high]
        theirs = torch.empty_like(half)
        _swap(vector[slice(*step.give)], theirs, group, step.distance)
        first, second = (theirs, half) if group.index & step.distance else (half, theirs)
        inside = [  # (tensor, its part of `half`)
            (tensor, slice(max(start, low) - low, min(stop, high) - low))
            for tensor, (start, stop) in enumerate(spans)
            if max(start, low) < min(stop, high)
        ]
        products = torch.zeros(len(lengths), 3, dtype=torch.float64, device=vector.device)
        for tensor, part in inside:
            products[tensor] = dots(first[part], second[part])
        for power in range(number):  # sums of pairs of pairs: the same bits on both sides of each swap
            other = torch.empty_like(products)
            _swap(products, other, group, 2**power)
            products += other
        for tensor, part in inside:
            half[part] = weigh(first[part], second[part], products[tensor])
    for step in reversed(steps):
        _swap(vector[slice(*step.keep)], vector[slice(*step.give)], group, step.distance)


def _swap(mine: Tensor, theirs: Tensor, group: Group, distance: int) -> None:
    """Send `mine` to the member at that distance and receive its tensor into `theirs`."""
    peer = group.index ^ distance
    for work in comm.exchange([(mine, peer)], [(theirs, peer)], group, "parameters"):
        work.wait()
