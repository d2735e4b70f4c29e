"""The server of the store in which ranks of several hosts meet, and the protocol that its clients speak.

torch's TCPStore answers every process that connects, so that any of them can list and delete its keys. This server
answers only clients that know the run's token: both sides prove that they do (HMAC-SHA256 of fresh random numbers), and
the token itself is never sent. Later messages are neither encrypted nor signed: the network must be trusted not to
change them.

A message is its length, and a JSON list of texts. A text stands for bytes, of which each is one character (Latin-1).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence

GREETING = b"parallelrun store 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED, REFUSED = b"+", b"-"
DONE, TIMED_OUT, MISTAKE = "done", "timed out", "mistake"  # the first text of an answer
HANDSHAKE_S = 10.0
MAX_STRANGERS = 256  # connections that have not proved anything yet: beyond, the oldest is closed
HEADER_BYTES = 4
_MAX_MESSAGE_BYTES = 2**26


def proof(token: str, role: bytes, nonces: bytes) -> bytes:
    """Return the HMAC that proves knowledge of `token`. role: server | client, so that neither can echo the other's."""
    return hmac.digest(token.encode(), role + nonces, "sha256")


def packed(texts: Sequence[str]) -> bytes:
    """Return a message of these texts."""
    body = json.dumps(texts, ensure_ascii=False).encode()
    return struct.pack("!I", len(body)) + body


def message_length(header: bytes) -> int:
    """Return the number of bytes that follow the header of a message. Raises ValueError if they are too many."""
    (length,) = struct.unpack("!I", header)
    if length > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def serve(listener: socket.socket, token: str) -> None:
    """Serve a store to all that connect to `listener` and know `token`, in a thread, as long as this process runs."""

    async def run() -> None:
        server = await asyncio.start_server(_StoreServer(token).talk, sock=listener)
        await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(run(),), daemon=True, name="parallelrun-store").start()


class _StoreServer:
    """The keys and values, and the connections of strangers, who have not proved that they know the token."""

    def __init__(self, token: str):
        self._token = token
        self._values: dict[str, str] = {}
        self._awaited: dict[str, asyncio.Event] = {}  # by key, until it has a value
        self._strangers: dict[StreamWriter, None] = {}  # the oldest first

    async def talk(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Let a client in if it knows the token, and answer its messages until it disconnects or breaks the rules."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            is_known = await asyncio.wait_for(self._let_in(reader, writer), HANDSHAKE_S)
            self._strangers.pop(writer, None)
            while is_known:
                body = await reader.readexactly(message_length(await reader.readexactly(HEADER_BYTES)))
                writer.write(packed(await self._obey(*json.loads(body))))
                await writer.drain()
        except (ValueError, TypeError, LookupError) as error:  # of a program that is not ours
            writer.write(packed([MISTAKE, str(error)]))
        except (OSError, EOFError, asyncio.TimeoutError):
            pass
        finally:
            self._strangers.pop(writer, None)
            writer.close()

    async def _let_in(self, reader: StreamReader, writer: StreamWriter) -> bool:
        """Return whether the client knows the token; prove that this side does."""
        ours = os.urandom(NONCE_BYTES)
        writer.write(GREETING + ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        received = await reader.readexactly(PROOF_BYTES)
        is_known = hmac.compare_digest(received, proof(self._token, b"client", ours + theirs))
        writer.write(ACCEPTED + proof(self._token, b"server", ours + theirs) if is_known else REFUSED)
        return is_known

    async def _obey(self, operation: str, *texts: str) -> list[str]:
        """Return the answer to a message."""
        key = texts[0] if texts else ""
        if operation in ("get", "wait"):
            return await self._wait(int(key) / 1000, texts[1:], with_values=operation == "get")
        if operation == "set":
            for name, value in zip(texts[::2], texts[1::2], strict=True):
                self._set(name, value)
            return [DONE]
        if operation == "check":
            return [DONE, str(int(all(name in self._values for name in texts)))]
        if operation == "delete":
            return [DONE, "0" if self._values.pop(key, None) is None else "1"]
        before = self._values.get(key)
        if operation == "compare_set":
            if (before or "") != texts[1]:
                return [DONE, texts[1] if before is None else before]  # as torch promises
            new = texts[2]
        elif operation == "append":
            new = (before or "") + texts[1]
        elif operation == "add":
            new = str(int(before or "0") + int(texts[1]))
        else:
            raise ValueError(f"no operation {operation}")
        self._set(key, new)
        return [DONE, new]

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        if key in self._awaited:
            self._awaited.pop(key).set()

    async def _wait(self, timeout_s: float, keys: Sequence[str], with_values: bool) -> list[str]:
        """Wait until all `keys` have values."""

        async def wait() -> None:
            for key in keys:
                while key not in self._values:
                    await self._awaited.setdefault(key, asyncio.Event()).wait()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except asyncio.TimeoutError:
            return [TIMED_OUT, next((key for key in keys if key not in self._values), "")]
        return [DONE, *(self._values.get(key, "") for key in keys if with_values)]
