"""What nodes say to each other while they start, run and end; and how it looks on the wire."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Hello:
    """A node reports to node 0.

    Attributes:
        rank: its node rank, 1 and up.
        host: its name.
        address: its address in the cluster.
        versions: installed versions, by distribution; "" where one is missing.
    """

    rank: int
    host: str
    address: str
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Look:
    """Node 0 to a node that has reported: is this file there?

    Attributes:
        witness: a file that node 0 has made beside the run directory; a node that does not see it shares no files.
    """

    witness: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A node to node 0: the file is there."""


@dataclass(frozen=True, slots=True)
class Join:
    """Node 0 to every other one: all are here, start Ray.

    Attributes:
        gcs: ADDRESS:PORT of Ray's head.
    """

    gcs: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A node to node 0: Ray runs here."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Either way, every few seconds: silence means that the other is lost."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A node to node 0: it cannot go on, and why."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Node 0 to every other one: how the run ended.

    Attributes:
        code: exit code for every node.
        sentence: the cause, where the code is not 0.
    """

    code: int
    sentence: str = ""


Message = Hello | Look | Seen | Join | Joined | Alive | Problem | Verdict
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Look, Seen, Join, Joined, Alive, Problem, Verdict)
}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """
    Raises:
        ValueError: it is none of our messages.
    """
    try:
        fields = json.loads(data)
        return _KINDS[fields.pop("kind")](**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not understood: {data[:80]!r}") from error
