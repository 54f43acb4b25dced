"""Switching shared devices between trainers and engines (``cluster.placement: colocated``)."""

from typing import Literal

from slime_like.orchestration.rollout.engines import Engines
from slime_like.orchestration.trainer.model_ranks import ModelRanks


class DeviceSwitch:
    """Turns on devices. Each method runs before a phase, and returns after the move.

    A shared device never holds optimizer state and KV cache at the same time. A sync hands over: gradients and
    optimizer state leave, engine weights come, buckets are sent, trainer weights leave, the KV cache comes.

    Dead engines leave the pool as soon as their death is detected. The others continue.

    Args:
        shared: trainers and engines on the same devices; ``None``: on separate devices, where nothing moves.
    """

    def __init__(self, shared: tuple[ModelRanks, Engines] | None = None) -> None:
        self._turn: Literal["trainers", "engines"] | None = None
        if shared is not None:
            self._trainers, self._engines = shared
            self._turn = "trainers"

    def starting_engines(self) -> None:
        """Take trainers off the devices: a starting engine takes all the memory that it is allowed."""
        if self._turn == "trainers":
            self._trainers.offload()
            self._turn = "engines"

    def training(self, keep_weights: bool = False) -> None:
        """Prepare the devices for scoring, training and saving.

        Args:
            keep_weights: whether engines keep their weights, to sample again without a weight sync.
        """
        if self._turn == "engines":
            self._engines.sleep(keep_weights)
            self._trainers.onload()
            self._turn = "trainers"

    def generation(self) -> None:
        """Prepare the devices for sampling."""
        if self._turn == "trainers":
            self._trainers.offload()
            self._engines.wake(("weights", "kv_cache"))
            self._turn = "engines"

    def begin_sync(self) -> None:
        """Prepare for a weight sync, in which trainers and engines both hold weights."""
        self.training()
        if self._turn is not None:
            self._trainers.offload(keep_weights=True)
            self._engines.wake(("weights",))

    def end_sync(self) -> None:
        """Give the devices to the engines after a sync."""
        if self._turn is not None:
            self._trainers.offload()
            self._engines.wake(("kv_cache",))
            self._turn = "engines"
