"""A stranger: another user of this host, who attacks whatever runs find open while they start.

Connects to every port of the file `targets` that opens, as a client of torch's store that deletes and overwrites each
key that it can list, and as one who talks nonsense; opens every file without a name that it can see in /proc, and
writes into it.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (names are looked up in it, and another user may not read the library's files)
import os
import socket
import threading
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

NOBODY = 65534
ATTACK_S = 60.0


def main(ready: str) -> int:
    """Attack until somebody ends this process, ATTACK_S at the most. ready: a file to write when it begins; beside it
    is `targets`, with the ports of the test's own runs."""
    import torch.distributed

    assert torch.distributed.is_available()
    seen: set[int] = set()
    wanted = os.open(Path(ready).with_name("targets"), os.O_RDONLY | os.O_CREAT)
    Path(ready).write_text("yes")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    deadline, rounds = time.monotonic() + ATTACK_S, count()
    while time.monotonic() < deadline:
        targets = set(map(int, os.pread(wanted, 4096, 0).split()))
        for port in (open_ports() & targets) - seen:
            seen.add(port)
            print(f"attacks {port}", flush=True)
            for attack in (use_store, talk_nonsense):
                threading.Thread(target=attack, args=(port,), daemon=True).start()
        if next(rounds) % 5 == 0:  # looks at every process of the host, and the files are there as long as the run
            write_into_nameless_files()
        time.sleep(0.01)
    return 0


def open_ports() -> set[int]:
    """The ports of this host on which somebody listens."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"}


def use_store(port: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=3), wait_for_workers=False)
    for delete in [True, False] * 10_000:
        time.sleep(0.002)  # leave the core to the ranks: there are few keys, and each is hit as long as it is there
        for key in store.list_keys():
            if delete:
                store.delete_key(key)
            else:
                store.set(key, b"nonsense")


def talk_nonsense(port: int) -> None:
    held = []  # half-open conversations
    for number in range(400):
        one = socket.create_connection(("127.0.0.1", port), timeout=3)
        one.sendall(os.urandom(number))
        held.append(one)


def write_into_nameless_files() -> None:
    mine = os.getuid() == os.stat("/proc/1").st_uid  # not root: these are this user's own files
    for path in () if mine or os.getuid() != NOBODY else Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:" in os.readlink(path):
                path.write_bytes(b"nonsense")
                print(f"wrote into {path}", flush=True)
        except OSError:
            continue
