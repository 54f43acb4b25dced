"""Replay of a capsule: train its steps again on the recorded batches, under any layout, and compare with the record."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.data.dump import dump_path, load_trajectories
from slime_like.errors import DataError
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.rollout.advantages import Advantages
from slime_like.orchestration.run import capsules
from slime_like.orchestration.run.directory import CONFIG_FILE, run_directory
from slime_like.orchestration.run.opening import open_run
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.run.step import TrainedStep, train_on_batch, train_on_stream
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.comparison import model_order
from slime_like.verification.layouts import Tolerances, tolerances_of
from slime_like.weights.fingerprint import Fingerprint

_SMOOTH = ("loss", "policy_loss", "kl_loss", "entropy", "grad_norm", "num_tokens", "learning_rate", "values", "returns")
"""Figures that depend smoothly on rounding. The others are compared only bit for bit."""
_INPUTS = ("loss_mask", "logprobs", "weight_versions", "support_sizes", "num_tokens", "learning_rate")
"""Fields and figures that no layout changes."""
_LEARNED = ("values", "returns", "advantages", "mean_weights")
"""Fields and figures that are computed from logprobs or by a critic."""
_MISSING = sys.float_info.max
"""Difference of a value that only one side has; unlike infinity, it is JSON."""
_ESTIMATE = 2.0
"""Factor of the bounds on distances, which are known within 20 %."""

Decode = Callable[[Sequence[int]], str]
Tokens = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True, slots=True)
class Capsule:
    """A recorded step. ``base`` is the step of the checkpoint that its replay starts from; 0: the first weights."""

    path: Path
    step: int
    base: int
    machine: Mapping[str, Any]
    tokens: Tokens

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raise ``DataError`` if the directory is not a capsule, or its own files are damaged."""
        try:
            facts = json.loads((path / capsules.DESCRIPTION).read_text(encoding="utf-8"))
            tokens = torch.load(path / capsules.TOKENS, weights_only=True)
            return cls(path, facts["step"], facts["base"], facts["machine"], tokens)
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            problem, remedy = f"is not a whole capsule ({error})", "give a directory in RUN_DIR/capsules"
            raise DataError(problem, code="no-capsule", who=str(path), remedy=remedy) from error

    def config(self, flags: Sequence[str]) -> RunConfig:
        """Return the configuration of the replay, which starts no engines."""
        resume = self.path / "checkpoints" / f"step-{self.base:06d}" if self.base else "never"
        own = {"resume": resume, "debug.load_rollouts": self.path / capsules.ROLLOUTS, "debug.save_rollouts": "none"}
        own |= dict.fromkeys(("debug.capsule", "profile.steps"), "[]")
        own |= dict.fromkeys(("logging.tensorboard", "logging.wandb"), "false")
        settings = [text for name, value in own.items() for text in (f"--{name}", str(value))]
        return load_config(self.path / CONFIG_FILE, [*settings, *flags])

    def recorded(self, step: int) -> dict[str, Any]:
        """Return "figures" and "weights" of a step, as far as the run recorded them."""
        file = self.path / capsules.RECORDS / f"step-{step:06d}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference of a tensor, a figure, or a sequence's first token out of bounds. ``place`` names the value, and has
    it as ``recorded`` and ``recomputed``; ``count`` values were compared."""

    size: float
    bound: float
    place: Mapping[str, Any]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    """Comparison of one quantity of a step.

    Attributes:
        largest: largest difference.
        wrong: number of sequences, figures or tensors that differ by more than rounding.
        bound, first: bound and place of the first of them, in the order of the batch or of the model.
    """

    step: int
    quantity: str
    count: int
    largest: float
    bound: float
    wrong: int
    first: Mapping[str, Any] | None

    @classmethod
    def of(cls, step: int, quantity: str, gaps: Sequence[Gap]) -> Self:
        wrong, worst = [gap for gap in gaps if not gap.size <= gap.bound], max(gaps, key=lambda gap: gap.size)
        first, count = next(iter(wrong), None), sum(gap.count for gap in gaps)
        bound, place = (worst.bound, None) if first is None else (first.bound, first.place)
        return cls(step, quantity, count, worst.size, bound, len(wrong), place)

    def __str__(self) -> str:
        """The first difference in words."""
        parts = [f"{name.replace('_', ' ')} {value}" for name, value in (self.first or {}).items()]
        return f"step {self.step}, {self.quantity}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest differences that rounding explains; 0 if ``exact``: the same layout on the same machine's CPU.

    Another layout adds in another order, which shifts gradients by ``Tolerances.gradient`` of their norm. AdamW divides
    by a gradient's size, so elements as small as the shift may move the other way: two moves apart, for a share of
    elements of twice the shift. Weights then differ by at most ``drift`` of their change, and to first order logprobs
    by ``drift`` of their own.

    Attributes:
        change: largest change of a logprob of the batch in the replayed steps, in nats.
        least_norm: smallest gradient norm of these steps: if it is rounding, so is every update.
    """

    tolerances: Tolerances
    exact: bool = True
    change: float = 0.0
    least_norm: float = 1.0

    @property
    def drift(self) -> float:
        shift = self.tolerances.gradient + self.tolerances.rounding / max(self.least_norm, 1e-30)
        return min(1.0, 2 * math.sqrt(2 * shift))

    def of_value(self, name: str, size: float, is_start: bool) -> float:
        """Return the bound of a token's field in nats, or of a figure, of at most ``size``.

        Args:
            is_start: whether it is computed with the weights that the replay starts with.
        """
        if self.exact or name in _INPUTS:
            return 0.0
        if name == "chosen_tokens":  # rounding may choose others
            return 1.0
        bounds, later = self.tolerances, 0.0 if is_start else self.drift * self.change
        if name == "grad_norm":
            return (bounds.grad_norm + later) * size + bounds.rounding
        if name in _LEARNED:  # a critic changes otherwise than logprobs
            return (bounds.logprob_max + later + (0.0 if is_start else self.drift)) * (1 + size)
        return (bounds.loss + later) * (1 + size) if "loss" in name else bounds.logprob_max + later

    def of_weights(self, norm: float, change: float) -> float:
        return 0.0 if self.exact else _ESTIMATE * (self.drift * change + self.tolerances.rounding * norm)


