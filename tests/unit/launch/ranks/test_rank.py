"""The exit code of a rank."""

from __future__ import annotations

import pytest

from parallelrun.launch.ranks import rank


@pytest.mark.parametrize("after", [None, RuntimeError("cannot release un-acquired lock")])
def test_ctrl_c_is_130_whatever_fails_because_of_it(monkeypatch, after):
    def interrupted(*_):
        try:
            raise KeyboardInterrupt
        finally:
            if after is not None:
                raise after

    monkeypatch.setattr(rank, "_work", interrupted)
    assert rank.serve(job=None, settings=None, heartbeats=None) == 130
