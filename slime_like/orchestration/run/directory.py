"""A run's directory at its start: what is resumed, what is moved aside, and which settings have changed."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from slime_like.checks.run_files import FINGERPRINT, checkpoint_problem
from slime_like.config import RunConfig
from slime_like.config.lora import ADAPTER_CONFIG
from slime_like.config.reading.fields import all_fields, value_text
from slime_like.config.reading.load import load_config, save_config
from slime_like.data.ledger import FILE_NAME as LEDGER_FILE
from slime_like.errors import ConfigError, RunFinishedError, SlimeLikeError
from slime_like.models.weight_files import fingerprint
from slime_like.observability.health import EVENTS_FILE
from slime_like.observability.metrics import METRICS_FILE, REPORT_FILE, TIMELINE_FILE, WANDB_ID
from slime_like.observability.progress import DRIVER_LOG
from slime_like.orchestration.run.lock import LOCK_FILE, RunLock
from slime_like.orchestration.run.reference import REFERENCE
from slime_like.orchestration.trainer.checkpoint import Checkpoint, newest_whole
from slime_like.system.words import pluralize

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
"""Summary figures. The file exists only if the run finished."""

EXPORT, CRITIC_EXPORT = "hf", "critic_hf"
"""Name of the trained model's Hugging Face directory."""

ENCODED_ROWS = "encoded_rows"
"""Name of the default for ``data.cache_dir``."""

_WRITTEN: tuple[str, ...] = (CONFIG_FILE, SUMMARY_FILE, DRIVER_LOG, REPORT_FILE, LEDGER_FILE, REFERENCE, WANDB_ID)
_WRITTEN += (TIMELINE_FILE, "checkpoints", "tables", "tensorboard", EVENTS_FILE, "capsules")
"""Names of a run's files, except the model. Every run writes ``METRICS_FILE`` at its start, which marks its files."""

_READ: tuple[str, ...] = (
    "model.path",
    "model.weights",
    "model.lora.path",
    "reference.path",
    "distillation.path",
    "evaluation.files",
)
_READ += ("debug.load_rollouts",)


