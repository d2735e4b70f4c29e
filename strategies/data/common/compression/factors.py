"""The arithmetic of PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2), one matrix at a time or stacked.

A gradient M (rows x columns) is approximated by P Q^T with P = M Q made orthonormal and Q = M^T P: one step of subspace
iteration, started from the last step's Q. Sums of M, P and Q over ranks stand for M, P and Q, so two small all-reduces
sum the approximation.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor


def first_right_factor(name: str, columns: int, rank: int) -> Tensor:
    """The Q (columns, rank) that a parameter starts from: the same on every rank and in every run. fp64, on the CPU."""
    generator = torch.Generator().manual_seed(crc32(f"{name} {columns} {rank}".encode()))
    return unit_columns(torch.randn(columns, rank, generator=generator, dtype=torch.float64))


def unit_columns(matrices: Tensor) -> Tensor:
    """(..., n, r) with every column scaled to length 1; columns of zeros stay."""
    lengths = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    return matrices / torch.where(lengths > 0, lengths, 1.0)


def orthonormal(matrices: Tensor) -> Tensor:
    """Columns of (..., n, r) made orthonormal by Gram and Schmidt, each projected twice.

    A column that lies in the span of those before it, up to the cube root of the precision, becomes zero: what is left
    of it is rounding, and would point elsewhere on every machine.
    """
    out = torch.zeros_like(matrices)
    lengths = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    least = torch.finfo(matrices.dtype).eps ** (1 / 3) * lengths.amax(dim=-1, keepdim=True)
    for index in range(matrices.shape[-1]):
        column, before = matrices[..., index : index + 1], out[..., :index]
        for _ in range(2 if index else 0):
            column = column - before @ (before.mT @ column)
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        out[..., index : index + 1] = torch.where(length > least, column / torch.where(length > 0, length, 1.0), 0.0)
    return out


def next_right_factor(summed: Tensor, first: Tensor) -> Tensor:
    """Return the right factor of the next step: this step's summed Q with columns of norm 1. A column of zeros starts
    again from the first Q."""
    is_used = torch.linalg.vector_norm(summed, dim=-2, keepdim=True) > 0
    return torch.where(is_used, unit_columns(summed), first)
