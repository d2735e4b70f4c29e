"""A worker and a server, seen from either end: headers and payloads over point-to-point messages.

What gloo demands: a blocking send returns when the other side receives, a receive cannot be polled nor given up, so a
server has one thread per worker that waits in a blocking receive, and workers send without waiting. Payloads travel in
CPU memory; on GPUs that leaves NCCL, which has no tags, to the workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import comm
from parallelrun.plan.structure import Collective

from .protocol import AXIS, CONTROL, HEADER_ELEMENTS, PULL, PUSH, Reply, Request

_TAGS = {CONTROL: 21, PUSH: 22, PULL: 23}


class PeerGone(RuntimeError):
    """The other side of a channel is gone."""


class Channel:
    """The messages between this process and the rank `peer`. One thread uses a channel.

    It notes what it has handed to torch: `take_passed`.
    """

    def __init__(self, peer: int):
        self.peer = peer
        self._passed: list[Collective] = []
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensor: Tensor, purpose: str) -> None:
        """Begin to send a contiguous CPU tensor; it must stay as it is until `flush`."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        with self._guarded(), comm.label(AXIS, purpose):
            self._sent.append((dist.isend(tensor, dst=self.peer, tag=_TAGS[purpose]), tensor))
        self._passed.append(Collective(AXIS, "send", purpose, 1, tensor.nbytes))

    def send_header(self, header: Request | Reply) -> None:
        """Begin to send a header."""
        self.send(torch.tensor([float(value) for value in header], dtype=torch.float64), CONTROL)

    def flush(self) -> None:
        """Wait until everything has been received. Raises PeerGone."""
        with self._guarded():
            for work, _ in self._sent:
                if work is not None:
                    work.wait()
        self._sent.clear()

    def receive(self, into: Tensor, purpose: str) -> Tensor:
        """Wait for a message of exactly that size. Raises PeerGone."""
        assert into.is_contiguous() and into.device.type == "cpu"
        with self._guarded(), comm.label(AXIS, purpose):
            dist.recv(into, src=self.peer, tag=_TAGS[purpose])
        self._passed.append(Collective(AXIS, "recv", purpose, 1, 0))
        return into

    def take_passed(self) -> list[Collective]:
        """The messages since the last call; bytes are counted at the sender."""
        passed, self._passed = self._passed, []
        return passed

    def receive_request(self) -> Request:
        """The next request of a worker."""
        operation, clock, pulled, *rest = self._receive_header()
        return Request(int(operation), int(clock), int(pulled), *rest)

    def receive_reply(self) -> Reply:
        """The server's answer."""
        ready, version, clock, *rest = self._receive_header()
        return Reply(int(ready), int(version), int(clock), *rest)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerGone(f"rank {self.peer} is gone: {error}") from error

    def _receive_header(self) -> Sequence[float]:
        return self.receive(torch.empty(HEADER_ELEMENTS, dtype=torch.float64), CONTROL).tolist()
