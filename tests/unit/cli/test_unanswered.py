"""The kernel's table of connections tells whether the host at their other end still answers."""

from __future__ import annotations

import os
import socket

import pytest

from parallelrun.cli.unanswered import RESENT, RESENT_SOON, is_unanswered, sockets_of, unanswered

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
SSH = {"SSH_CONNECTION": "10.77.0.1 40000 10.77.0.2 22"}


def row(server_port: int, client_port: int, resent: int, probes: int = 0, inode: int = 1234) -> str:
    place = f"02004D0A:{server_port:04X} 01004D0A:{client_port:04X}"
    return f"   0: {place} 01 00000024:00000000 01:00000019 {resent:08X}     0 {probes:8d} {inode} 2 0"


@pytest.mark.parametrize(
    ("rows", "unanswered"),
    [
        ([row(22, 40000, 0)], False),
        ([row(22, 40000, 4)], False),
        ([row(22, 40000, 5)], True),
        ([row(22, 40000, 0, probes=5)], True),
        ([row(22, 40001, 9)], False),  # another connection
        ([row(40000, 22, 9)], False),  # one from here
        ([row(22, 40000, 9), row(22, 40000, 0)], False),  # of two clients with the same port, one answers
        ([], False),
    ],
)
def test_data_that_is_sent_again_and_again_means_that_nobody_answers(tmp_path, rows, unanswered):
    table = tmp_path / "tcp"
    table.write_text("\n".join([HEAD, *rows, ""]))
    assert is_unanswered(SSH, RESENT, (table, tmp_path / "absent")) is unanswered
    assert not is_unanswered({}, RESENT, (table,))


def test_only_the_hosts_whose_own_connection_is_silent_are_named(tmp_path):
    table = tmp_path / "tcp"
    rows = [row(40000, 22, RESENT_SOON, inode=11), row(40000, 22, RESENT_SOON - 1, inode=12), row(40000, 22, 9)]
    table.write_text("\n".join([HEAD, *rows, ""]))
    sockets = {"a": frozenset({10, 11}), "b": frozenset({12}), "through a proxy": frozenset[int]()}
    assert unanswered(sockets, RESENT_SOON, (table,)) == ["a"]
    assert unanswered(sockets, RESENT_SOON, (tmp_path / "absent",)) == []


def test_the_sockets_of_a_process_are_those_of_the_kernels_table():
    with socket.socket() as one:
        inode = os.fstat(one.fileno()).st_ino
        assert inode in sockets_of(os.getpid())
    assert inode not in sockets_of(os.getpid())
    assert sockets_of(2**22 + 1) == frozenset()
