"""Node 0's roll call and the others' side of it, on loopback."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import pytest

from slime_like.errors import LaunchError
from slime_like.launch.membership import Event, Lost, Membership, RollCall
from slime_like.launch.messages import Hello, Join, Joined, Look, Problem, Verdict

KEY, HOST = b"k" * 32, "127.0.0.1"


def joined(stack: ExitStack, roll: RollCall, rank: int, host: str = "", silence_s: float = 20.0) -> Membership:
    member = stack.enter_context(Membership.open(HOST, roll.port, KEY, timeout_s=5, silence_s=silence_s))
    member.say(Hello(rank, host or f"gpu-{rank}", f"10.0.0.{rank}"))
    return member


def heard(roll: RollCall) -> tuple[str, Event]:
    found = roll.next_event(timeout_s=10)
    assert found is not None
    return found


def answer(member: Membership) -> Event:
    event = member.next_event(timeout_s=10)
    assert event is not None
    return event


def turned_away(roll: RollCall, why: str) -> None:
    """Wait until node 0 has said so of whoever came last."""
    deadline = time.monotonic() + 10
    while why not in roll.turned_away and time.monotonic() < deadline:
        time.sleep(0.01)
    assert roll.turned_away == f"{HOST} was turned away: {why}"


def test_nodes_come_are_told_and_go() -> None:
    with RollCall(HOST, 0, KEY, nodes=3, silence_s=20) as roll, ExitStack() as stack:
        assert roll.missing() == [1, 2]
        first = joined(stack, roll, 1)
        name, event = heard(roll)
        assert name == "node 1 (gpu-1, 10.0.0.1)" and isinstance(event, Hello) and roll.missing() == [2]
        second = joined(stack, roll, 2)
        heard(roll)
        roll.tell("node 2 (gpu-2, 10.0.0.2)", Look("witness"))
        roll.tell_all(Join("10.0.0.0:1"))
        assert answer(second) == Look("witness")
        assert answer(first) == answer(second) == Join("10.0.0.0:1")
        second.say(Joined())
        assert heard(roll) == ("node 2 (gpu-2, 10.0.0.2)", Joined())
        first.say(Problem("no disk"))
        assert heard(roll) == ("node 1 (gpu-1, 10.0.0.1)", Problem("no disk"))
        second.__exit__()
        name, event = heard(roll)
        assert name.startswith("node 2") and isinstance(event, Lost) and roll.missing() == [2]
        roll.tell_all(Verdict(1, "over"))
        assert answer(first) == Verdict(1, "over")


def test_a_rank_is_given_once_and_can_come_back() -> None:
    with RollCall(HOST, 0, KEY, nodes=2, silence_s=20) as roll, ExitStack() as stack:
        joined(stack, roll, 1)
        heard(roll)
        refused = [answer(joined(stack, roll, rank, "other")) for rank in (1, 2, 0)]
        assert refused == [
            Verdict(1, "NODE_RANK=1 on other is refused: node 1 (gpu-1, 10.0.0.1) has it already"),
            Verdict(1, "NODE_RANK=2 on other is refused: of NODES=2 it is 1 to 1"),
            Verdict(1, "NODE_RANK=0 on other is refused: of NODES=2 it is 1 to 1"),
        ]


def test_a_silent_node_is_lost() -> None:
    """It keeps its connection, but says nothing any more: as a node without power or network does."""
    with RollCall(HOST, 0, KEY, nodes=2, silence_s=1.0) as roll, ExitStack() as stack:
        joined(stack, roll, 1)
        heard(roll)
        _, event = heard(roll)
        assert event == Lost("it has been silent for 1 s")


def test_without_the_key_nothing_is_let_in() -> None:
    with RollCall(HOST, 0, KEY, nodes=2, silence_s=20) as roll:
        with pytest.raises(LaunchError, match=r"does not know the cluster's key: give every node the same TOKEN_FILE"):
            Membership.open(HOST, roll.port, b"w" * 32, timeout_s=5, silence_s=20)
        turned_away(roll, "it does not know the cluster's key")  # else its word could come after the next one's
        with socket.create_connection((HOST, roll.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1024):  # until we are shown the door
                pass
        turned_away(roll, "it is no node of a cluster")
        assert roll.missing() == [1]


def test_a_busy_port_and_nobody_there() -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"port {port} of {HOST} cannot be listened on \(Address already in use\)"
        ):
            RollCall(HOST, port, KEY, nodes=2, silence_s=20)
    with socket.socket() as nobody:  # bound, so that nobody else gets the port, and not listening
        nobody.bind((HOST, 0))
        port = nobody.getsockname()[1]
        refused = rf"node 0 did not answer at {HOST}:{port} within 1 s \(Connection refused\)"
        with pytest.raises(LaunchError, match=refused):
            Membership.open(HOST, port, KEY, timeout_s=1, silence_s=20)


def test_who_comes_after_the_end_is_told_how_it_was() -> None:
    """While node 0 still waits for others to hang up."""
    with RollCall(HOST, 0, KEY, nodes=3, silence_s=20) as roll, ExitStack() as stack:
        joined(stack, roll, 1)
        heard(roll)
        assert not roll.is_complete
        roll.tell_all(Verdict(2, "the plan does not fit"))
        assert answer(joined(stack, roll, 2)) == Verdict(2, "the plan does not fit")
        assert not roll.is_complete
