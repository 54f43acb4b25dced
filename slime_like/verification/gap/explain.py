"""Elimination of causes: each experiment removes one, and the gap is measured again on the same tokens."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.data.tokenizer import load_tokenizer
from slime_like.errors import SlimeLikeError
from slime_like.models.dimensions import ModelDimensions
from slime_like.orchestration.rollout.sync_probe import ProbeGap
from slime_like.sandbox.rewards.registry import required_of_rows
from slime_like.system.words import counted
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.gap.batch import SavedBatch, has_weights
from slime_like.verification.gap.sides import Sides
from slime_like.verification.layouts import ONE_RANK, parse_layout

_LEAST_FALL = 0.05
"""Fall of the gap that is more than the rounding of another pass."""
_LEAST_FALL_OF_GUESS = 0.5
"""The same for a guess. Where something else is wrong, a wrong guess may be closer by chance."""
_GUESSES = ("temperature", "truncation", "ids", "weights")
_LAYERS_SHARE = 0.9
"""Share of what all layers' routes explain that the routes of the named layers explain."""

Rows = Sequence[ScoredTrajectory]
OpenSides = Callable[[RunConfig, int, bool], AbstractContextManager[Sides]]
"""``Sides.opened`` in a cluster."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Logprobs of the same responses by engine and trainer.

    Attributes:
        rows: rows as the trainer scores them.
        masks: (response_len,) bool of each row, True for the compared tokens.
        engine, trainer: (response_len,) logprobs of each row.
    """

    rows: Rows
    masks: Sequence[Tensor]
    engine: Sequence[Tensor]
    trainer: Sequence[Tensor]

    def tokens(self, values: Sequence[Tensor]) -> Tensor:
        """Join the compared tokens of all rows."""
        return torch.cat([each[mask] for each, mask in zip(values, self.masks, strict=True)])

    @property
    def gap(self) -> tuple[float, float]:
        """Mean and maximum of the difference, in nats."""
        gaps = (self.tokens(self.engine).double() - self.tokens(self.trainer)).abs()
        return float(gaps.mean()), float(gaps.max())


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


