"""`doctor --hosts`: the table of bandwidths, and who is slow."""

from __future__ import annotations

from parallelrun.cli.main import main
from parallelrun.cli.tools import doctor_hosts

NAMES = ["a", "b", "c"]
USED = {"a": "eth0", "b": "eth0", "c": "wlan0"}


def report(ab: float, ac: float, bc: float) -> list[str]:
    return doctor_hosts.report(NAMES, {("a", "b"): ab, ("a", "c"): ac, ("b", "c"): bc}, "gloo", USED)


def test_the_table_has_every_pair_both_ways():
    lines = report(10, 9, 8)
    assert [line.split() for line in lines[1:5]] == [
        ["a", "b", "c"],
        ["a", "-", "10.00", "9.00"],
        ["b", "10.00", "-", "8.00"],
        ["c", "9.00", "8.00", "-"],
    ]
    assert lines[5:] == ["no pair is slower than 50% of the fastest"]


def test_a_host_that_is_slow_with_all_others_is_named_with_its_interface():
    (line,) = report(10, 1, 2)[5:]
    assert line.startswith("slow: c with every other host, 1.50 of 10.00 Gbit/s; its interface: wlan0")


def test_a_pair_whose_hosts_are_fast_with_others_is_named_as_a_pair():
    assert report(10, 10, 2)[5:] == ["slow: b with c, 2.00 of 10.00 Gbit/s"]


def test_it_needs_two_hosts(capsys):
    assert main(["doctor", "--hosts", "-H", "localhost", "--ssh-port", "no"]) == 2
    told = capsys.readouterr().err
    assert "needs two of them" in told and "not a port" in told
