"""Turns of trainers and engines on shared devices (``cluster.placement: colocated``)."""

from typing import Literal

from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.orchestration.trainer.group import TrainerGroup


class Turns:
    """Turns on separate devices, where nothing moves. Each method runs before a phase, and returns after the move."""

    def starting_engines(self) -> None:
        """Prepare the devices for starting engines."""

    def training(self, keep_weights: bool = False) -> None:
        """Prepare the devices for scoring, training and saving.

        Args:
            keep_weights: whether engines keep their weights, to sample again without a weight sync.
        """

    def generation(self) -> None:
        """Prepare the devices for sampling."""

    def begin_sync(self) -> None:
        """Prepare for a weight sync, in which trainers and engines both hold weights."""

    def end_sync(self) -> None:
        """Give the devices to the engines after a sync."""


class SharedDevices(Turns):
    """Turns on shared devices. A device never holds optimizer state and KV cache at the same time.

    A sync hands over: gradients and optimizer state leave, engine weights come, buckets are sent, trainer weights
    leave, the KV cache comes.

    Dead engines leave the pool as soon as their death is detected. The others continue.
    """

    def __init__(self, trainers: TrainerGroup, engines: EngineSupervisor) -> None:
        self._trainers = trainers
        self._engines = engines
        self._turn: Literal["trainers", "engines"] = "trainers"

    def starting_engines(self) -> None:
        """Take trainers off the devices: a starting engine takes all the memory that it is allowed."""
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
