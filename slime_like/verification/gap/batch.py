"""One saved batch of a run, with the configuration and the weights that it was trained with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.config.sections import DebugConfig, DistillationConfig, ReferenceConfig
from slime_like.data.dump import dump_path, load_trajectories
from slime_like.errors import ConfigError
from slime_like.interfaces import load_engine
from slime_like.models.dimensions import ModelDimensions
from slime_like.orchestration.run.directory import CONFIG_FILE
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.batch import require_fit

_REMEDY = (
    "resume the run with one more of --steps, --debug.save_rollouts RUN_DIR/rollouts and "
    "--checkpoint.override '[schedule]'"
)


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """A saved batch of a run.

    Attributes:
        config: configuration of the run, without frozen models and 8-bit weights, and with replay of the rows' routes.
        quantization: ``sync.quantization`` of the run.
        version: weight version that the trainer scored the batch with: the number of steps before it.
        rows: rows that an engine can score.
    """

    config: RunConfig
    quantization: str
    version: int
    rows: list[ScoredTrajectory]

    @property
    def checkpoint(self) -> Path | None:
        """The trainer's files of the version; ``None`` means the initial weights."""
        return _checkpoint(self.config.run_dir, self.version)

    def at_older_versions(self) -> dict[int, Self]:
        """Return the batch at each other version of its tokens, if there are weights of it."""
        found = ((row.weight_versions, row.loss_mask) for row in self.rows)
        versions = {version for each, mask in found if each is not None for version in each[mask].tolist()}
        usable = (each for each in versions - {self.version} if _has_weights(self.config.run_dir, each))
        return {version: replace(self, version=version) for version in usable}

    @classmethod
    def read(cls, run_dir: Path, step: int | None, flags: Sequence[str]) -> Self:
        """Read the batch of ``step``, by default the latest one with a checkpoint of the step before it.

        Raises:
            ConfigError: the directory is not a run's, or has no such batch or no weights for it.
            DataError: the batch is damaged, or of another model.
        """
        if not (run_dir / CONFIG_FILE).is_file():
            raise ConfigError(f"RUN_DIR={run_dir} has no {CONFIG_FILE}; give the directory of a run", code="no-batch")
        config = load_config(run_dir / CONFIG_FILE, [*flags, "--run_dir", str(run_dir)])
        directory = config.debug.save_rollouts or run_dir / "rollouts"
        saved = sorted(int(path.stem[5:]) for path in directory.glob("step-*.pt"))
        usable = [each for each in saved if _has_weights(run_dir, each - 1)]
        chosen = step or (usable[-1] if usable else None)
        if chosen is None or chosen not in usable:
            steps = f"only steps {', '.join(map(str, usable))} have" if usable else "no step has"
            problem = f"{steps} a batch in {directory} and the checkpoint of the step before; {_REMEDY}"
            raise ConfigError(f"{f'--step={step}' if step else f'RUN_DIR={run_dir}'}: {problem}", code="no-batch")
        path = dump_path(directory, chosen)
        rows, dimensions = load_trajectories(path), ModelDimensions.from_checkpoint(config.model.path)
        require_fit(rows, dimensions, str(path))
        sampled = (row for row in rows if row.logprobs is not None and row.weight_versions is not None)
        kept = [row for row in sampled if row.total_len < config.max_model_len]
        for row in kept:
            row.teacher_hidden = None  # of different widths, and not compared
        if not any(row.loss_mask.any() for row in kept):
            raise ConfigError(f"{path}: no engine's logprobs of rows that it can score; {_REMEDY}", code="no-batch")
        update: dict[str, Any] = {
            "reference": ReferenceConfig(),
            "distillation": DistillationConfig(),
            "debug": DebugConfig(),
        }
        if config.model.lora.is_set:  # engines load an adapter, not merged weights
            lora = config.model.lora.model_copy(update={"sync": "adapter"})
            update["model"] = config.model.model_copy(update={"lora": lora})
        if dimensions.num_experts and getattr(load_engine(config.rollout.engine), "returns_routes", False):
            # Engines return routes only for a replay. Rows without them are routed live.
            update["algorithm"] = config.algorithm.model_copy(update={"routing_replay": "rollout"})
        update["sync"] = config.sync.model_copy(update={"quantization": "none"})
        return cls(config.model_copy(update=update), config.sync.quantization, chosen - 1, kept)


def _checkpoint(run_dir: Path, version: int) -> Path | None:
    """Return the trainer's files of a version; ``None`` means the initial weights."""
    return run_dir / "checkpoints" / f"step-{version:06d}" / "trainer" if version else None


def _has_weights(run_dir: Path, version: int) -> bool:
    path = _checkpoint(run_dir, version)
    return path is None or path.is_dir()