class RunDirectory:
    """The directory of a run with this configuration."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._path = config.run_dir

    def find_checkpoint(self, found_damaged: Mapping[Path, str] = MappingProxyType({})) -> Checkpoint | None:
        """Find the checkpoint for ``resume``; ``None`` means a new start. A given path is the only candidate.

        Args:
            found_damaged: see ``newest_whole``.

        Raises:
            CheckpointError: the given checkpoint cannot be read or resumed from.
            ConfigError: every checkpoint of the run is damaged, or it is of another backend, model or schedule.
            RunFinishedError: the run has finished.
        """
        resume = self._config.resume
        if resume == "never":
            return None
        checkpoint = newest_whole(self._path, found_damaged) if resume == "auto" else Checkpoint.read(Path(resume))
        if checkpoint is not None:
            checkpoint.require_whole()
            self._require_resumable(checkpoint)
        return checkpoint

    def make(self, checkpoint: Checkpoint | None, lock: RunLock) -> Path | None:
        """Make the directory for a start from ``checkpoint``, and save a new run's configuration there.

        If the directory has another run than the resumed one, that run is moved aside.

        Returns:
            New path of the earlier run, if there was one.

        Raises:
            ConfigError: inputs of this run would move with it, or other files are in the way of this run's files.
            SlimeLikeError: it cannot be moved.
        """
        resumes_here = self._lies_here(checkpoint)
        moved = not resumes_here and (self._path / METRICS_FILE).exists()
        if self._config.checkpoint.export_hf and not moved:
            self._require_room_for_export(resumes_here)
        if resumes_here:
            return None
        aside = None
        if moved:
            self._require_nothing_read_there()
            aside = _move_aside(self._path)
            lock.take()
            (aside / LOCK_FILE).unlink(missing_ok=True)
            if (rows := aside / ENCODED_ROWS).is_dir():
                rows.rename(self._path / ENCODED_ROWS)  # this run reads them
        else:
            _require_nothing_overwritten(self._path)
        (self._path / METRICS_FILE).touch()
        save_config(self._config, self._path / CONFIG_FILE)
        return aside

    def record_settings(self, checkpoint: Checkpoint) -> list[str]:
        """List the settings that changed since the run's earlier start, as "field: before -> now".

        If the configuration differs, the earlier one is kept as ``config.until-step-N.yaml``, which the steps up to N
        were made with. Call this after loading the checkpoint, so a refused start changes nothing.
        """
        if not self._lies_here(checkpoint):
            return []
        changed = self._keep_config(checkpoint.step)
        save_config(self._config, self._path / CONFIG_FILE)
        return changed

    def measured_otherwise_until(self) -> int:
        """Return the last step whose held-out accuracy is not comparable with this start's, or 0 if all are.

        Such steps had another first reward function, or other values of the settings that it depends on.
        """
        steps = [0]
        for path in self._path.glob("config.until-step-*.yaml"):
            try:
                is_same = _measured_by(load_config(path, [])) == _measured_by(self._config)
            except ConfigError:  # the file is from another version: unknown
                is_same = False
            steps += [] if is_same else [int(path.stem.rpartition("-")[2])]
        return max(steps)

    def _lies_here(self, checkpoint: Checkpoint | None) -> bool:
        return checkpoint is not None and checkpoint.path.is_relative_to(self._path.resolve())

    def _require_resumable(self, checkpoint: Checkpoint) -> None:
        if not self._config.debug.load_rollouts:
            checkpoint.data_position()  # raises before anything starts
        model, backend = self._config.model, self._config.trainer.backend
        if problem := checkpoint_problem(checkpoint.path, model, backend, "resume"):
            raise ConfigError(problem)
        wrote = checkpoint.state.get(FINGERPRINT)
        if wrote is not None and fingerprint(self._config.model.path) not in (None, wrote):
            problem = f"{checkpoint.path} was trained from other weights; give those, or set another run_dir"
            raise ConfigError(f"model.path={self._config.model.path}: {problem}", code="resume-of-another-model")
        has_finished = checkpoint.step >= self._config.steps and (self._path / SUMMARY_FILE).exists()
        if has_finished and self._lies_here(checkpoint):
            is_fixed = self._config.trainer.optimizer.depends_on_length
            with_override = " with checkpoint.override: [schedule]" if is_fixed else ""
            problem = f"the run in {self._path} has finished {pluralize(checkpoint.step, 'step')}"
            remedy = f"raise steps{with_override}, set another run_dir, or set resume: never to start over"
            raise RunFinishedError(problem, remedy=f"to train further, {remedy}")
        may_change = "schedule" in self._config.checkpoint.override
        if changed := [] if may_change else self._changed_schedule(checkpoint):
            problem = f"{checkpoint.path} was trained with another learning-rate schedule ({'; '.join(changed)})"
            raise ConfigError(f"resume: {problem}; keep it, or set checkpoint.override: [schedule]")

    def _changed_schedule(self, checkpoint: Checkpoint) -> list[str]:
        """List changes that trainers would reject after their start, or none if the earlier settings cannot be read."""
        try:
            before = load_config(checkpoint.path.parents[1] / CONFIG_FILE, [])
        except (ConfigError, OSError):
            return []
        old, new = before.schedule, self._config.schedule
        return [f"{name} {old.get(name)}, now {new.get(name)}" for name in old | new if old.get(name) != new.get(name)]

    def _require_nothing_read_there(self) -> None:
        place = self._path.resolve()
        values = {name: attrgetter(name)(self._config) for name in _READ}
        values["data.train"] = self._config.data.training_files
        values["distillation.teachers"] = tuple(self._config.distillation.teachers.values())
        moved = f"inside run_dir={self._path}, which would be renamed with its earlier run; set another run_dir"
        inside = [
            f"{name}={path}: {moved}"
            for name, paths in values.items()
            for path in (paths if isinstance(paths, tuple) else (paths,))
            if path is not None and path.resolve().is_relative_to(place)
        ]
        if inside:
            raise ConfigError(inside)

    def _require_room_for_export(self, resumes_here: bool) -> None:
        """Reject files that the export must not replace, before the first step. If the run resumes in this directory, a
        model there is from an earlier start."""
        places: dict[str, tuple[str, Path | None]] = {EXPORT: ("model.path", self._config.model.path)}
        if self._config.algorithm.needs_critic:
            places[CRITIC_EXPORT] = ("critic.path", self._config.critic.path)
        for name, (setting, source) in places.items():
            export = self._path / name
            read = source is not None and export.resolve() == source.resolve()
            wrote = any((export / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
            earlier = resumes_here and not read and wrote
            if not os.path.lexists(export) or earlier or _is_empty_directory(export):
                continue
            problem = f"is {setting if read else 'not a model that this run wrote'}, but the model is exported there"
            remedy = "move it away, set another run_dir, or set checkpoint.export_hf: false"
            raise ConfigError(f"run_dir={self._path}: {export} {problem}; {remedy}")

    def _keep_config(self, step: int) -> list[str]:
        """Keep the earlier configuration if this one differs, and return the differences."""
        path = self._path / CONFIG_FILE
        if not path.is_file():
            return []
        try:
            before = load_config(path, [])
        except ConfigError as error:
            changed = [f"{path} can no longer be read ({error.problems[0]})"]
        else:
            names = [name for name in all_fields() if name not in ("resume", "run_dir", "cluster.address")]
            values = {name: (attrgetter(name)(before), attrgetter(name)(self._config)) for name in names}
            changed = [f"{name}: {value_text(a)} -> {value_text(b)}" for name, (a, b) in values.items() if a != b]
        kept = path.with_name(f"config.until-step-{step:06d}.yaml")
        if changed and not kept.exists():  # otherwise the earlier start also began here: none of its steps counts
            path.replace(kept)
        return changed


def _measured_by(config: RunConfig) -> tuple[object, ...]:
    return (
        [function.model_dump(include={"name", "options"}) for function in config.reward.functions[:1]],
        config.evaluation.model_dump(exclude={"every"}),
        config.data.model_dump(exclude={"train", "shuffle"}),  # held-out files are read like the mixture's sources
        config.rollout.environment,
        config.rollout.agent,
        config.rollout.max_new_tokens,
    )


def _require_nothing_overwritten(run_dir: Path) -> None:
    """Reject files with a run's names if there are no metrics: they are the user's, such as a configuration."""
    there = [name for name in _WRITTEN if os.path.lexists(run_dir / name) and not _is_empty_directory(run_dir / name)]
    if there:
        problem = f"this run would overwrite files there that no earlier run wrote ({', '.join(there)})"
        raise ConfigError(f"run_dir={run_dir}: {problem}; set another run_dir, or move them away")


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _move_aside(run_dir: Path) -> Path:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    try:
        run_dir.rename(aside)
    except OSError as error:
        problem = f"the earlier run there could not be moved to {aside} ({error.strerror})"
        remedy, who = "set another run_dir, or move the directory yourself", f"run_dir={run_dir}"
        raise SlimeLikeError(problem, code="run-dir-not-moved", who=who, remedy=remedy) from error
    return aside


@contextmanager
def run_directory(path: Path, temporary: bool) -> Iterator[Path]:
    """Create ``path`` if needed. A temporary one is removed after success or a rejection. After a failure, it keeps the
    logs, and the exception gets a note that names it."""
    path.mkdir(mode=0o700 if temporary else 0o777, parents=True, exist_ok=not temporary)
    try:
        yield path
    except BaseException as error:
        if temporary and not isinstance(error, ConfigError):
            temporary = False
            error.add_note(f"the logs stay in {path}; remove it when they are read")
        raise
    finally:
        if temporary:
            shutil.rmtree(path)
