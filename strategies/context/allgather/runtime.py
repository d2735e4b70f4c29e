"""Keys and values are gathered over all cp ranks."""

from __future__ import annotations

from functools import partial

from ..common import runtime
from ..common.gathered import GatherTransport

parallelize = partial(runtime.parallelize, transport=GatherTransport)
