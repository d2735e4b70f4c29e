"""The client of `store_server` as one of torch's stores: process groups meet in it as in a TCPStore."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from parallelrun.launch.store import store_server

_TRY_S = 5.0  # for one address to answer
_PAUSE_S = 0.1
_ANSWER_S = 60.0  # beyond what the server was asked to wait: time for a busy host to answer


class TokenStore(Store):
    """A store at `addresses[i]`, whichever the server listens on. prefix: of all keys.

    torch only keeps the C++ half of a store alive: hold this object as long as a process group uses it. Raises
    DistNetworkError if no server that knows `token` answers within `timeout_s`.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], token: str, timeout_s: float, prefix: str = ""):
        super().__init__()
        self._patience = timedelta(seconds=timeout_s)
        self._settings = (addresses, token, timeout_s, prefix)
        self._prefix = prefix
        self._lock = threading.Lock()
        self._clones: list[TokenStore] = []
        self._socket = _connected(addresses, token, timeout_s)

    def clone(self) -> TokenStore:
        """A connection of its own, so that a thread can ask while another waits."""
        self._clones.append(TokenStore(*self._settings))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._request("set", *(text for key, value in pairs for text in (self._prefix + key, _text(value))))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [value.encode("latin-1") for value in self._request_and_wait("get", keys, self._patience)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request_and_wait("wait", keys, timeout or self._patience)

    def add(self, key: str, number: int) -> int:
        return int(self._request("add", self._prefix + key, str(number))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._request("append", self._prefix + key, _text(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._request("compare_set", self._prefix + key, _text(expected), _text(desired))[0].encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return self._request("check", *(self._prefix + key for key in keys)) == ["1"]

    def delete_key(self, key: str) -> bool:
        return self._request("delete", self._prefix + key) == ["1"]

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key  # as torch's C++ names it

    def _request_and_wait(self, operation: str, keys: Sequence[str], timeout: timedelta) -> list[str]:
        wait_s = timeout.total_seconds()
        return self._request(operation, str(int(1000 * wait_s)), *(self._prefix + key for key in keys), wait_s=wait_s)

    def _request(self, operation: str, *texts: str, wait_s: float = 0.0) -> list[str]:
        """Return the server's answer. Raises DistStoreError (too late), DistNetworkError (no server)."""
        with self._lock:
            try:
                self._socket.settimeout(wait_s + _ANSWER_S)
                self._socket.sendall(store_server.packed([operation, *texts]))
                length = store_server.message_length(_received(self._socket, store_server.HEADER_BYTES))
                answer: list[str] = json.loads(_received(self._socket, length))
            except OSError as error:
                self._socket.close()  # an answer that comes later would be taken for another one's
                raise DistNetworkError(f"the store's server is gone: Connection reset by peer ({error})") from error
        if answer[0] == store_server.TIMED_OUT:
            raise DistStoreError(f"Wait timeout after {wait_s:g} s: no key {answer[1]} in the store")
        if answer[0] != store_server.DONE:
            raise ValueError(f"store: {' '.join(answer)}")
        return answer[1:]


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _received(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(min(length - len(parts), 2**20))
        if not part:
            raise ConnectionResetError("closed")
        parts += part
    return bytes(parts)


def _connected(addresses: Sequence[tuple[str, int]], token: str, timeout_s: float) -> socket.socket:
    """Return a connection to the server of this run, which may not listen yet, and not at the first address."""
    deadline, refused, silent = time.monotonic() + timeout_s, "", "no answer"
    while True:
        for address in addresses:
            within_s = max(0.05, min(_TRY_S, deadline - time.monotonic()))
            try:
                connection = socket.create_connection(address, timeout=within_s)
            except OSError as error:
                silent = error.strerror or str(error)
                continue
            with contextlib.suppress(OSError, ValueError):
                if _is_ours(connection, token):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return connection
                refused = f"port {address[1]} answers, but with another token"
            connection.close()
        if time.monotonic() >= deadline:
            raise DistNetworkError(refused or silent)
        time.sleep(_PAUSE_S)


def _is_ours(connection: socket.socket, token: str) -> bool:
    """Return whether the server knows `token`, after proving that this process does. Raises ValueError if it is none
    of ours."""
    if _received(connection, len(store_server.GREETING)) != store_server.GREETING:
        raise ValueError("not a store of ours")
    theirs, ours = _received(connection, store_server.NONCE_BYTES), os.urandom(store_server.NONCE_BYTES)
    connection.sendall(ours + store_server.proof(token, b"client", theirs + ours))
    if _received(connection, len(store_server.ACCEPTED)) != store_server.ACCEPTED:
        return False
    return _received(connection, store_server.PROOF_BYTES) == store_server.proof(token, b"server", theirs + ours)