def compare_tokens(
    name: str,
    recorded: Tokens,
    found: Tokens,
    rows: Sequence[ScoredTrajectory],
    bound: float,
    decode: Decode,
) -> list[Gap]:
    """Compare a field of every row."""
    gaps = []
    for row in rows:
        ours, theirs = recorded.get((name, row.sequence_id)), found.get((name, row.sequence_id))
        if ours is None or theirs is None or ours.shape != theirs.shape:
            lengths = [None if each is None else len(each) for each in (ours, theirs)]
            sides = {"recorded": lengths[0], "recomputed": lengths[1]}
            gaps.append(Gap(_MISSING, bound, {"values of sequence": row.sequence_id, **sides}))
            continue
        sizes = torch.where(ours == theirs, 0.0, (ours.double() - theirs.double()).abs()).nan_to_num(_MISSING)
        wrong = (sizes > bound).nonzero()
        at = int(wrong[0]) if len(wrong) else int(sizes.argmax())
        token = int(row.response_tokens[at])
        place: dict[str, Any] = {"sequence": row.sequence_id, "response_token": at, "position": row.prompt_len + at}
        place |= {"id": token, "text": decode([token]), "recorded": ours[at].item(), "recomputed": theirs[at].item()}
        gaps.append(Gap(float(sizes[at]), bound, place, len(ours)))
    return gaps


def compare_figures(
    recorded: Sequence[Mapping[str, float]], found: Sequence[Mapping[str, float]], bounds: Bounds, is_start: bool
) -> list[Gap]:
    """Compare the figures of a step's updates. ``is_start``: see ``Bounds.of_value``."""
    gaps = []
    if len(recorded) != len(found):
        gaps.append(Gap(_MISSING, 0.0, {"figure": "updates", "recorded": len(recorded), "recomputed": len(found)}))
    for index, (before, after) in enumerate(zip(recorded, found, strict=False)):
        for name in before if bounds.exact else [each for each in _SMOOTH if each in before]:
            size = 0.0 if before[name] == after[name] else abs(before[name] - after[name])
            bound = bounds.of_value(name, abs(before[name]), is_start and index == 0)
            place = {"figure": name, "update": index + 1, "recorded": before[name], "recomputed": after[name]}
            gaps.append(Gap(size, bound, place))
    return gaps


def compare_weights(
    recorded: Mapping[str, Any], found: Mapping[str, Any], bounds: Bounds, start: Mapping[str, Any]
) -> list[Gap]:
    """Compare fingerprints in the order of the model. ``start``: those of the weights that the replay starts with."""
    gaps = []
    for name in sorted(recorded.keys() | found.keys(), key=model_order):
        if name not in recorded or name not in found:
            place = {"tensor": name, "recorded": name in recorded, "recomputed": name in found}
            gaps.append(Gap(_MISSING, 0.0, place))
            continue
        ours, theirs = (Fingerprint(**side[name]) for side in (recorded, found))
        distance = 0.0 if ours.checksum == theirs.checksum else max(ours.distance(theirs), math.ulp(0.0))
        change = Fingerprint(**start[name]).distance(ours) if name in start else ours.norm
        place = {"tensor": name, "distance": distance, "recorded": ours.norm, "recomputed": theirs.norm}
        gaps.append(Gap(distance, bounds.of_weights(ours.norm, change), place))
    return gaps


