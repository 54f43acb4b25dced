"""Addresses, interfaces and ports of this host."""

import ipaddress
import socket

import psutil


def interfaces() -> dict[str, str]:
    """Return the name of the interface for each address of this host."""
    return {
        str(entry.address).partition("%")[0]: str(name)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has ``address``, or ``None`` if this host doesn't have the address.

    A Linux host has all of 127.0.0.0/8, although its loopback interface lists one address.
    """
    known = interfaces()
    if address not in known and is_loopback(address):
        return next((name for address, name in known.items() if is_loopback(address)), None)
    return known.get(address)


def address_towards(host: str, port: int = 9) -> str:
    """Return this host's address on the route to ``host``. Nothing is sent. Raises ``OSError`` if there is no route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def is_loopback(address: str) -> bool:
    """Return whether an address is loopback. Raises ``ValueError`` if it is not an address."""
    return ipaddress.ip_address(address).is_loopback


def host_and_port(host: str, port: int) -> str:
    """Format host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on ``address`` only. With port 0, the system chooses a free one.

    Raises ``OSError`` if the port is taken, or the address is not this host's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port may linger
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def is_free(address: str, port: int) -> bool:
    """Return whether ``listen`` would succeed now."""
    try:
        listen(address, port).close()
    except OSError:
        return False
    return True
