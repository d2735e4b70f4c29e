"""All servers as one, seen from a worker: pushes go to every server at once, pulls fill the module's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan

from .buffers import Buffers
from .channel import Channel
from .protocol import END, KEEP, LEAVE, PULL, PUSH, READ, READ_FROZEN, READ_GRADIENT, SAVE, UPDATE, Reply, Request


class Links:
    """A worker's channels to the servers.

    versions: of each server's weights, as last pulled. torn_reads: pulls whose servers were at different versions.
    """

    def __init__(self, plan: Plan, parameters: Sequence[LocalParameter], frozen: Sequence[LocalParameter]):
        self.buffers = Buffers(plan, parameters)
        self._frozen = [parameter.tensor.detach() for parameter in frozen]
        self._channels = [Channel(plan.num_workers + server) for server in range(plan.servers)]
        self.versions = [0] * plan.servers
        self.torn_reads = 0

    def read(self) -> Reply:
        """Pull the weights as they are. The first server's answer."""
        return self._ask([Request(READ)] * len(self._channels), [])[0]

    def update(self, request: Request) -> list[Reply]:
        """Push the packed gradient and pull the weights, when the servers give them. Their answers."""
        requests = [request._replace(operation=UPDATE, pulled=version) for version in self.versions]
        return self._ask(requests, self.buffers.pushes)

    def meet(self, operation: int, request: Request, waiting: Callable[[], None]) -> bool:
        """Come to a meeting (SAVE or END) and stay until it has taken place; False if it has failed.

        waiting: called about once a second meanwhile.
        """
        assert operation in (SAVE, END)
        asked, ok = list(self._channels), True
        while asked:
            for channel in asked:
                channel.send_header(request._replace(operation=operation))
            replies = [(channel, channel.receive_reply()) for channel in asked]
            for channel in asked:
                channel.flush()
            ok = ok and all(reply.ready >= 0 for _, reply in replies)
            asked = [channel for channel, reply in replies if not reply.ready]
            waiting()
        return ok

    def read_frozen(self) -> None:
        """Take over the first server's values of what nobody updates."""
        if self._frozen:
            flat = self._exchange_with_first(Request(READ_FROZEN))
            for tensor, part in zip(self._frozen, flat.split([tensor.numel() for tensor in self._frozen])):
                tensor.copy_(part.view_as(tensor))

    def keep_frozen(self) -> None:
        """Give the first server this worker's values of what nobody updates (running statistics), to be saved."""
        if self._frozen:
            flat = torch.cat([tensor.flatten() for tensor in self._frozen]).to("cpu", self.buffers.pulls[0].dtype)
            channel = self._channels[0]
            channel.send_header(Request(KEEP))
            channel.send(flat, PUSH)
            channel.receive_reply()
            channel.flush()

    def read_gradient(self, version: int) -> dict[str, Tensor]:
        """The gradient that the servers made their update number `version` by, by name (verify)."""
        flats = []
        for channel, pull in zip(self._channels, self.buffers.pulls):
            channel.send_header(Request(READ_GRADIENT, version))
            channel.receive_reply()
            flats.append(channel.receive(torch.empty_like(pull), PULL))
            channel.flush()
        return self.buffers.named(flats)

    def leave(self) -> None:
        """Say goodbye: the servers' threads for this worker end."""
        for channel in self._channels:
            channel.send_header(Request(LEAVE))
        for channel in self._channels:
            channel.flush()

    def _ask(self, requests: list[Request], payloads: list[Tensor]) -> list[Reply]:
        for number, (channel, request) in enumerate(zip(self._channels, requests)):
            channel.send_header(request)
            if payloads:
                channel.send(payloads[number], PUSH)
        replies = []
        for channel, pull in zip(self._channels, self.buffers.pulls):
            replies.append(channel.receive_reply())
            channel.receive(pull, PULL)
        for channel in self._channels:
            channel.flush()
            channel.take_passed()
        self.versions = [reply.version for reply in replies]
        self.torn_reads += len(set(self.versions)) > 1
        self.buffers.unpack()
        return replies

    def _exchange_with_first(self, request: Request) -> Tensor:
        channel = self._channels[0]
        channel.send_header(request)
        channel.receive_reply()
        numel = sum(tensor.numel() for tensor in self._frozen)
        flat = channel.receive(torch.empty(numel, dtype=self.buffers.pulls[0].dtype), PULL)
        channel.flush()
        return flat
