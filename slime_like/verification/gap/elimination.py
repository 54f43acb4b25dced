"""Elimination of causes: each experiment removes one, and the gap is measured again on the same tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.rollout.sync_probe import ProbeGap
from slime_like.trajectory import ScoredTrajectory

_LEAST_FALL = 0.05
"""Fall of the gap that is more than another pass's rounding."""
_LEAST_FALL_OF_FAULT = 0.5
"""The same for a fault, which a wrong guess must not look like."""
_FAULTS = ("temperature", "truncation", "ids", "weights")


@dataclass(frozen=True, slots=True)
class Compared:
    """Logprobs of the same responses by engine and trainer.

    Attributes:
        rows: rows as the trainer scored them.
        masks: (response_len,) bool of each row, True for the compared tokens.
        engine, trainer: (response_len,) logprobs of each row.
    """

    rows: Sequence[ScoredTrajectory]
    masks: Sequence[Tensor]
    engine: Sequence[Tensor]
    trainer: Sequence[Tensor]

    def of(self, side: Sequence[Tensor]) -> Tensor:
        """Return the compared tokens of all rows."""
        return torch.cat([values[mask] for values, mask in zip(side, self.masks, strict=True)])

    @property
    def gaps(self) -> Tensor:
        """Differences of the compared tokens, in nats."""
        return (self.of(self.engine).double() - self.of(self.trainer)).abs()

    def is_rounding(self, layers: int) -> bool:
        """Return whether the difference is rounding of a float32 model with so many layers."""
        engine, trainer = self.of(self.engine).numpy(), self.of(self.trainer).numpy()
        return ProbeGap.between(engine, trainer, "float32", layers, None).is_sound


@dataclass(frozen=True, slots=True)
class Trial:
    """A comparison without a possible cause, what it says about the run, and the cause's name if not the usual one."""

    without: Compared
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of an experiment.

    Attributes:
        gap: mean and maximum without the cause; ``None`` if it was not tried.
        share: share of the whole gap.
        text: what was found, or why it was not tried.
        name: the cause in a sentence.
    """

    cause: str
    gap: tuple[float, float] | None
    share: float
    text: str
    name: str


Experiment: TypeAlias = Callable[[Compared], Sequence[Trial] | str]
"""Returns alternative comparisons, or why there is none."""


class Elimination:
    """What is left of a gap, and the findings so far.

    Attributes:
        left: comparison without all causes that were found.
        share: share of the gap that is left.
        suspect: cause that showed, but could not be removed: a new engine removes it.
    """

    def __init__(self, whole: Compared, layers: int) -> None:
        self.left, self.share, self._layers = whole, 1.0, layers
        self.findings: list[Finding] = []
        self.suspect: tuple[str, str] | None = None
        self._note("none", whole, 0.0, f"{len(whole.rows)} rows")

    @property
    def is_rounding(self) -> bool:
        return self.left.is_rounding(self._layers)

    def run(self, experiments: Mapping[str, Experiment]) -> None:
        """Make the experiments in order. An error of a part that cannot start is a finding."""
        for cause, experiment in experiments.items():
            try:
                trials = "not tried: the rest is rounding" if self.is_rounding else experiment(self.left)
            except SlimeLikeError as error:
                trials = f"cannot be tried: {error}"
            if isinstance(trials, str):
                self._note(cause, None, 0.0, trials)
            else:
                self._judge(cause, min(trials, key=lambda trial: float(trial.without.gaps.mean())))

    def _judge(self, cause: str, trial: Trial) -> None:
        fall = 1 - float(trial.without.gaps.mean() / self.left.gaps.mean())
        if fall < (_LEAST_FALL_OF_FAULT if cause in _FAULTS else _LEAST_FALL):
            self._note(cause, trial.without, 0.0, f"not a cause ({trial.text})")
            if torch.equal(trial.without.of(trial.without.trainer), self.left.of(self.left.trainer)):
                self.suspect = cause, f"the trainer ignores it ({trial.text})"
            if cause == "weights":
                self.left = trial.without
            return
        self._note(cause, trial.without, self.share * fall, trial.text, trial.name)
        self.left, self.share = trial.without, self.share * (1 - fall)

    def _note(self, cause: str, without: Compared | None, share: float, text: str, name: str = "") -> None:
        gap = None if without is None else (float(without.gaps.mean()), float(without.gaps.max()))
        self.findings.append(Finding(cause, gap, share, text, name or cause))
