"""Tensors in host memory, which a side stream copies there and back while the device computes. On CPU, plain copies."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


def host_copy(tensor: Tensor, copies: torch.cuda.Stream | None = None) -> Tensor:
    """Return a copy in host memory, page-locked if the tensor is on a GPU. copies: the stream that copies; None: the
    current one."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    with torch.cuda.stream(copies):
        host.copy_(tensor.detach(), non_blocking=True)
    return host


class HostCopy:
    """The copy of one tensor. Bringing it back begins to bring back the one that was moved before it, which backward
    needs next."""

    def __init__(self, tensor: Tensor, copies: torch.cuda.Stream | None, previous: HostCopy | None):
        self._device, self._copies = tensor.device, copies
        if copies is not None:
            copies.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(copies)
        self._host: Tensor | None = host_copy(tensor, copies)
        self._previous = weakref.ref(previous) if previous else None
        self._arriving: Tensor | None = None

    def start(self) -> None:
        """Begin to copy the tensor back, unless it has been."""
        if self._host is None:
            return
        if self._copies is None:
            self._arriving = self._host.clone()
        else:
            with torch.cuda.stream(self._copies):
                self._arriving = self._host.to(self._device, non_blocking=True)
        self._host = None

    def take(self) -> Tensor:
        """Return the tensor on its device, once."""
        self.start()
        tensor, self._arriving = self._arriving, None
        assert tensor is not None, "a tensor is brought back once"
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            tensor.record_stream(current)
        if self._previous and (previous := self._previous()):
            previous.start()
        return tensor


class HostLink:
    """Moves tensors to the host in the order of forward."""

    def __init__(self) -> None:
        self._copies: torch.cuda.Stream | None = None
        self._last: weakref.ref[HostCopy] | None = None

    def put(self, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor to the host. Its memory on the device is free when nothing else refers to it."""
        if tensor.is_cuda and self._copies is None:
            self._copies = torch.cuda.Stream(tensor.device)
        copy = HostCopy(tensor, self._copies, self._last() if self._last else None)
        self._last = weakref.ref(copy)
        return copy
