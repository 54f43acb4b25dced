"""Content of a run's directory, for a report."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from slime_like.config.reading.load import read_yaml
from slime_like.errors import SlimeLikeError
from slime_like.observability import metrics
from slime_like.observability.health import EVENTS_FILE
from slime_like.observability.names import ACCURACY, FAILURES, HELD_OUT_FAILURES, LOSS, REWARD, ROLLOUT_SPEED, STEP_TIME
from slime_like.observability.progress import DRIVER_LOG, FAILED
from slime_like.observability.tables import TOKEN_TABLE, Row
from slime_like.plugins.objective import DEMONSTRATION_LOSSES
from slime_like.system.disk import end_of_file
from slime_like.system.words import pluralize

CONFIG_FILE = "config.yaml"
# A page with more rows is slow to open. People look for the newest ones.
NEWEST_ROWS = 2_000
NEWEST_TOKENS = 50_000

_LOG_BYTES, _SHOWN_ALARMS = 2**16, 5
_AXES = {"TP": "tensor", "PP": "pipeline", "CP": "context", "DP": "data"}
# Control characters affect a terminal. Direction marks, invisible characters and lone surrogates hide what a text says.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_LAYOUT = str.maketrans({"\t": r"\t", "\n": r"\n"})
_TRAINED_SPEED = "train_actor_performance/tokens_per_second"


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The newest rows of a table on disk, oldest first. ``left_out`` counts older rows."""

    name: str
    columns: list[str]
    rows: list[Row]
    left_out: int


@dataclass(frozen=True, slots=True)
class RunData:
    """Content of a run directory.

    Attributes:
        config: the resolved configuration as plain values; empty if the directory has none.
        config_text: the same as text; ``None`` if the directory has none.
        profiles, capsules: traces of profiled steps, and recorded steps, relative to the directory.
        alarms: rows of ``health.Alarm``, oldest first, without steps that a resumed run repeated.
        failure: the error that ended the run's last start; ``None`` if it is running, finished or was killed.
    """

    run_dir: Path
    config: dict[str, Any]
    config_text: str | None
    records: list[dict[str, Any]]
    tables: dict[str, StoredTable]
    failure: str | None
    profiles: tuple[str, ...] = ()
    alarms: tuple[Mapping[str, Any], ...] = ()
    capsules: tuple[str, ...] = ()

    @property
    def trained_steps(self) -> int:
        current = metrics.current_records(self.records)
        return max((record["step"] for record in current if STEP_TIME in record or LOSS in record), default=0)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        return metrics.series(self.records, name)

    def by_step(self, name: str) -> dict[int, float]:
        return dict(zip(*self.series(name), strict=True))

    def non_finite_steps(self, name: str) -> list[int]:
        last = {record["step"]: record[name] for record in metrics.current_records(self.records) if name in record}
        return sorted(step for step, value in last.items() if value is None)


def read_run(run_dir: Path) -> RunData:
    """Read configuration, metrics and tables. The run may still be going. Skips unfinished last lines.

    Raises:
        SlimeLikeError: ``run_dir`` has no metrics, or a file in it is damaged.
    """
    records = metrics.read_metrics(run_dir / metrics.METRICS_FILE)
    log = run_dir / DRIVER_LOG
    last = end_of_file(log, _LOG_BYTES).rstrip("\n").rpartition("\n")[2] if log.is_file() else ""
    failure = last.removeprefix(FAILED) if last.startswith(FAILED) else None
    if not records:
        problem = "no step has been logged yet"
        remedy = f"try again after the first step; if the run has ended, see {DRIVER_LOG}"
        if failure:
            problem = f"the run failed before its first step: {failure}"
            remedy = f"see {DRIVER_LOG} and worker_logs for details"
        raise SlimeLikeError(problem, code="no-step-logged", who=str(run_dir), remedy=remedy)
    path = run_dir / CONFIG_FILE
    config, config_text = (read_yaml(path), path.read_text(encoding="utf-8")) if path.is_file() else ({}, None)
    files = sorted(path for path in (run_dir / "tables").glob("*.jsonl") if path.is_file())
    tables = [_read_table(path) for path in files]
    profiles = sorted(str(path.relative_to(run_dir)) for path in run_dir.glob(f"{metrics.PROFILES}/*/*.json.gz"))
    capsules = sorted(str(path.parent.relative_to(run_dir)) for path in run_dir.glob("capsules/step-*/capsule.json"))
    named = {table.name: table for table in tables}
    path = run_dir / EVENTS_FILE
    events = [row for _, row in metrics.read_lines(path) if "rule" in row] if path.is_file() else []
    alarms = tuple(metrics.current_records(events))
    return RunData(run_dir, config, config_text, records, named, failure, tuple(profiles), alarms, tuple(capsules))


