"""The store that asks for a token: it answers as torch's own does, and only those who know the token."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.store import store_server, stores
from parallelrun.launch.store.token_store import TokenStore


@pytest.fixture(scope="module")
def address():
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    where = listener.getsockname()
    store_server.serve(listener, "token")
    return where


def operations(store) -> list[object]:
    """What a store answers to each of its operations."""
    store.set("a", "1")
    store.multi_set(["b", "c"], ["2", "3"])
    store.append("log", "x")
    store.append("log", bytes(range(256)))
    found = [store.get("a"), store.multi_get(["b", "c"]), store.get("log"), store.add("n", 3), store.add("n", -1)]
    found += [store.check(["a", "n"]), store.check(["a", "none"]), store.compare_set("d", "", "new")]
    found += [store.compare_set("d", "other", "lost"), store.compare_set("d", "new", "newer"), store.get("d")]
    found += [store.compare_set("e", "something", "lost"), store.check(["e"])]
    return [*found, store.delete_key("a"), store.delete_key("a"), store.check(["a"])]


@pytest.mark.parametrize("through", ["python", "c++"])
def test_it_answers_as_torch_s_own_store(address, through):
    ours = TokenStore([address], "token", 10.0, f"{through}/")
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    expected = operations(PrefixStore("p", theirs))
    assert operations(ours if through == "python" else PrefixStore("p", ours)) == expected


def test_waiting_ends_with_the_key_or_with_the_time(address):
    one, other = (TokenStore([address], "token", 10.0, "wait/") for _ in range(2))
    threading.Timer(0.1, other.set, ("x/late", "here")).start()
    assert PrefixStore("x", one).get("late") == b"here"
    with pytest.raises(dist.DistStoreError, match="no key wait/x/never in the store"):
        PrefixStore("x", one).wait(["never"], timedelta(seconds=0.05))
    assert one.clone().get("x/late") == b"here"
    other.set("x/never", "after all")  # nobody waits for it any more
    assert one.get("x/never") == b"after all"


def test_who_does_not_know_the_token_gets_nothing_and_disturbs_nobody(address):
    with pytest.raises(dist.DistNetworkError, match="another token"):
        TokenStore([address], "guess", 0.3)
    crowd = [socket.create_connection(address) for _ in range(store_server.MAX_STRANGERS + 10)]
    crowd[-1].sendall(os.urandom(4096))
    assert TokenStore([address], "token", 10.0).add("crowded", 1) == 1
    for one in crowd:
        one.close()


def test_a_proof_is_of_no_use_to_who_has_heard_it(address):
    """Neither another day, as the numbers are fresh, nor as the answer of a false server."""

    def conversation(ours: bytes, answer: bytes | None = None) -> tuple[bytes, bytes]:
        with socket.create_connection(address) as one:
            greeting = one.recv(len(store_server.GREETING) + 32, socket.MSG_WAITALL)
            nonces = greeting[-32:] + ours
            one.sendall(ours + (answer or store_server.proof("token", b"client", nonces)))
            return one.recv(1), nonces

    heard = store_server.proof("token", b"client", conversation(b"1" * 32)[1])
    assert conversation(b"1" * 32)[0] == store_server.ACCEPTED
    assert conversation(b"1" * 32, heard)[0] == store_server.REFUSED
    nonces = b"2" * 64
    assert store_server.proof("token", b"server", nonces) != store_server.proof("token", b"client", nonces)


def test_a_client_that_breaks_the_rules_is_dropped_alone(address):
    good = TokenStore([address], "token", 10.0, "rules/")
    for message in (
        b"\xff\xff\xff\xff",
        store_server.packed(["nothing"]),
        store_server.packed([]),
        b"\0\0\0\5\0\0\0\9x",
    ):
        bad = TokenStore([address], "token", 10.0)
        bad._socket.sendall(message)
        bad._socket.settimeout(10)
        while bad._socket.recv(4096):
            pass
    assert good.add("alive", 1) == 1


def test_a_server_that_is_not_ours_is_passed_over(address):
    """A stranger has taken the first port: silent, or speaking as another program would."""
    squatter = socket.create_server(("127.0.0.1", 0))
    accepted = []

    def speak() -> None:
        accepted.append(squatter.accept()[0])
        accepted[0].sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian" * 9)

    threading.Thread(target=speak, daemon=True).start()
    began = time.monotonic()
    assert TokenStore([squatter.getsockname(), address], "token", 10.0).add("passed", 1) == 1
    assert time.monotonic() - began < 20
    squatter.close()


@pytest.mark.parametrize(
    ("address", "token", "warned"),
    [
        ("10.0.0.1", "", True),
        ("10.0.0.1", "secret", False),
        ("127.0.0.1", "", False),
        ("::1", "", False),
        ("::", "", True),
    ],
)
def test_rank_0_warns_where_strangers_can_reach_it(address, token, warned):
    assert (
        "without a token: any process that reaches this port can end the run" in stores.exposure(address, 29500, token)
    ) is warned


def test_a_wrong_token_is_told_with_what_to_do(address, monkeypatch):
    monkeypatch.setenv("PARALLELRUN_TOKEN", "wrong")
    with pytest.raises(EnvironmentProblem) as caught:
        stores.connect(Attached(1, 2, 1, *address, "srun", "job"), 0.3)
    (problem,) = caught.value.problems
    assert "answers, but with another token" in problem.what
    assert "all ranks have the same PARALLELRUN_TOKEN, or none" in problem.command
