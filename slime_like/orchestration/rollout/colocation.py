"""Turns of trainers and engines on the devices that they share (``cluster.placement: colocated``)."""

from typing import Literal

from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.orchestration.trainer.group import TrainerGroup


class Turns:
    """Separate devices: nothing moves. Each method is called before a phase; what must move has moved on return."""

    def starting_engines(self) -> None:
        """Prepare the devices for starting engines."""

    def training(self, keep_weights: bool = False) -> None:
        """Prepare the devices for scoring, training and saving.

        Args:
            keep_weights: engines keep theirs, for sampling that follows without a weight sync.
        """

    def generation(self) -> None:
        """Prepare the devices for sampling."""

    def begin_sync(self) -> None:
        """Prepare for a weight sync, in which trainers and engines both hold weights."""

    def end_sync(self) -> None:
        """Give the devices to the engines after a sync."""


class SharedDevices(Turns):
    """Takes turns, so that a device never holds optimizer state and KV cache at once.

    A sync is the hand-over: gradients and optimizer state leave, engine weights come, buckets travel, trainer weights
    leave, the KV cache comes.

    Engines that have died leave the pool when they are found dead; the others go on.
    """

    def __init__(self, trainers: TrainerGroup, engines: EngineSupervisor) -> None:
        self._trainers = trainers
        self._engines = engines
        self._turn: Literal["trainers", "engines"] = "trainers"

    def starting_engines(self) -> None:
        """Trainers leave: an engine that starts takes all the memory that it is allowed."""
        if self._turn != "engines":
            self._trainers.offload()
            self._turn = "engines"

    def training(self, keep_weights: bool = False) -> None:
        if self._turn == "trainers":
            return
        self._engines.sleep(keep_weights)
        self._trainers.onload()
        self._turn = "trainers"

    def generation(self) -> None:
        if self._turn == "engines":
            return
        self._trainers.offload()
        self._engines.wake(("weights", "kv_cache"))
        self._turn = "engines"

    def begin_sync(self) -> None:
        self.training()
        self._trainers.offload(keep_weights=True)
        self._engines.wake(("weights",))

    def end_sync(self) -> None:
        self._trainers.offload()
        self._engines.wake(("kv_cache",))
        self._turn = "engines"
