"""The server of the store in which ranks of several hosts meet, and the protocol that its clients speak.

torch's TCPStore answers every process that connects, so that any of them can delete its keys. This server answers
only clients that know the run's token: both sides prove that they do (HMAC-SHA256 of fresh random numbers), and the
token itself is never sent. Later messages are neither encrypted nor signed: the network must be trusted not to
change them.

A message is its length, and fields of bytes with their lengths. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

GREETING = b"parallelrun store 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED, REFUSED = b"+", b"-"
DONE, TIMED_OUT, MISTAKE = b"done", b"timed out", b"mistake"  # the first field of an answer
MAX_MESSAGE_BYTES = 2**26
HANDSHAKE_S = 10.0
MAX_STRANGERS = 256  # connections that have not proved anything yet: beyond, the oldest is closed
_LENGTH = struct.Struct("!I")


def proof(token: str, role: bytes, nonces: bytes) -> bytes:
    """Return the HMAC that proves knowledge of `token`. role: server | client, so that neither can echo the other's."""
    return hmac.digest(token.encode(), role + nonces, "sha256")


def packed(fields: Sequence[bytes]) -> bytes:
    """A message of these fields."""
    body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    return _LENGTH.pack(len(body)) + body


def message_length(header: bytes) -> int:
    """The bytes that follow the header of a message. Raises ValueError if they are too many."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def unpacked(body: bytes) -> list[bytes]:
    """The fields of a message. Raises ValueError if it is damaged."""
    fields, place = [], 0
    while place < len(body):
        end = place + _LENGTH.size
        (length,) = _LENGTH.unpack(body[place:end].ljust(_LENGTH.size, b"\0"))
        if end + length > len(body):
            raise ValueError("a damaged message")
        fields.append(body[end : end + length])
        place = end + length
    return fields


def serve(listener: socket.socket, token: str) -> None:
    """Serve a store to all that connect to `listener` and know `token`, in a thread, as long as this process runs."""

    async def run() -> None:
        store, loop = _Contents(), asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(store, token), sock=listener)
        await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(run(),), daemon=True, name="parallelrun-store").start()


@dataclass
class _Waiting:
    """A client that waits until `missing` is empty. keys: whose values it gets then."""

    client: _Connection
    missing: set[str]
    keys: Sequence[str]
    timer: asyncio.TimerHandle


class _Contents:
    """The keys and values, and the connections that wait for them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.strangers: dict[_Connection, None] = {}  # the oldest first
        self._waiting: dict[str, list[_Waiting]] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for waiting in self._waiting.pop(key, ()):
            waiting.missing.discard(key)
            if not waiting.missing:
                waiting.timer.cancel()
                waiting.client.answer(*(self.values.get(waited_key, b"") for waited_key in waiting.keys))

    def wait(self, client: _Connection, timeout_ms: int, keys: Sequence[str], wanted: Sequence[str]) -> None:
        """Answer with the values of `wanted` as soon as all `keys` are there."""
        missing = {key for key in keys if key not in self.values}
        if not missing:
            client.answer(*(self.values[key] for key in wanted))
            return

        def give_up() -> None:
            for key in waiting.missing:
                self._waiting[key].remove(waiting)
            client.send(TIMED_OUT, sorted(waiting.missing)[0].encode())

        timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, give_up)
        waiting = _Waiting(client, missing, wanted, timer)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiting)


class _Connection(asyncio.Protocol):
    """A client: first a stranger, then one that has proved that it knows the token."""

    def __init__(self, store: _Contents, token: str):
        self._store, self._token = store, token
        self._nonce = os.urandom(NONCE_BYTES)
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = self._store.strangers
        if len(strangers) >= MAX_STRANGERS:
            next(iter(strangers)).close()
        strangers[self] = None
        asyncio.get_running_loop().call_later(HANDSHAKE_S, self._close_stranger)
        transport.write(GREETING + self._nonce)

    def connection_lost(self, _: Exception | None) -> None:
        self._store.strangers.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self in self._store.strangers:
            self._examine()
        elif not self._is_closing():
            self._handle()

    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection."""
        self._store.strangers.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _close_stranger(self) -> None:
        if self in self._store.strangers:
            self.close()

    def _examine(self) -> None:
        """Let the client in if it knows the token; prove that this side does."""
        if len(self._received) < NONCE_BYTES + PROOF_BYTES:
            return
        assert self._transport is not None
        theirs = bytes(self._received[:NONCE_BYTES])
        received = bytes(self._received[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES])
        if not hmac.compare_digest(received, proof(self._token, b"client", self._nonce + theirs)):
            self._transport.write(REFUSED)
            self._transport.close()
            return
        del self._received[: NONCE_BYTES + PROOF_BYTES]
        del self._store.strangers[self]
        self._transport.write(ACCEPTED + proof(self._token, b"server", self._nonce + theirs))
        self._handle()

    def _handle(self) -> None:
        """Answer all messages that have arrived completely."""
        received = self._received
        try:
            while len(received) >= _LENGTH.size:
                end = _LENGTH.size + message_length(bytes(received[: _LENGTH.size]))
                if len(received) < end:
                    return
                fields = unpacked(bytes(received[_LENGTH.size : end]))
                del received[:end]
                self._obey(fields[0].decode(), fields[1:])
        except (ValueError, IndexError, LookupError) as error:  # of a program that is not ours
            self.send(MISTAKE, str(error).encode())
            self.close()

    def _obey(self, operation: str, fields: list[bytes]) -> None:
        store = self._store
        if operation in ("get", "wait"):
            keys = [field.decode() for field in fields[1:]]
            store.wait(self, int(fields[0]), keys, keys if operation == "get" else ())
            return
        key = fields[0].decode() if fields else ""
        if operation == "set":
            for name, value in zip(fields[::2], fields[1::2], strict=True):
                store.set(name.decode(), value)
            self.answer()
        elif operation in ("add", "append", "compare_set"):
            self.answer(self._changed(operation, key, fields))
        elif operation == "check":
            self.answer(b"1" if all(field.decode() in store.values for field in fields) else b"0")
        elif operation == "delete":
            self.answer(b"0" if store.values.pop(key, None) is None else b"1")
        elif operation == "num_keys":
            self.answer(str(len(store.values)).encode())
        else:
            raise ValueError(f"no operation {operation}")

    def _changed(self, operation: str, key: str, fields: list[bytes]) -> bytes:
        """Change the value of `key`; what the client gets: its new value, or for compare_set what torch promises."""
        values = self._store.values
        if operation == "compare_set":
            before = values.get(key)
            if before is None and fields[1]:
                return fields[1]
            if (before or b"") != fields[1]:
                return before or b""
            new = fields[2]
        elif operation == "append":
            new = values.get(key, b"") + fields[1]
        else:
            new = str(int(values.get(key, b"0")) + int(fields[1])).encode()
        self._store.set(key, new)
        return new

    def answer(self, *fields: bytes) -> None:
        """Send the answer to a message that was obeyed."""
        self.send(DONE, *fields)

    def send(self, *fields: bytes) -> None:
        """Send these fields, unless the client has disconnected."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(fields))
