"""Another user of this host attacks while runs start: they do not notice."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.cli.launcher import run_attached, run_launcher, run_stranger
from tests.matrix import FULL

TRIES = 6 if FULL else 1


@pytest.fixture
def stranger(tmp_path):
    attacker = run_stranger(tmp_path / "stranger")
    yield attacker
    os.kill(attacker.pid, signal.SIGKILL)


def test_a_run_of_our_launcher_offers_nothing_to_attack(tmp_path, stranger):
    runs = [run_launcher(tmp_path / str(number), overrides={"dp": 2}) for number in range(TRIES)]
    assert [run.wait() for run in runs] == [0] * TRIES, runs[0].stderr
    assert stranger.stdout == "", stranger.stdout
    assert "Error" not in stranger.stderr


@pytest.mark.slow
@pytest.mark.parametrize("token", ["a secret", ""])
def test_ranks_that_meet_over_a_network_do_not_mind(tmp_path, stranger, token):
    """Without a secret, too: this attacker knows torch's store, but not the name of the job."""
    for number in range(TRIES):
        with socket.create_server(("127.0.0.1", 0)) as taken:  # rank 0 has to take another port
            port = taken.getsockname()[1]
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with (stranger.folder / "targets").open("a") as targets:
                targets.write(" ".join(map(str, range(port + 1, port + 8))) + "\n")
            ranks = run_attached(tmp_path / str(number), environ={**place, "PARALLELRUN_TOKEN": token})
            assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
        assert ranks[0].status["state"] == "done"
    assert "attacks" in stranger.stdout