class Replay:
    """One replay in an opened run, which trains on the capsule's rollouts."""

    def __init__(self, capsule: Capsule, run: Run) -> None:
        self._capsule, self._run, config = capsule, run, run.config
        given = load_config(capsule.path / CONFIG_FILE)
        same = given.trainer == config.trainer and given.model == config.model and not config.rollout.stream
        exact = same and capsule.machine == capsules.machine(run) and capsule.machine["device"] == "cpu"
        self._rows = load_trajectories(dump_path(capsule.path / capsules.ROLLOUTS, capsule.step))
        self._start, self._steps = capsules.weights(run), range(capsule.base + 1, capsule.step + 1)
        self.bounds = Bounds(tolerances_of(config.model.dtype, ModelDimensions.from_checkpoint(config.model.path)))
        if not exact:
            before = capsules.scored_tokens(run, self._rows)
            changes = [float((capsule.tokens[key] - before[key]).abs().max()) for key in before if "logprob" in key[0]]
            updates = [update for step in self._steps for update in capsule.recorded(step)["figures"]["policy"]]
            norm = min((update["grad_norm"] for update in updates), default=1.0)
            self.bounds = replace(self.bounds, exact=False, change=max(changes), least_norm=norm)

    def lines(self) -> Iterator[Line]:
        """Train every step, and yield its comparisons in the order of computation."""
        capsule, run = self._capsule, self._run
        # A checkpoint holds the same bytes under every layout.
        yield from self._weights(capsule.base, self._start, replace(self.bounds, exact=True))
        train_step = train_on_stream if run.config.rollout.stream else train_on_batch
        for step in self._steps:
            is_start, record = step == self._steps[0], capsule.recorded(step)
            trained = train_step(run, step, PhaseClock())
            run.reference.refresh(step)
            if run.source.has_rewards:
                yield self._advantages(step, trained)
            if step == capsule.step:
                yield from self._tokens(capsules.trained_tokens(run, self._rows), is_start, is_after=False)
            for model, updates in capsules.figures(trained).items():
                if gaps := compare_figures(record["figures"][model], updates, self.bounds, is_start):
                    yield Line.of(step, f"{model} figures", gaps)
            if "weights" in record:
                yield from self._weights(step, capsules.weights(run), self.bounds)
            run.progress.update(step, {})
        yield from self._tokens(capsules.scored_tokens(run, self._rows), is_start=False, is_after=True)

    def _advantages(self, step: int, trained: TrainedStep) -> Line:
        """Compute advantages again from recorded rewards."""
        rows, found = trained.trajectories, Advantages(self._run.config).of_scored(trained.trajectories, step)
        given = trained.given_advantages or [row.advantages for row in rows]
        recorded = {("", row.sequence_id): each for row, each in zip(rows, given, strict=True)}
        again = {("", row.sequence_id): found[row.sequence_id].expand(row.response_len) for row in rows}
        largest = max(float(each.abs().max()) for each in given)
        bound = 0.0 if self.bounds.exact else 2.0**-20 * (1 + largest)  # eight units in the last place
        return Line.of(step, "given advantages", compare_tokens("", recorded, again, rows, bound, self._run.decode))

    def _tokens(self, found: Tokens, is_start: bool, is_after: bool) -> Iterator[Line]:
        capsule, rows, decode = self._capsule, self._rows, self._run.decode
        recorded = (name for name, _ in capsule.tokens if name.startswith(capsules.AFTER) == is_after)
        for name in dict.fromkeys([*recorded, *(name for name, _ in found)]):
            sizes = [float(each.double().abs().max()) for (other, _), each in capsule.tokens.items() if other == name]
            bound = self.bounds.of_value(name, max(sizes, default=0.0), is_start)
            yield Line.of(capsule.step, name, compare_tokens(name, capsule.tokens, found, rows, bound, decode))

    def _weights(self, step: int, found: Mapping[str, Any], bounds: Bounds) -> Iterator[Line]:
        for model, recorded in self._capsule.recorded(step).get("weights", {}).items():
            yield Line.of(step, f"{model} weights", compare_weights(recorded, found[model], bounds, self._start[model]))


def replay(capsule: Capsule, config: RunConfig, temporary: bool) -> Iterator[Line]:
    """Start trainer ranks, and compare every step. ``temporary``: remove ``config.run_dir`` after success."""
    with run_directory(config.run_dir, temporary), open_run(config) as run:
        yield from Replay(capsule, run).lines()
