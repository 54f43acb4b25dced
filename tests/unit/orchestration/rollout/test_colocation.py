"""On shared devices trainer and engine never overlap."""

from collections.abc import Sequence
from typing import Any, cast

from slime_like.orchestration.rollout.colocation import SharedDevices


class Device:
    """What lies on a device. Trainers and engines that move write it down here; too much at once fails."""

    def __init__(self) -> None:
        self.there = {"trainer weights", "trainer state"}

    # As a trainer group.
    def offload(self, keep_weights: bool = False) -> None:
        self.there -= {"trainer state"} if keep_weights else {"trainer state", "trainer weights"}

    def onload(self) -> None:
        self._come("trainer weights", "trainer state")

    # As a rollout manager.
    def sleep(self) -> None:
        self.there -= {"weights", "kv_cache"}

    def wake(self, parts: Sequence[str]) -> None:
        self._come(*parts)

    def _come(self, *parts: str) -> None:
        assert not self.there & set(parts), f"{parts} are there already"
        self.there |= set(parts)
        assert not {"trainer state", "kv_cache"} <= self.there


def test_a_step_takes_turns() -> None:
    """The second one saves between sync and sampling."""
    device = Device()
    turns = SharedDevices(cast(Any, device), cast(Any, device))
    for saves in (False, True):
        turns.begin_sync()
        assert device.there == {"trainer weights", "weights"}
        turns.end_sync()
        if saves:
            turns.training()
            assert device.there == {"trainer weights", "trainer state"}
        turns.generation()
        turns.generation()  # evaluation asks again
        assert device.there == {"weights", "kv_cache"}
        turns.training()
        turns.training()
        assert device.there == {"trainer weights", "trainer state"}
    turns.generation()
    turns.begin_sync()
    assert device.there == {"trainer weights", "weights"}
