"""Addresses, interfaces and ports of this host, lists of host names, and URLs without credentials."""

import ipaddress
import itertools
import re
import socket
from urllib.parse import urlsplit

import psutil

MOST_NODES = 65_536
_BETWEEN_TERMS = re.compile(r",(?![^\[]*\])")
_TERM = re.compile(r"(?:[^\[\]]|\[[^\[\]]+\])+")
_PART = re.compile(r"\[(.+?)\]|([^\[]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SECRETS = ("auth", "authorization", "cookie", "key", "password", "passwd", "pwd", "secret", "signature", "token")


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


def expand_node_list(text: str) -> list[str]:
    """Return the host names of a Slurm node list, in its order. Slurm's tools are not needed.

    ``node[08-10,12],gpu-a[1-2]b`` is node08, node09, node10, node12, gpu-a1b, gpu-a2b. A range's numbers are as wide as
    its lower end is written. If a name has several brackets, the last one varies fastest. This is the format of
    ``SLURM_JOB_NODELIST``. ``scontrol show hostnames`` prints the same names.

    Raises ``ValueError`` if the text cannot be read, or names too many nodes.
    """
    names: list[str] = []
    for term in map(str.strip, _BETWEEN_TERMS.split(text)):
        if not _TERM.fullmatch(term):
            raise ValueError(f"node list {text!r}: {term!r} is not a name such as node1 or node[01-16,20]")
        choices = [_numbers(numbers, term) if numbers else [name] for numbers, name in _PART.findall(term)]
        names += map("".join, itertools.islice(itertools.product(*choices), MOST_NODES + 1))
        if len(names) > MOST_NODES:
            raise ValueError(f"node list {text!r} names more than {MOST_NODES} nodes")
    return names


def _numbers(inside: str, term: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"node list term {term!r}: {part!r} is neither a number nor a range such as 01-16")
        low, high = found[1], found[2] or found[1]
        if not 0 <= int(high) - int(low) < MOST_NODES:
            raise ValueError(f"node list term {term!r}: the range {part!r} counts down, or is too long")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def is_credential(name: str) -> bool:
    """Return whether a header or query parameter holds a credential, by its name, such as ``X-Api-Key``.

    Values of credentials are neither saved nor printed.
    """
    return name.lower().endswith(_SECRETS)


def redact_url(url: str) -> str:
    """Return a URL as it may be printed: without its user and without its query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "..."
    if "@" in url.partition("//")[2].removeprefix(parts.netloc):  # a password with a slash, "?" or "#" in it
        return f"{parts.scheme}://..."
    user, _, host = parts.netloc.rpartition("@")
    query = "?..." if parts.query else ""
    return f"{parts.scheme}://{'...@' if user else ''}{host}{parts.path}{query}"
