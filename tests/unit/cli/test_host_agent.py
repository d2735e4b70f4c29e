"""The agent of a host: what it asks of the kernel, and what it tells its launcher. No ssh, no ranks."""

from __future__ import annotations

import pytest

from parallelrun.cli import host_agent


@pytest.mark.parametrize(("is_local", "ends"), [(True, False), (False, True)])
def test_only_an_agent_over_ssh_ends_when_its_connection_is_dead(monkeypatch, is_local, ends):
    """The user's own ssh session may be dead (a laptop that sleeps) while the launcher goes on in tmux."""
    monkeypatch.setattr(host_agent, "is_unanswered", lambda environ: True)
    monkeypatch.setattr(host_agent.os, "write", lambda descriptor, data: len(data))
    found = host_agent.Agent(is_local)
    looks = iter([[], []])

    def lines() -> list[bytes]:
        found._hung_up = next(looks, None) is None or found._hung_up
        return []

    monkeypatch.setattr(found, "_lines", lines)
    found.serve()
    assert len(list(looks)) == (1 if ends else 0)
