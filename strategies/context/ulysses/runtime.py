"""Ranks exchange their tokens for heads around attention, which is then that of one device."""

from __future__ import annotations

from functools import partial

from ..common import runtime
from ..common.ring import RingTransport

parallelize = partial(runtime.parallelize, transport=RingTransport)