class Explanation:
    """Findings on a saved batch. An experiment returns trials, or why there are none.

    Attributes:
        share: share of the gap that is not explained.
    """

    def __init__(self, batch: SavedBatch, opened: OpenSides) -> None:
        """Make all experiments; each needs only what earlier ones have eliminated.

        Raises:
            SlimeLikeError: the run's trainer did not start.
        """
        self._batch, self._config, self._opened = batch, batch.config, opened
        self._dimensions = ModelDimensions.from_checkpoint(batch.config.model.path)
        self.findings: list[Finding] = []
        self.share = 1.0
        self._suspect: tuple[str, str] | None = None  # a cause that only a new engine can remove, and why
        self._routes: Sequence[Tensor] | None = None  # of a new engine
        older = {}
        for version in batch.versions - {batch.version}:
            if has_weights(self._config, version):
                with opened(self._config, version, False) as sides:
                    older[version] = sides.score(batch.rows)
        with opened(self._config, batch.version, True) as self._sides:
            recorded = [row.logprobs for row in batch.rows if row.logprobs is not None]
            masks = [row.loss_mask for row in batch.rows]
            self._left = Compared(batch.rows, masks, recorded, self._sides.score(batch.rows))
            self._note("none", self._left, 0.0, counted(len(batch.rows), "row"))
            self._try("staleness", lambda: self._staleness(older))
            for experiment in (self._temperature, self._truncation, self._ids, self._weights, self._routing):
                self._try(experiment.__name__[1:], experiment)
        for experiment in (self._layout, self._precision):
            self._try(experiment.__name__[1:], experiment)

    @property
    def is_rounding(self) -> bool:
        """Whether what is left is rounding of float32."""
        engine, trainer = (self._left.tokens(side).numpy() for side in (self._left.engine, self._left.trainer))
        return ProbeGap.between(engine, trainer, "float32", self._dimensions.num_layers, None).is_sound

    def _try(self, cause: str, experiment: Callable[[], Sequence[Trial] | str]) -> None:
        """Make an experiment, and keep its best trial if it shows a cause. A side that does not start is a finding."""
        try:
            trials = "not tried: the rest is rounding" if self.is_rounding else experiment()
        except SlimeLikeError as error:
            trials = f"cannot be tried: {error}"
        if isinstance(trials, str):
            self._note(cause, None, 0.0, trials)
            return
        best, left = min(trials, key=lambda trial: trial.without.gap[0]), self._left
        fall = 1 - best.without.gap[0] / left.gap[0]
        if fall >= (_LEAST_FALL_OF_GUESS if cause in _GUESSES else _LEAST_FALL):
            self._note(cause, best.without, self.share * fall, best.text, best.name)
            self.share *= 1 - fall
        else:
            self._note(cause, best.without, 0.0, f"not a cause ({best.text})")
            if cause != "weights" and torch.equal(*(each.tokens(each.trainer) for each in (left, best.without))):
                self._suspect = cause, f"the trainer ignores it ({best.text})"
            if cause != "weights":
                return
        self._left = best.without

    def _note(self, cause: str, without: Compared | None, share: float, text: str, name: str = "") -> None:
        name = name or cause
        gap = None if without is None else without.gap
        self.findings.append(Finding(name.split()[0], gap, share, text, name))

    # ------------------------------------------------------------------------------------- on recorded logprobs
    def _staleness(self, older: Mapping[int, Sequence[Tensor]]) -> list[Trial] | str:
        """Use each token's own weights. Leave tokens out whose weights are gone."""
        current, left, trainer, masks = self._batch.version, self._left, self._left.trainer, self._left.masks
        versions = [row.weight_versions for row in left.rows if row.weight_versions is not None]
        tokens = left.tokens(versions)
        if not (others := sorted(set(tokens.tolist()) - {current})):
            return f"all tokens are of the trainer's version {current}"
        share = (tokens != current).double().mean()
        text = f"{share:.0%} of the tokens are of version {', '.join(map(str, others))}, the trainer's is {current}"
        for version in others:
            places = [each == version for each in versions]
            if version in older:
                trainer = [torch.where(*each) for each in zip(places, older[version], trainer, strict=True)]
            else:
                masks = [mask & ~place for mask, place in zip(masks, places, strict=True)]
        if any(mask.any() for mask in masks):
            return [Trial(replace(left, masks=masks, trainer=trainer), text)]
        self._suspect = "staleness", f"{text}; their checkpoints are gone"
        return self._suspect[1]

    def _temperature(self) -> list[Trial] | str:
        rows, rollout, evaluation = self._left.rows, self._config.rollout, self._config.evaluation
        ours = {row.temperature for row in rows}
        text = f"the trainer's logprobs are at temperature {', '.join(f'{each:g}' for each in sorted(ours))}"
        others = {1.0, rollout.temperature, evaluation.temperature} - ours - {0.0}
        return [
            self._scored([replace(row, temperature=other) for row in rows], f"{text}, the engine's at {other:g}")
            for other in others
        ] or text

    def _truncation(self) -> list[Trial] | str:
        if any(row.support_sizes is not None and row.support_sizes.any() for row in self._left.rows):
            text = "the trainer's logprobs are over the supports, the engine's over the vocabulary"
            return [self._scored(_over_vocabulary(self._left.rows), text)]
        rollout = self._config.rollout
        if rollout.top_p == 1 and rollout.bounded_top_k <= 0 and rollout.min_p == 0:
            return "tokens are sampled from the whole vocabulary"
        self._suspect = "truncation", "sampling is truncated, but the rows have no supports to score over"
        return self._suspect[1]

    def _ids(self) -> list[Trial] | str:
        """Score the responses after the prompts that the engine may have seen instead."""
        config, rows = self._config, self._left.rows
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        again = given = [row.prompt_tokens for row in rows]
        if not config.rollout.agent.is_set:
            source = PromptSource(config.data.train, tokenizer, config.data, config.seed, **required_of_rows(config))
            prompts = source.next(1 + max(row.group_id for row in rows))
            again = [torch.tensor(prompts[row.group_id].input.token_ids) for row in rows]
        differ = sum(not torch.equal(*pair) for pair in zip(again, given, strict=True))
        text = f"{differ} of {counted(len(given), 'prompt')} have other ids if they are encoded again"
        seen = {text: again} if differ else {}
        if (bos := tokenizer.bos_token_id) is not None:
            seen["the engine saw another BOS"] = [torch.cat((ids.new_tensor([bos]), ids)) for ids in given]
            if all(len(ids) > 1 and ids[0] == bos for ids in given):
                seen["the engine saw no BOS"] = [ids[1:] for ids in given]
        return [
            self._scored([_after_prompt(*each) for each in zip(rows, prompts, strict=True)], said)
            for said, prompts in seen.items()
        ] or text

    # -------------------------------------------------------------------------------------------- on a new engine
    def _weights(self) -> list[Trial]:
        """Compute both sides again, at temperature 1 over the vocabulary. The engine loads the trainer's weights."""
        left = self._left
        engine, self._routes = self._sides.teach(left.rows)
        rows = [replace(row, temperature=1.0) for row in _over_vocabulary(left.rows)]
        rows = _replayed(rows, self._routes)
        after = replace(left, rows=rows, engine=engine, trainer=self._sides.score(rows))
        if self._suspect is not None:
            return [Trial(after, self._suspect[1], self._suspect[0])]
        if after.gap[0] > left.gap[0] * (1 - _LEAST_FALL_OF_GUESS):
            return [Trial(after, "a new engine with the trainer's weights has the same gap")]
        sound = "the run's engine had other weights than the trainer; a new one receives them unchanged"
        return [Trial(after, self._sides.sync_problem() or sound)]

    def _routing(self) -> list[Trial] | str:
        """Replay the engine's routes, and find the layers in which this removes most of the gap."""
        left, routes, layers = self._left, self._routes, self._dimensions.expert_layers
        if not layers or routes is None or left.rows[0].routes is not None:
            return "no experts" if not layers else "no routes" if routes is None else "the engine's routes are replayed"

        def trial(first: int = 0, end: int = len(layers)) -> Compared:
            rows = _routed(left.rows, routes, first, end)
            return replace(left, rows=rows, trainer=self._sides.score(rows))

        whole, before = trial(), left.gap[0]
        enough = before - _LAYERS_SHARE * (before - whole.gap[0])
        end = 1 + bisect_left(range(1, len(layers)), True, key=lambda n: trial(0, n).gap[0] <= enough)
        first = bisect_left(range(1, end), True, key=lambda n: trial(n, end).gap[0] > enough)
        where = f"layers {layers[first]} to {layers[end - 1]}" if end - first > 1 else f"layer {layers[first]}"
        return [Trial(whole, f"the engine chooses other experts in {where}", f"routing in {where}")]

    # -------------------------------------------------------------------------------------------- on other trainers
    def _layout(self) -> list[Trial] | str:
        if (ranks := self._config.trainer.parallel.world_size) == 1:
            return "one rank"
        single = parse_layout(ONE_RANK).applied_to(self._config)
        with self._opened(single, self._batch.version, False) as sides:
            after = replace(self._left, trainer=sides.score(self._left.rows))
        return [Trial(after, f"one rank gives other logprobs than {ranks}: try `slime-like verify layouts`")]

    def _precision(self) -> list[Trial] | str:
        """Compute both sides in float32, with the engine's routes if they are replayed."""
        if (dtype := self._config.model.dtype) == "float32":
            return "both in float32"
        exact = self._config.model_copy(update={"model": self._config.model.model_copy(update={"dtype": "float32"})})
        with self._opened(exact, self._batch.version, True) as sides:
            engine, routes = sides.teach(self._left.rows)
            rows = _replayed(self._left.rows, routes)
            after = replace(self._left, rows=rows, engine=engine, trainer=sides.score(rows))
        return [Trial(after, f"both in float32 instead of {dtype}", f"precision ({dtype})")]

    def _scored(self, rows: Rows, text: str) -> Trial:
        return Trial(replace(self._left, rows=rows, trainer=self._sides.score(rows)), text)


def _over_vocabulary(rows: Rows) -> Rows:
    return [replace(row, support_ids=None, support_sizes=None) for row in rows]


def _after_prompt(row: ScoredTrajectory, prompt: Tensor) -> ScoredTrajectory:
    return replace(row, prompt_tokens=prompt, prompt_len=len(prompt), routes=None)


def _replayed(rows: Rows, routes: Sequence[Tensor] | None) -> Rows:
    """Replace the routes, if the rows have any, by a new engine's."""
    has_routes = rows[0].routes is not None and routes is not None
    return _routed(rows, routes) if has_routes else [replace(row, routes=None) for row in rows]


def _routed(rows: Rows, routes: Sequence[Tensor], first: int = 0, end: int | None = None) -> Rows:
    """Return rows with the routes of the layers [first, end) of those with experts. The others choose."""
    parts = [torch.full_like(each, -1) for each in routes]
    for part, each in zip(parts, routes, strict=True):
        part[:, first:end] = each[:, first:end]
    return [replace(row, routes=part) for row, part in zip(rows, parts, strict=True)]
