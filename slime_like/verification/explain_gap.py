"""Elimination of causes: each experiment removes one, and the gap is measured again on the same tokens."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from slime_like.data.prompts import PromptSource
from slime_like.errors import SlimeLikeError
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tokenization import load_tokenizer
from slime_like.orchestration.rollout.sync_probe import ROUTED_BOUND, ProbeGap
from slime_like.sandbox.rewards.registry import required_of_rows
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.layouts import ONE_RANK, parse_layout, without_fp8
from slime_like.verification.saved_batch import SavedBatch, Sides

_LEAST_FALL, _LEAST_FALL_OF_GUESS = 0.05, 0.5
"""Least relative fall of the gap that shows a cause. A wrong guess may be closer by chance if something else is off."""
_GUESSES = ("temperature", "truncation", "ids")
_LAYERS_SHARE = 0.9
"""Share of what all layers' routes explain that the routes of the named layers explain."""

Rows: TypeAlias = Sequence[ScoredTrajectory]
Trials: TypeAlias = "Sequence[tuple[Compared, str]] | str"
"""Comparisons without a possible cause, and what each says about the run; or why there are none."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Logprobs of the same responses by engine and trainer, (response_len,) of each row.

    Attributes:
        rows: rows as the trainer scores them.
        masks: True for the compared tokens.
    """

    rows: Rows
    masks: Sequence[Tensor]
    engine: Sequence[Tensor]
    trainer: Sequence[Tensor]

    def tokens(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([each[mask] for each, mask in zip(values, self.masks, strict=True)])

    @property
    def gap(self) -> tuple[float, float]:
        """Mean and maximum of the difference, in nats."""
        gaps = (self.tokens(self.engine).double() - self.tokens(self.trainer)).abs()
        return float(gaps.mean()), float(gaps.max())


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
    """Findings on a saved batch.

    Attributes:
        share: share of the gap that is not explained.
    """

    def __init__(
        self,
        batch: SavedBatch,
        opened: Callable[[SavedBatch, bool], AbstractContextManager[Sides]],
        show: Callable[[Finding], None],
    ) -> None:
        """Make all experiments; each needs only what earlier ones have eliminated.

        Args:
            opened: starts ``Sides``, with or without engines.
            show: called with each finding.

        Raises ``SlimeLikeError`` if the run's trainer did not start.
        """
        self._batch, self._config, self._opened, self._show = batch, batch.config, opened, show
        self._dimensions = ModelDimensions.from_checkpoint(batch.config.model.path)
        self.findings: list[Finding] = []
        self.share = 1.0
        self._suspect: tuple[str, str] | None = None  # a cause that only a new engine can remove, and why
        self._routes: Sequence[Tensor] | None = None  # of a new engine
        self._older: dict[int, Sequence[Tensor]] = {}
        for version, stale in batch.at_older_versions().items():
            with opened(stale, False) as sides:
                self._older[version] = sides.score(batch.rows)
        with opened(batch, True) as self._sides:
            recorded = [row.logprobs for row in batch.rows if row.logprobs is not None]
            self._left = Compared(
                batch.rows, [row.loss_mask for row in batch.rows], recorded, self._sides.score(batch.rows)
            )
            if batch.quantization != "none":
                self._suspect = "quantization", f"engines sampled with 8-bit weights ({batch.quantization})"
            self._note("none", self._left, 0.0, f"{len(recorded)} rows of step {batch.version + 1}")
            self._try(self._staleness, self._temperature, self._truncation, self._ids, self._weights, self._routing)
        self._try(self._fp8, self._layout, self._precision)

    def is_rounding(self, dtype: str = "float32", bound: float | None = None) -> bool:
        """Return whether what is left is no more than the rounding of ``dtype``; ``bound`` as in ``ProbeGap``."""
        engine, trainer = (self._left.tokens(side).numpy() for side in (self._left.engine, self._left.trainer))
        return ProbeGap.compare(engine, trainer, dtype, self._dimensions.num_layers, bound).is_sound

    def _try(self, *experiments: Callable[[], Trials]) -> None:
        """Make experiments. The best trial of one that shows a cause stays. A side that does not start is a finding."""
        for experiment in experiments:
            cause = experiment.__name__[1:]
            try:
                trials = "not tried: the rest is rounding" if self.is_rounding() else experiment()
            except SlimeLikeError as error:
                trials = f"cannot be tried: {error}"
            if isinstance(trials, str):
                self._note(cause, None, 0.0, trials)
            else:
                self._judge(cause, *min(trials, key=lambda trial: trial[0].gap[0]))

    def _judge(self, cause: str, without: Compared, text: str) -> None:
        left, fall = self._left, 1 - without.gap[0] / self._left.gap[0]
        if fall >= (_LEAST_FALL_OF_GUESS if cause in _GUESSES else _LEAST_FALL):
            name = self._suspect[0] if self._suspect and cause == "weights" else cause
            self._note(name, without, self.share * fall, text)
            self._left, self.share = without, self.share * (1 - fall)
            return
        self._note(cause, without, 0.0, f"not a cause (tried: {text})")
        if torch.equal(*(each.tokens(each.trainer) for each in (left, without))):
            self._suspect = cause, f"the trainer ignores it ({text})"

    def _note(self, cause: str, without: Compared | None, share: float, text: str) -> None:
        name = f"routing {text[text.rindex('in layer') :]}" if share and cause == "routing" else cause
        self.findings.append(Finding(cause, None if without is None else without.gap, share, text, name))
        self._show(self.findings[-1])

    # ------------------------------------------------------------------------------------- on recorded logprobs
    def _staleness(self) -> Trials:
        """Score each token with the weights that sampled it. Skip tokens if their checkpoint no longer exists."""
        current, left, trainer, masks = self._batch.version, self._left, self._left.trainer, self._left.masks
        versions = [row.weight_versions for row in left.rows if row.weight_versions is not None]
        tokens = left.tokens(versions)
        if not (others := sorted(set(tokens.tolist()) - {current})):
            return f"all tokens are of the trainer's version {current}"
        share = (tokens != current).double().mean()
        text = f"{share:.0%} of the tokens are of version {', '.join(map(str, others))}, the trainer's is {current}"
        for version in others:
            places = [each == version for each in versions]
            if version in self._older:
                trainer = [torch.where(*each) for each in zip(places, self._older[version], trainer, strict=True)]
            else:
                masks = [mask & ~place for mask, place in zip(masks, places, strict=True)]
        if any(mask.any() for mask in masks):
            return [(replace(left, masks=masks, trainer=trainer), text)]
        self._suspect = "staleness", f"{text}; their checkpoints are gone"
        return self._suspect[1]

    def _temperature(self) -> Trials:
        rows, rollout, evaluation = self._left.rows, self._config.rollout, self._config.evaluation
        ours = {row.temperature for row in rows}
        text = f"the trainer's logprobs are at temperature {', '.join(f'{each:g}' for each in sorted(ours))}"
        others = {1.0, rollout.temperature, evaluation.temperature} - ours - {0.0}
        return [
            (self._scored([replace(row, temperature=other) for row in rows]), f"{text}, the engine's at {other:g}")
            for other in others
        ] or text

    def _truncation(self) -> Trials:
        if any(row.support_sizes is not None and row.support_sizes.any() for row in self._left.rows):
            text = "the trainer's logprobs are over the supports, the engine's over the vocabulary"
            return [(self._scored(_over_vocabulary(self._left.rows)), text)]
        rollout = self._config.rollout
        if rollout.top_p == 1 and rollout.bounded_top_k <= 0 and rollout.min_p == 0:
            return "tokens are sampled from the whole vocabulary"
        self._suspect = "truncation", "sampling is truncated, but the rows have no supports to score over"
        return self._suspect[1]

    def _ids(self) -> Trials:
        """Score the responses after the prompts that the engine may have seen instead."""
        rows = self._left.rows
        trials = []
        for text, prompts in self._prompts([row.prompt_tokens for row in rows]):
            after = [
                replace(row, prompt_tokens=ids, prompt_len=len(ids), routes=None)
                for row, ids in zip(rows, prompts, strict=True)
            ]
            trials.append((self._scored(after), text))
        return trials or "encoded again, the prompts are the same"

    def _prompts(self, given: Sequence[Tensor]) -> Iterator[tuple[str, Sequence[Tensor]]]:
        config = self._config
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        if not config.rollout.agent.is_set:  # an agent's prompts have a history
            needs = required_of_rows(config.reward, has_agent=False)
            source = PromptSource(config.data.train, tokenizer, config.data, config.seed, **needs)
            groups = [row.group_id for row in self._left.rows]
            prompts = [prompt.input.token_ids for prompt in source.next(1 + max(groups))]
            again = [torch.tensor(prompts[group]) for group in groups]
            if differ := sum(not torch.equal(*pair) for pair in zip(again, given, strict=True)):
                yield f"{differ} of {len(given)} prompts have other ids if they are encoded again", again
        if (bos := tokenizer.bos_token_id) is not None:
            yield "the engine saw another BOS", [torch.cat((ids.new_tensor([bos]), ids)) for ids in given]
            if all(len(ids) > 1 and ids[0] == bos for ids in given):
                yield "the engine saw no BOS", [ids[1:] for ids in given]

    # -------------------------------------------------------------------------------------------- on a new engine
    def _weights(self) -> Trials:
        """Compute both sides again, at temperature 1 over the vocabulary. The engine loads the trainer's weights.

        A gap within the rounding of ``model.dtype`` does not show other weights: sampled one by one, tokens round
        otherwise than in a prompt.
        """
        dtype, routed = self._config.model.dtype, self._dimensions.num_experts > 0
        rounds = self.is_rounding(dtype, ROUTED_BOUND if routed and dtype != "float32" else None)
        rows = [replace(row, temperature=1.0) for row in _over_vocabulary(self._left.rows)]
        after = self._again(self._sides, rows)
        if rounds or after.gap[0] > self._left.gap[0] * (1 - _LEAST_FALL_OF_GUESS):
            self._left = after
            return f"not a cause: a new engine has a mean gap of {after.gap[0]:.1e}"
        if self._suspect is not None:
            return [(after, self._suspect[1])]
        sound = "a new engine receives these weights unchanged; the run's had others, or sampled otherwise"
        return [(after, self._sides.sync_problem() or sound)]

    def _routing(self) -> Trials:
        """Replay the engine's routes, and find the layers in which this removes most of the gap."""
        left, routes, layers = self._left, self._routes, self._dimensions.expert_layers
        if not layers or routes is None or left.rows[0].routes is not None:
            return "no experts" if not layers else "no routes" if routes is None else "the engine's routes are replayed"

        def trial(first: int = 0, end: int = len(layers)) -> Compared:
            return self._scored(_routed(left.rows, routes, first, end))

        whole, before = trial(), left.gap[0]
        enough = before - _LAYERS_SHARE * (before - whole.gap[0])
        end = 1 + bisect_left(range(1, len(layers)), True, key=lambda n: trial(0, n).gap[0] <= enough)
        first = bisect_left(range(1, end), True, key=lambda n: trial(n, end).gap[0] > enough)
        where = f"layers {layers[first]} to {layers[end - 1]}" if end - first > 1 else f"layer {layers[first]}"
        return [(whole, f"the engine chooses other experts in {where}")]

    # -------------------------------------------------------------------------------------------- on other trainers
    def _fp8(self) -> Trials:
        if (recipe := self._config.trainer.fp8) == "none":
            return "the trainer's products are in the model's type"
        with self._opened(replace(self._batch, config=without_fp8(self._config)), False) as sides:
            after = replace(self._left, trainer=sides.score(self._left.rows))
        return [(after, f"the trainer rounds factors of products to FP8 ({recipe})")]

    def _layout(self) -> Trials:
        if (ranks := self._config.trainer.parallel.world_size) == 1:
            return "one rank"
        single = replace(self._batch, config=parse_layout(ONE_RANK).apply_to(self._config))
        with self._opened(single, False) as sides:
            after = replace(self._left, trainer=sides.score(self._left.rows))
        return [(after, f"one rank gives other logprobs than {ranks}: try `slime-like verify layouts`")]

    def _precision(self) -> Trials:
        if (dtype := self._config.model.dtype) == "float32":
            return "both in float32"
        model = self._config.model.model_copy(update={"dtype": "float32"})
        exact = without_fp8(self._config).model_copy(update={"model": model})
        if any(finding.share for finding in self.findings if finding.cause == "layout"):
            exact = parse_layout(ONE_RANK).apply_to(exact)
        with self._opened(replace(self._batch, config=exact), True) as sides:
            return [(self._again(sides, self._left.rows), f"both in float32 instead of {dtype}")]

    def _scored(self, rows: Rows) -> Compared:
        return replace(self._left, rows=rows, trainer=self._sides.score(rows))

    def _again(self, sides: Sides, rows: Rows) -> Compared:
        """Compute both sides' logprobs of the rows, with the routes of this engine if the rows have routes."""
        engine, self._routes = sides.teach(rows)
        if self._routes is None or rows[0].routes is None:
            rows = [replace(row, routes=None) for row in rows]
        else:
            rows = _routed(rows, self._routes)
        return replace(self._left, rows=rows, engine=engine, trainer=sides.score(rows))


def _over_vocabulary(rows: Rows) -> Rows:
    return [replace(row, support_ids=None, support_sizes=None) for row in rows]


def _routed(rows: Rows, routes: Sequence[Tensor], first: int = 0, end: int | None = None) -> Rows:
    """Return rows with the routes of the layers [first, end) of those with experts. The others choose."""
    parts = [torch.full_like(each, -1) for each in routes]
    for part, each in zip(parts, routes, strict=True):
        part[:, first:end] = each[:, first:end]
    return [replace(row, routes=part) for row, part in zip(rows, parts, strict=True)]
