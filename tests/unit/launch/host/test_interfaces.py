"""The interface that gloo and NCCL are told to use: the one towards rank 0, unless the user has chosen."""

from __future__ import annotations

from parallelrun.launch.host import interfaces
from parallelrun.launch.host.environment import LOOPBACK


def test_it_is_the_one_towards_the_host():
    assert interfaces.towards("127.0.0.1") == LOOPBACK
    assert interfaces.towards("no such host.invalid") is None


def test_what_the_user_has_chosen_stays():
    assert interfaces.socket_variables({}, "127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": f"={LOOPBACK}",
    }
    assert interfaces.socket_variables({"GLOO_SOCKET_IFNAME": "eth5"}, "127.0.0.1") == {
        "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"
    }


def test_one_that_this_host_does_not_have_is_told_with_those_that_it_has():
    assert interfaces.missing({}) == interfaces.missing({"GLOO_SOCKET_IFNAME": LOOPBACK}) == ""
    found = interfaces.missing({"GLOO_SOCKET_IFNAME": f"{LOOPBACK},ib7"})
    assert found.startswith(f"GLOO_SOCKET_IFNAME={LOOPBACK},ib7, and this host has only") and LOOPBACK in found


def test_the_addresses_of_this_host_are_those_that_others_can_reach(monkeypatch, tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\nfe80000000000000a87abdfffe13741f 02 40 20 80     eth0\n"
    )
    monkeypatch.setattr(interfaces, "_IPV6", table)
    monkeypatch.setattr(interfaces, "_ipv4", lambda: iter([("lo", "127.0.0.1"), ("eth0", "10.77.0.1")]))
    assert interfaces.addresses() == ["10.77.0.1", "fe80::a87a:bdff:fe13:741f"]
