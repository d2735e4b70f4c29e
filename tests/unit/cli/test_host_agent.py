"""The agent of a host: what it asks of the kernel, and what it tells its launcher. No ssh, no ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from parallelrun.cli import host_agent
from tests.servants import ROOT


@pytest.mark.parametrize(("is_local", "ends"), [(True, False), (False, True)])
def test_only_an_agent_over_ssh_ends_when_its_connection_is_dead(monkeypatch, is_local, ends):
    """The user's own ssh session may be dead (a laptop that sleeps) while the launcher goes on in tmux."""
    monkeypatch.setattr(host_agent, "is_unanswered", lambda environ, resent: True)
    monkeypatch.setattr(host_agent.os, "write", lambda descriptor, data: len(data))
    found = host_agent.Agent(is_local)
    looks = iter([[], []])

    def lines() -> list[bytes]:
        found._hung_up = next(looks, None) is None or found._hung_up
        return []

    monkeypatch.setattr(found, "_lines", lines)
    found.serve()
    assert len(list(looks)) == (1 if ends else 0)


def test_an_agent_whose_launcher_ends_while_it_imports_ends_at_once(tmp_path):
    (tmp_path / "slow_import.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(100)\n")
    ours, theirs = socket.socketpair()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    agent = subprocess.Popen(
        [sys.executable, "-m", host_agent.__name__, host_agent.LOCAL],
        stdin=theirs.fileno(), stdout=subprocess.PIPE, env=environ, cwd=tmp_path,
    )  # fmt: skip
    theirs.close()
    try:
        ours.sendall(
            json.dumps({"prepare": {"modules": ["slow_import"], "environ": {}, "memory": False}}).encode() + b"\n"
        )
        assert agent.stdout is not None and agent.stdout.readline() == b"imported\n"
        ours.close()
        assert agent.wait(timeout=50) == 0
    finally:
        agent.kill()
        agent.wait()
