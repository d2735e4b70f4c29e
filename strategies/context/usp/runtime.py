"""Tokens are exchanged for heads in groups of ranks, and keys and values travel between the groups."""

from __future__ import annotations

from functools import partial

from ..common import runtime
from ..common.ring import RingTransport

parallelize = partial(runtime.parallelize, transport=RingTransport)
