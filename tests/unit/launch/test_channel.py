"""Who does not know the key gets nowhere, and nobody else can speak on a connection of two who do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_like.launch.channel import Channel, LostError, WrongKeyError
from slime_like.launch.messages import Alive, Hello, Joined, Verdict

KEY = b"k" * 32


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def shake(pool: ThreadPoolExecutor, ours: socket.socket, theirs: socket.socket, key: bytes) -> tuple[Channel, Channel]:
    other = pool.submit(Channel, theirs, key, False, 5.0)
    return Channel(ours, KEY, leads=True, timeout_s=5.0), other.result()


def test_messages_arrive_as_they_are(pool: ThreadPoolExecutor) -> None:
    head, node = shake(pool, *socket.socketpair(), KEY)
    said = [Hello(3, "gpu-3", "10.0.0.3", {"ray": "2.60.0"}), Alive(), Joined()]
    for message in said:
        node.send(message)
    assert [head.receive(5) for _ in said] == said
    head.send(Verdict(1, "it is over: ¾ of it"))
    assert node.receive(5) == Verdict(1, "it is over: ¾ of it")


def test_a_wrong_key_is_refused_on_both_sides(pool: ThreadPoolExecutor) -> None:
    ours, theirs = socket.socketpair()
    other = pool.submit(Channel, theirs, b"w" * 32, False, 5.0)
    with pytest.raises(WrongKeyError, match="does not know the cluster's key"):
        Channel(ours, KEY, leads=True, timeout_s=5.0)
    with pytest.raises(WrongKeyError, match="does not know the cluster's key"):
        other.result()


def test_somebody_elses_protocol_is_refused(pool: ThreadPoolExecutor) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(WrongKeyError, match="no node of a cluster"):
        Channel(ours, KEY, leads=True, timeout_s=5.0)


def test_an_answer_of_ones_own_is_no_proof(pool: ThreadPoolExecutor) -> None:
    """Sent back what it says itself, a side must not take it for the other's proof."""
    ours, mirror = socket.socketpair()

    def reflect() -> None:
        for _ in range(2):
            mirror.sendall(mirror.recv(1024))

    pool.submit(reflect)
    with pytest.raises(WrongKeyError, match="does not know"):
        Channel(ours, KEY, leads=True, timeout_s=5.0)


@pytest.mark.parametrize(
    "forge",
    [
        lambda line: line.replace(b'"code": 0', b'"code": 1'),
        lambda line: b"",  # left out: the next one has the wrong number
        lambda line: line + line,  # repeated
    ],
    ids=["changed", "left out", "repeated"],
)
def test_a_line_in_between_is_noticed(pool: ThreadPoolExecutor, forge: Callable[[bytes], bytes]) -> None:
    """Somebody in the middle passes the handshake on, and meddles with the first line after it."""
    (ours, left), (right, theirs) = socket.socketpair(), socket.socketpair()
    middle = [left.makefile("rb"), right.makefile("rb")]
    head, node = (pool.submit(Channel, end, KEY, end is ours, 5.0) for end in (ours, theirs))
    for _ in range(3):  # greeting, number, proof
        right.sendall(middle[0].readline())
        left.sendall(middle[1].readline())
    for message in (Verdict(0), Alive()):
        head.result().send(message)
    right.sendall(forge(middle[0].readline()) + middle[0].readline())
    with pytest.raises(LostError, match="forged or damaged"):
        for _ in range(3):
            node.result().receive(5)


def test_silence_and_the_end_are_told(pool: ThreadPoolExecutor) -> None:
    head, node = shake(pool, *socket.socketpair(), KEY)
    with pytest.raises(LostError, match="silent for 0 s"):
        head.receive(0.1)
    head, node = shake(pool, *socket.socketpair(), KEY)
    node.close()
    with pytest.raises(LostError, match="ended without a word"):
        head.receive(5)


def test_who_ends_with_something_unread_has_ended(pool: ThreadPoolExecutor) -> None:
    """The kernel then resets the connection, which a reader is told as an error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    head, _ = shake(pool, ours, theirs, KEY)
    head.send(Alive())
    theirs.recv(1, socket.MSG_PEEK)  # it has come, and stays unread
    socket.close(theirs.detach())  # as the kernel does for a process that was killed
    with pytest.raises(LostError, match=r"^its connection ended without a word$"):
        head.receive(5)
