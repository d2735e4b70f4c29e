"""What a server's threads have each: a desk for one worker; and what is measured at all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .channel import Channel
from .store import ShardStore


@dataclass
class Figures:
    """What a server measures beside its log: seconds for which answers were held back, by worker; payload both ways."""

    blocked_s: dict[int, float] = field(default_factory=dict)
    pushed_bytes: int = 0
    pulled_bytes: int = 0


class Aborted(Exception):
    """Another thread has failed; this one only stops."""


class Desk:
    """What one thread has for its worker: the channel and a buffer each way."""

    def __init__(self, worker: int, store: ShardStore):
        self.worker = worker
        self.channel = Channel(worker)
        self.push = torch.zeros_like(store.weights)
        self.pull = torch.zeros_like(store.weights)
