"""Transfer of a trainer rank's weights and optimizer state to disk, to engines and to host memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.common.checkpoint.rank_writing import RankWriting
from backends.common.trainer.state import TrainerState
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import PendingSave, RankPlacement, TrainerBackend, WeightBucket


class StoringTrainer(TrainerBackend):
    """The part of ``TrainerBackend`` that moves the state and computes nothing. See there for its methods."""

    state: TrainerState

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        self.config = config
        self.placement = placement
        self._started: RankWriting | None = None

    @property
    def runtime(self) -> contextlib.AbstractContextManager[None]:
        """Return a new context in which a phase runs."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Enter the backend's runtime. A failed collective or kernel becomes an error that names rank and phase."""
        try:
            with self.runtime:
                yield
        except RuntimeError as error:
            alone = self.placement.world_size == 1
            raise TrainerError(
                f"{type(error).__name__}: {error}",
                code="trainer-phase-failed",
                who=f"rank {self.placement.rank}",
                phase=name,
                remedy=""
                if alone
                else "if a collective failed, another rank died or hung: see the message of that rank",
            ) from error

    def settle_weights(self) -> None:
        """Make every weight of this rank whole if an update may still be in progress. Collective.

        Every method here that reads weights calls it.
        """

    @contextlib.contextmanager
    def _settled(self, phase: str) -> Iterator[None]:
        self.settle_weights()
        with self._phase(phase):
            yield

    @property
    def _bucket_bytes(self) -> int:
        return self.config.bucket_bytes(on_gpus=torch.cuda.is_available())

    def export_weights(self) -> Iterator[WeightBucket]:
        self.settle_weights()
        return self.state.export_weights(self._bucket_bytes)

    def export_hf(self, directory: Path) -> None:
        with self._settled("writing the Hugging Face model"):
            self.state.export_hugging_face(directory)

    def save(self, directory: Path) -> None:
        with self._settled("save"):
            self.state.plan_save(directory).write_all()

    def start_save(self, directory: Path) -> PendingSave:
        if self._started is not None and self._started.is_running:
            raise TrainerError(
                f"saving {directory} cannot start before the running save is finished",
                code="save-under-way",
                who=f"rank {self.placement.rank}",
                phase="save",
                remedy="finish that first",
            )
        with self._settled("save"):
            self._started = self.state.plan_save(directory, self.state.snapshot)
            self._started.write_in_background()
        return _StartedSave(self, self._started)

    def load(self, directory: Path) -> None:
        with self._settled("load"):
            self.state.load(directory)

    def save_weights(self, directory: Path) -> None:
        with self._settled("save"):
            self.state.save_weights(directory)

    def offload(self, keep_weights: bool = False) -> None:
        self.settle_weights()
        self.state.offload(keep_weights)

    def onload(self) -> None:
        self.state.onload()

    def shutdown(self) -> None:
        if hasattr(self, "state"):  # set-up may have failed earlier
            self.state.close()


@dataclass(frozen=True, slots=True)
class _StartedSave:
    trainer: StoringTrainer
    writing: RankWriting

    def is_written(self) -> bool:
        return self.writing.is_written()

    def finish(self) -> None:
        with self.trainer._phase("save"):
            self.writing.finish(self.trainer.config.trainer.step_timeout_s)
