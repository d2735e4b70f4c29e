"""This process and its peers on the host, as the backend sees them: their memory, their doorbells, their end."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

from torch import Tensor

from parallelrun.distributed.shared_memory import HOST_VARIABLE
from parallelrun.distributed.shared_memory.arena import ALIGNMENT, Arena, MappedMemory, store_before_load

ASLEEP = 0  # word of an arena: 1 while its process sleeps, else 0


class Peer:
    """Another process of this host. `gone`: it has ended."""

    def __init__(self, endpoint: dict[str, Any]):
        self.pid: int = endpoint["pid"]
        self.pidfd = os.pidfd_open(self.pid)
        folder = f"/proc/{self.pid}/fd"
        descriptor = os.open(f"{folder}/{endpoint['memory']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = MappedMemory(descriptor, endpoint["size"])
        finally:
            os.close(descriptor)
        self.words = self.memory.words
        self._doorbell = os.open(f"{folder}/{endpoint['doorbell']}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.gone = False

    def wake(self) -> None:
        """Wake the process if it sleeps."""
        if self.words[ASLEEP]:
            try:  # noqa: SIM105 - contextlib.suppress takes longer than the rest
                os.write(self._doorbell, b"\0")
            except (BlockingIOError, BrokenPipeError):  # woken already; ended
                pass


class LocalProcess:
    """This process: its arena, its doorbell (a pipe into which peers write), and the peers whose end it watches."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.arena = Arena()
        self.memory, self.words = self.arena, self.arena.words
        assert self.arena.allocate(ALIGNMENT) == ASLEEP, "the first words of an arena are its process's"
        self.token = os.urandom(8).hex()  # pids are reused
        self.peers: dict[str, Peer] = {}
        self._doorbell, self._bell_to_me = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._doorbell, select.EPOLLIN)
        self._watched: dict[int, Peer] = {}
        self.has_lost_peers = False

    def wake(self) -> None:
        """Do nothing: whoever calls it is awake."""

    def endpoint(self) -> dict[str, Any]:
        """Return what a peer needs to reach this process."""
        descriptors = {"memory": self.arena.descriptor, "doorbell": self._bell_to_me}
        facts = {"host": host_identity(), "pid": self.pid, "token": self.token, "size": self.arena.size}
        return {**facts, **descriptors}

    def open_peer(self, endpoint: dict[str, Any]) -> None:
        """Map the memory of a peer, unless it is mapped. Raises OSError if that is not possible."""
        if endpoint["token"] not in self.peers and endpoint["token"] != self.token:
            peer = self.peers[endpoint["token"]] = Peer(endpoint)
            self._watched[peer.pidfd] = peer
            self._poll.register(peer.pidfd, select.EPOLLIN)

    def fall_asleep(self) -> None:
        """Tell peers to wake this process. What they did before this call, `Engine.progress` sees after it."""
        self.words[ASLEEP] = 1
        store_before_load()

    def awake(self) -> None:
        """Tell peers that this process is awake."""
        self.words[ASLEEP] = 0

    def sleep(self, seconds: float) -> None:
        """Sleep until a peer rings or ends, or time is up."""
        for descriptor, _ in self._poll.poll(seconds):
            if descriptor == self._doorbell:
                try:  # noqa: SIM105
                    os.read(self._doorbell, 4096)
                except BlockingIOError:  # another thread has read it
                    pass
            else:
                self._watched[descriptor].gone = self.has_lost_peers = True
                self._poll.unregister(descriptor)


class GroupMember:
    """A member of a group: its process, and where its block of words begins."""

    __slots__ = ("base", "process", "tensor", "words")

    def __init__(self, process: Peer | LocalProcess, base: int):
        self.process, self.words, self.base = process, process.words, base
        self.tensor = process.memory.tensor

    def __getitem__(self, word: int) -> int:
        return self.words[self.base + word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[self.base + word] = value

    def read(self, offset: int, like: Tensor) -> Tensor:
        """Return what the member has at a byte offset of its arena: a flat tensor like `like`."""
        return self.tensor(offset, like.dtype, like.numel())

    def write(self, offset: int, tensor: Tensor) -> None:
        """Copy a tensor to a byte offset of the arena, which must be this process's own."""
        if tensor.numel():
            self.tensor(offset, tensor.dtype, tensor.numel()).copy_(tensor.view(-1))


def host_identity() -> str:
    """Return what processes have in common that can map each other's memory: the boot and the namespace of pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.environ.get(HOST_VARIABLE, '')}{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
