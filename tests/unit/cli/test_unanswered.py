"""The kernel's table of connections tells whether the launcher's host still answers."""

from __future__ import annotations

import pytest

from parallelrun.cli.unanswered import is_unanswered

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
SSH = {"SSH_CONNECTION": "10.77.0.1 40000 10.77.0.2 22"}


def row(server_port: int, client_port: int, resent: int, probes: int = 0) -> str:
    place = f"02004D0A:{server_port:04X} 01004D0A:{client_port:04X}"
    return f"   0: {place} 01 00000024:00000000 01:00000019 {resent:08X}     0 {probes:8d} 1234 2 0"


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
    assert is_unanswered(SSH, (table, tmp_path / "absent")) is unanswered
    assert not is_unanswered({}, (table,))
