"""What a launcher tells the agents of its hosts as it connects to them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallelrun.cli import host_connection
from parallelrun.cli.unanswered import RESENT_SOON


@pytest.mark.parametrize("prepare", [{"modules": []}, None])
def test_agents_of_a_run_that_may_be_started_again_give_up_a_silent_launcher_soon(monkeypatch, prepare):
    told = []
    made = SimpleNamespace(send=lambda what, content: told.append((what, content)))
    monkeypatch.setattr(host_connection, "HostConnection", lambda *given: made)
    host_connection.Connections(None, [], prepare).open([SimpleNamespace(name="a")])
    assert told == ([("resent", RESENT_SOON), ("prepare", prepare)] if prepare is not None else [])
