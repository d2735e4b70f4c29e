"""Dropout masks by hash: the same element of the same sample is dropped under every plan and on every device.

mask = hash(seed, sample id, site, global element index) by integer mixing in torch operations: no torch generator, so
recomputation, other ranks and a GPU derive the same mask (counter-based, see Salmon et al., SC11). The sample id
contains the step (`(step - 1) * global_batch + i`). Keys of rows are mixed in 64 bits (splitmix64, Steele et al. 2014);
elements inside a row in 32 bits, because they dominate the time.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# One per thread: backward runs recomputed blocks in its own. Not a ContextVar: torch.compile cannot read those.
_scope = threading.local()


@contextmanager
def scope(sample_ids: Tensor | None) -> Iterator[None]:
    """While open, dropout layers drop for these samples. sample_ids: int64 (batch,); None: unknown."""
    outer = current_sample_ids()
    _scope.sample_ids = sample_ids
    try:
        yield
    finally:
        _scope.sample_ids = outer


def current_sample_ids() -> Tensor | None:
    """The sample ids of the innermost open `scope`, or None."""
    return getattr(_scope, "sample_ids", None)


def sample_ids_at(site: str, count: int, part: tuple[int, int] = (0, 1)) -> Tensor:
    """The `count` sample ids that are part (index, number of equal parts) of those of the innermost open `scope`.
    Raises ValueError naming the site."""
    ids = current_sample_ids()
    if ids is None:
        raise ValueError(f"{site} needs sample ids: call the network with sample_ids=...")
    index, num_parts = part
    assert ids.numel() == count * num_parts, f"{ids.numel()} ids, {count} samples x {num_parts} at {site}"
    return ids[index * count : (index + 1) * count]


def site_key(seed: int, site: str) -> int:
    """A signed 64-bit key of one dropout site of one run."""
    digest = hashlib.sha256(f"dropout/{seed}/{site}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def keep_mask(key: int, sample_ids: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """bool (samples, rows, columns), True with probability 1 - rate.

    key: see `site_key`; sample_ids: int64 (samples,); rows, columns: int64, *global* indices of the rows and columns
    held here: any slice of them gives the same slice of the mask.
    """
    assert 0.0 <= rate < 1.0, f"dropout rate {rate} is outside [0, 1)"
    # signed 32 bits are uniform over [-2^31, 2^31)
    return random_bits(key, sample_ids, rows, columns) >= round(rate * 2**32) - 2**31


def uniform(key: int, sample_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """fp32 (samples, rows, columns) in [0, 1), from the same hash and arguments as `keep_mask`.

    Multiples of 2^-24, so that they are the same numbers in fp32 and fp64.
    """
    return _shifted(random_bits(key, sample_ids, rows, columns), 8).to(torch.float32) * 2.0**-24


def random_bits(key: int, sample_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """int32 (samples, rows, columns), all 32 bits random."""
    row_keys = _mix64(_mix64(sample_ids + key).unsqueeze(1) + rows)
    first, second = row_keys.to(torch.int32), (row_keys >> 32).to(torch.int32)
    mixed = first.unsqueeze(2) + (columns * 0x9E3779B1).to(torch.int32)
    mixed = (mixed ^ _shifted(mixed, 16)) * 0x7FEB352D
    mixed = mixed ^ second.unsqueeze(2)
    mixed = (mixed ^ _shifted(mixed, 15)) * (0x846CA68B - 2**32)
    return mixed ^ _shifted(mixed, 16)


def _mix64(bits: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (multiplication wraps)."""
    bits = (bits ^ _shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical right shift: torch's own carries the sign."""
    width = 32 if bits.dtype == torch.int32 else 64
    return (bits >> count) & ((1 << (width - count)) - 1)