def summary(run: RunData) -> list[tuple[str, str]]:
    """Return (label, text) of a run's most important facts, as far as they were recorded."""
    done, planned = run.trained_steps, run.config.get("steps")
    none = "" if done else f": no step {'was trained' if run.failure else 'has been trained yet'}"
    steps = (f"{done} of {planned}" if planned else str(done)) + none
    profiles = (
        f"{pluralize(len(run.profiles), 'trace')} in {metrics.PROFILES}, for ui.perfetto.dev" if run.profiles else ""
    )
    entries = [*_setup(run.config), ("steps", steps), ("restarts", _restarts(run.run_dir))]
    entries += [("failed", run.failure or ""), *_results(run), *_speed(run)]
    capsules = ", ".join(run.capsules) + ", for slime-like replay" if run.capsules else ""
    entries += [("profiles", profiles), ("capsules", capsules)]
    return [(label, text) for label, text in entries if text]


def _setup(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not config:
        return [("configuration", f"not recorded: the run directory has no {CONFIG_FILE}")]
    model, algorithm = config.get("model", {}), config.get("algorithm", {})
    trainer, rollout = config.get("trainer", {}), config.get("rollout", {})
    sizes = trainer.get("parallel", {})
    axes = {short: sizes.get(axis, 1) for short, axis in _AXES.items()}
    layout = " x ".join(f"{short}{size}" for short, size in axes.items())
    expert = f", EP{sizes['expert']}" if sizes.get("expert", 1) > 1 else ""
    layout = _join(trainer.get("backend"), f"{layout}{expert} ({pluralize(prod(axes.values()), 'rank')})")
    entries = [("model", _join(model.get("path"), model.get("dtype"))), ("trainer", layout)]
    loss, advantage, kl = (algorithm.get(part, {}) for part in ("loss", "advantage", "kl"))
    if loss.get("name") in DEMONSTRATION_LOSSES:
        return [*entries, ("objective", f"{loss['name']} (supervised: no engine, no reward)")]
    objective = _join(loss.get("name"), advantage.get("name"), f"KL {kl.get('coef', 0)}")
    sampling = f"{rollout.get('prompts_per_step')} prompts x {rollout.get('samples_per_prompt')} samples a step"
    engines = f"{pluralize(rollout.get('num_engines', 1), 'engine')} of TP{rollout.get('tensor', 1)}"
    lifted = ", ".join(set(rollout.get("allow_engine_args", ())) & {*rollout.get("engine_args", {})})
    entries += [("objective", objective), ("engine", _join(rollout.get("engine"), engines, sampling))]
    return [*entries, ("guarantees lifted", f"rollout.allow_engine_args: {lifted}" if lifted else "")]


def _restarts(run_dir: Path) -> str:
    """Describe the restarts of ``--restarts``: their causes, and the last one; "" if there are none."""
    path = run_dir / metrics.RESTARTS_FILE
    rows = [row for _, row in metrics.read_lines(path)] if path.is_file() else []
    if not rows:
        return ""
    codes, last = Counter(str(row.get("code")) for row in rows), rows[-1]
    causes = ", ".join(f"{count} by {code}" for code, count in codes.most_common())
    where = f"the last at step {last['step']}, resumed from {last.get('resumed_from')}"
    return f"{len(rows)} ({causes}); {where}: {last.get('sentence')}"


def _results(run: RunData) -> list[tuple[str, str]]:
    steps, accuracy = run.series(ACCURACY)
    _, rewards = run.series(REWARD)
    entries = []
    if accuracy:
        ends = dict.fromkeys((f"{accuracy[0]:.3f} (step {steps[0]})", f"{accuracy[-1]:.3f} (step {steps[-1]})"))
        entries.append(("held-out accuracy", " → ".join(ends)))
    if changed := sorted(run.run_dir.glob("config.until-step-*.yaml")):
        names = ", ".join(path.name for path in changed)
        entries.append(("settings changed", f"earlier values may not be comparable: {names}"))
    if rewards:
        window = min(metrics.smoothing_window(len(rewards)), len(rewards))
        means = metrics.running_mean(rewards, window)
        text = f"{means[window - 1]:.3f} → {means[-1]:.3f} (first and last {pluralize(window, 'step')})"
        short = f"{means[-1]:.3f} (of {pluralize(window, 'step')})"
        entries.append(("mean reward", text if len(rewards) > window else short))
    raised = [f"{row['rule']} at step {row['step']}" for row in run.alarms if row["severity"] != "cleared"]
    more = f"; {len(raised) - _SHOWN_ALARMS} before" if len(raised) > _SHOWN_ALARMS else ""
    entries.append(("alarms", ", ".join(raised[-_SHOWN_ALARMS:]) + more))
    entries.append(("scoring failures", _scoring_failures(run)))
    bad = run.non_finite_steps(LOSS)
    if bad:
        entries.append(("loss", f"NaN or infinite at {pluralize(len(bad), 'step')}, first at step {bad[0]}"))
    return entries


def _scoring_failures(run: RunData) -> str:
    """Describe responses without a reward because a function, environment or agent failed; "" if there are none."""
    parts = []
    for name, what, when in ((FAILURES, "response", "step"), (HELD_OUT_FAILURES, "held-out response", "evaluation")):
        failed = {step: round(number) for step, number in run.by_step(name).items() if number > 0}
        if failed:
            first = f"first at step {min(failed)}"
            parts.append(f"{pluralize(sum(failed.values()), what)} in {pluralize(len(failed), when)}, {first}")
    return "; ".join(parts)


def _speed(run: RunData) -> list[tuple[str, str]]:
    seconds, speeds = run.by_step(STEP_TIME), run.by_step(_TRAINED_SPEED)
    rollout = run.series(ROLLOUT_SPEED)[1]
    timed = [step for step in speeds if seconds.get(step, 0.0) > 0]
    if not timed:
        return []
    total = sum(seconds[step] for step in timed)
    trained = sum(speeds[step] * seconds[step] for step in timed) / total
    entries = [
        ("trained tokens/s", f"{trained:,.0f} response tokens/s over {total:,.1f} s of training steps"),
        ("step time", f"median {median(seconds[step] for step in timed):.2f} s"),
    ]
    return [*entries, ("rollout tokens/s", f"median {median(rollout):,.0f}")] if rollout else entries


def _join(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part is not None)


def spell_out(text: str, one_line: bool = False) -> str:
    r"""Replace unprintable characters with escapes such as ``\x1b``; with ``one_line``, also line breaks and tabs."""
    text = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.translate(_LAYOUT) if one_line else text


def shorten(text: str, limit: int) -> str:
    """Cut out the middle of a text of more than ``limit`` characters. Answers are at the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]} … ({len(text) - limit} characters) … {text[limit // 3 - limit :]}"


def _read_table(path: Path) -> StoredTable:
    """Read a table's newest rows. Damage in older rows is not found."""
    newest = list(metrics.read_lines(path, NEWEST_TOKENS if path.stem == TOKEN_TABLE else NEWEST_ROWS))
    rows: list[Row] = []
    columns: dict[str, None] = {}
    for _, row in newest:
        if rows and rows[-1]["step"] > row["step"]:  # a resumed run repeats the steps from here on
            while rows and rows[-1]["step"] >= row["step"]:
                rows.pop()
        columns.update(dict.fromkeys(row))
        rows.append(row)
    if "Step" in columns:
        columns.pop("step", None)
    # A step that was logged twice shows its second logging.
    kept = {(row["step"], row.get("Sequence ID", i), row.get("Token Position")): row for i, row in enumerate(rows)}
    return StoredTable(path.stem, list(columns), list(kept.values()), newest[0][0] - 1 if newest else 0)
