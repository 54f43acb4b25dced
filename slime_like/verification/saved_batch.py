"""One saved batch of a run, and the trainer and engines with its weights, which compute its logprobs again."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor

from slime_like.checks.engines import chosen_transport
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.config.sections import DebugConfig, DistillationConfig, ReferenceConfig
from slime_like.data.dump import dump_path, load_trajectories
from slime_like.errors import ConfigError, EngineError, WeightSyncError
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams, load_engine
from slime_like.models.dimensions import ModelDimensions
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.rollout.engines import DeviceSwitch, Engines
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.run.directory import CONFIG_FILE
from slime_like.orchestration.run.engines import launch_engines
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.comparison import require_fit

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

        Raises ``ConfigError`` if the directory is not a run's, or has no such batch or no weights for it, and
        ``DataError`` if the batch is damaged, or of another model.
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


class Sides:
    """Trainer ranks of a run and, once they are asked, its engines, which load the trainer's weights."""

    def __init__(self, run_name: str, batch: SavedBatch, placement: Placement, stack: ExitStack) -> None:
        self._run_name, self._config, self._checkpoint = run_name, batch.config, batch.checkpoint
        self._placement, self._stack = placement, stack
        self._trainers = ModelRanks(batch.config, placement)
        self._engines: Engines | None = None
        self._turns = DeviceSwitch()

    @classmethod
    @contextmanager
    def opened(cls, run_name: str, batch: SavedBatch, with_engines: bool) -> Iterator[Self]:
        """Start the ranks in the cluster ``run_name``, with the weights of ``batch``. All ends with the context.

        Args:
            with_engines: whether to reserve devices for engines.
        """
        with Placement(batch.config, with_engines=with_engines) as placement, ExitStack() as stack:
            sides = cls(run_name, batch, placement, stack)
            stack.callback(sides._trainers.close)
            sides._trainers.launch()
            sides._trainers.setup(only_scores=True, checkpoint=batch.checkpoint)
            yield sides

    def score(self, rows: Sequence[ScoredTrajectory]) -> list[Tensor]:
        """Return the trainer's logprobs, (response_len,) of each row, at its temperature and over its supports."""
        self._turns.training(keep_weights=True)
        return [each["old_logprobs"] for each in self._trainers.score(rows)]

    def teach(self, rows: Sequence[ScoredTrajectory]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return an engine's logprobs of each row, (response_len,), and its ``routes``, or ``None`` if it has none.

        The engine gets the rows as prompts, and scores at temperature 1 over the vocabulary.
        """
        sampling = SamplingParams(max_new_tokens=1)
        prompts = [PromptInput(torch.cat((row.prompt_tokens, row.response_tokens)).tolist()) for row in rows]
        requests = [
            GenerationRequest(row.sequence_id, prompt, sampling, prompt_logprobs=True)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        engines = self._started()
        self._turns.generation()
        answers = [generation for (generation,) in engines.generate_all(requests)]
        logprobs = [
            torch.tensor(each.prompt_logprobs)[row.prompt_len - 1 :] for row, each in zip(rows, answers, strict=True)
        ]
        if "routes" not in answers[0].fields:
            return logprobs, None
        routes = [torch.tensor(each.fields["routes"]) for each in answers]
        return logprobs, [each[: row.total_len - 1] for row, each in zip(rows, routes, strict=True)]

    def sync_problem(self) -> str | None:
        """Send the weights to the engines as the run does. Return why a verified sync fails, or ``None``."""
        config, engines = self._config, self._started()
        rounds = config.trainer.fp8 != "none"
        probe = Probe(config.model, config.sync.probe_tolerance, config.max_model_len, (), rounds)
        probe.trial_due = False
        transport = chosen_transport(config, self._placement.device == "GPU", self._placement.num_nodes)
        settings, policy = config.sync.model_copy(update={"verify": True}), self._trainers
        parts = settings, transport, config.model.dtype, probe, policy, engines, self._turns, self._run_name
        try:
            (sync := WeightSync(*parts)).connect()
            sync.run(1)
        except (EngineError, WeightSyncError) as error:
            return error.problem
        return None

    def _started(self) -> Engines:
        if self._engines is not None:
            return self._engines
        colocated = self._config.cluster.placement == "colocated"
        config = self._config.model_copy(update={"model": self._config.model.model_copy(update=self._exported())})
        devices, alive = self._trainers.devices() if colocated else (), self._trainers.liveness("waiting for engines")
        self._engines, _ = launch_engines(config, self._stack, self._placement, print, devices, alive)
        if colocated:
            self._trainers.offload()
        self._engines.start()
        if colocated:
            self._engines.sleep(keep_weights=True)
            self._trainers.onload()
            self._turns = DeviceSwitch((self._trainers, self._engines))
        return self._engines

    def _exported(self) -> dict[str, Any]:
        """Write the trainer's weights as a Hugging Face directory. Return the settings of ``model`` that name it."""
        model = self._config.model
        if self._checkpoint is None and model.weights is None and not model.lora.is_set:
            return {}
        parent = self._stack.enter_context(TemporaryDirectory(prefix="explain-gap-", dir=self._config.run_dir))
        self._trainers.call("exporting weights", TrainerRank.export_hf, directory := Path(parent, "hf"))
        return {"lora": model.lora.model_copy(update={"path": directory})} if model.lora.is_set else {"path": directory}
