"""The network interface that reaches the other hosts: gloo and NCCL are told to use it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux
_ANY_PORT = 9
_IPV6 = Path("/proc/net/if_inet6")


def towards(host: str) -> str | None:
    """Return the interface from which this host sends to `host` (Linux, IPv4); None if it is not known."""
    address = address_towards(host)
    return _with_address(address) if address else None


def address_towards(host: str) -> str:
    """Return the address from which this host sends to `host`; empty if it is not known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def socket_variables(environ: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface towards `host`, except those that are set.

    Left alone, gloo binds to what the host's own name resolves to, which is often 127.0.1.1, and NCCL takes the first
    interface that looks like a network.
    """
    name = towards(host)
    variables = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {key: value for key, value in variables.items() if not environ.get(key)}


def missing(environ: Mapping[str, str]) -> str:
    """Return which of the interfaces that gloo is told to use this host does not have; empty if it has all."""
    present = {name for _, name in socket.if_nameindex()}
    names = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    absent = [name for name in names if name not in present]
    has = ", ".join(sorted(present))
    return f"GLOO_SOCKET_IFNAME={','.join(names)}, and this host has only {has}" if absent else ""


def addresses() -> list[str]:
    """Return the addresses by which other hosts may reach this one."""
    addresses = [address for _, address in _ipv4()]
    with contextlib.suppress(OSError):
        for line in _IPV6.read_text().splitlines():
            addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return [address for address in addresses if address != "::1" and not address.startswith("127.")]


def _with_address(address: str) -> str | None:
    """Return the interface with this IPv4 address."""
    return next((name for name, own in _ipv4() if own == address), None)


def _ipv4() -> Iterator[tuple[str, str]]:
    """Yield the name and the IPv4 address of each interface that has one."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                yield name, socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
