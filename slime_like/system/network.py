"""Addresses, interfaces and ports of this host."""

import ipaddress
import socket

import psutil  # type: ignore[import-untyped]


def interfaces() -> dict[str, str]:
    """Name of the interface behind each of this host's addresses."""
    return {
        str(entry.address).partition("%")[0]: str(name)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def interface_of(address: str) -> str | None:
    """Name of the interface that has ``address``; ``None`` where this host has no such address.

    All of 127.0.0.0/8 is a Linux host's own, although its loopback interface lists one address.
    """
    known = interfaces()
    if address not in known and is_loopback(address):
        return next((name for address, name in known.items() if is_loopback(address)), None)
    return known.get(address)


def address_towards(host: str, port: int = 9) -> str:
    """This host's address on the way to ``host``. Nothing is sent: a datagram socket only looks up the route.

    Raises:
        OSError: there is no route.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def resolve(host: str) -> str:
    """The first address of ``host``, which may be an address.

    Raises:
        OSError: the name does not resolve.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    """Raises ``ValueError``: it is no address."""
    return ipaddress.ip_address(address).is_loopback


def host_and_port(host: str, port: int) -> str:
    """Format host and port; brackets keep an IPv6 address apart from the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on ``address`` alone; port 0 has the system choose.

    Raises:
        OSError: another process does, or the address is not this host's.
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
