"""Experiments on a saved batch, in an order in which each one needs only what the earlier ones have eliminated."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.data.tokenizer import load_tokenizer
from slime_like.models.dimensions import ModelDimensions
from slime_like.sandbox.rewards.registry import required_of_rows
from slime_like.system.words import counted
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.gap.batch import SavedBatch, weights_of
from slime_like.verification.gap.elimination import Compared, Elimination, Trial
from slime_like.verification.gap.sides import Sides
from slime_like.verification.layouts import ONE_RANK, parse_layout

_LAYERS_SHARE = 0.9
"""Share of what all layers' routes explain that the routes of the named layers explain."""

OpenSides = Callable[[RunConfig, Path | None, bool], AbstractContextManager[Sides]]
"""``Sides.opened`` in a cluster."""


def explain(batch: SavedBatch, opened: OpenSides) -> Elimination:
    """Compare the logprobs of the run's engine with the trainer's, and eliminate possible causes of their gap.

    Raises:
        SlimeLikeError: the run's trainer did not start.
    """
    dimensions = ModelDimensions.from_checkpoint(batch.config.model.path)
    checkpoint = weights_of(batch.config, batch.version) if batch.version else None
    with opened(batch.config, checkpoint, True) as sides:
        masks = [row.loss_mask for row in batch.rows]
        recorded = [row.logprobs for row in batch.rows if row.logprobs is not None]
        found = Elimination(Compared(batch.rows, masks, recorded, sides.score(batch.rows)), dimensions.num_layers)
        tried = _Experiments(batch, checkpoint, dimensions.expert_layers, opened, sides, found)
        recorded_ones = {"staleness": tried.staleness, "temperature": tried.temperature}
        recorded_ones |= {"truncation": tried.truncation, "ids": tried.ids}
        found.run({**recorded_ones, "weights": tried.weights, "routing": tried.routing})
    found.run({"layout": tried.layout, "precision": tried.precision})
    return found


class _Experiments:
    """The experiments; each returns trials, or why there are none."""

    def __init__(
        self,
        batch: SavedBatch,
        checkpoint: Path | None,
        expert_layers: Sequence[int],
        opened: OpenSides,
        sides: Sides,
        found: Elimination,
    ) -> None:
        self._batch, self._config, self._checkpoint = batch, batch.config, checkpoint
        self._expert_layers, self._opened, self._sides, self._found = expert_layers, opened, sides, found
        self._routes: Sequence[Tensor] | None = None  # of a new engine

    # --------------------------------------------------------------------------------- on the recorded logprobs
    def staleness(self, left: Compared) -> list[Trial] | str:
        """Score tokens of other weight versions with those weights. Leave tokens out whose weights are gone."""
        current, trainer, masks = self._batch.version, left.trainer, left.masks
        versions = [row.weight_versions for row in left.rows if row.weight_versions is not None]
        tokens = left.of(versions)
        if not (others := sorted(set(tokens.tolist()) - {current})):
            return f"all tokens are of the trainer's version {current}"
        text = f"{(tokens != current).double().mean():.0%} of the tokens are of version {', '.join(map(str, others))}"
        text = f"{text}, the trainer's is {current}"
        for version in others:
            places = [each == version for each in versions]
            if (weights := weights_of(self._config, version)) is None:
                masks = [mask & ~place for mask, place in zip(masks, places, strict=True)]
                continue
            with self._opened(self._config, weights if version else None, False) as older:
                trainer = [torch.where(*each) for each in zip(places, older.score(left.rows), trainer, strict=True)]
        if not any(mask.any() for mask in masks):
            text = f"{text}; no checkpoint has their weights"
            self._found.suspect = "staleness", text
            return text
        return [Trial(replace(left, masks=masks, trainer=trainer), text)]

    def temperature(self, left: Compared) -> list[Trial] | str:
        ours = {row.temperature for row in left.rows}
        others = {1.0, self._config.rollout.temperature, self._config.evaluation.temperature} - ours - {0.0}
        scored = f"the trainer's logprobs are at temperature {', '.join(f'{each:g}' for each in sorted(ours))}"
        if not others:
            return scored
        return [
            self._scored(
                left, [replace(row, temperature=one) for row in left.rows], f"{scored}, the engine's at {one:g}"
            )
            for one in sorted(others)
        ]

    def truncation(self, left: Compared) -> list[Trial] | str:
        if any(row.support_sizes is not None and row.support_sizes.any() for row in left.rows):
            text = "the trainer's logprobs are over the supports, the engine's over the vocabulary"
            return [self._scored(left, _over_vocabulary(left.rows), text)]
        rollout = self._config.rollout
        if rollout.top_p == 1 and rollout.bounded_top_k <= 0 and rollout.min_p == 0:
            return "tokens are sampled from the whole vocabulary"
        text = "sampling is truncated, but the rows have no supports to score over"
        self._found.suspect = "truncation", text
        return text

    def ids(self, left: Compared) -> list[Trial] | str:
        """Score the responses after the prompts that the engine may have seen instead."""
        tokenizer = load_tokenizer(self._config.model.path, self._config.model.trust_remote_code)
        given, trials = [row.prompt_tokens for row in left.rows], []
        again = given
        if not self._config.rollout.agent.is_set:
            config = self._config
            source = PromptSource(config.data.train, tokenizer, config.data, config.seed, **required_of_rows(config))
            prompts = source.next(1 + max(row.group_id for row in left.rows))
            again = [torch.tensor(prompts[row.group_id].input.token_ids) for row in left.rows]
        differ = sum(not torch.equal(*pair) for pair in zip(again, given, strict=True))
        text = f"{differ} of {counted(len(given), 'prompt')} have other ids if they are encoded again"
        candidates = {text: again} if differ else {}
        if (bos := tokenizer.bos_token_id) is not None:
            candidates["the engine saw another BOS"] = [torch.cat((ids.new_tensor([bos]), ids)) for ids in given]
            if all(len(ids) > 1 and ids[0] == bos for ids in given):
                candidates["the engine saw no BOS"] = [ids[1:] for ids in given]
        for said, prompts in candidates.items():
            rows = [
                replace(row, prompt_tokens=ids, prompt_len=len(ids), routes=None)
                for row, ids in zip(left.rows, prompts, strict=True)
            ]
            trials.append(self._scored(left, rows, said))
        return trials or text

    # ------------------------------------------------------------------------------------------- on a new engine
    def weights(self, left: Compared) -> list[Trial]:
        """Compute both sides again, at temperature 1 over the vocabulary. The engine loads the trainer's weights."""
        engine, self._routes = self._sides.teach(left.rows)
        rows = [replace(row, temperature=1.0, routes=None) for row in _over_vocabulary(left.rows)]
        if self._routes is not None and left.rows[0].routes is not None:
            rows = _routed(rows, self._routes)
        after = replace(left, rows=rows, engine=engine, trainer=self._sides.score(rows))
        if self._found.suspect is not None:
            cause, text = self._found.suspect
            return [Trial(after, f"{cause}: {text}", cause)]
        if after.gaps.mean() > left.gaps.mean() / 2:
            return [Trial(after, "a new engine with the trainer's weights has the same gap")]
        sound = "the run's engine had other weights than the trainer, which a new one receives unchanged"
        return [Trial(after, self._sides.sync_problem() or sound)]

    def routing(self, left: Compared) -> list[Trial] | str:
        """Replay the engine's routes, and find the layers in which this removes most of the gap."""
        routes, layers, rows = self._routes, self._expert_layers, left.rows
        if not layers or routes is None or rows[0].routes is not None:
            return "no experts" if not layers else "no routes" if routes is None else "the engine's routes are replayed"

        def replayed(first: int = 0, end: int | None = None) -> Compared:
            routed = _routed(rows, routes, first, end)
            return replace(left, rows=routed, trainer=self._sides.score(routed))

        whole = replayed()
        enough = left.gaps.mean() - _LAYERS_SHARE * (left.gaps.mean() - whole.gaps.mean())
        end = bisect_left(range(1, len(layers)), True, key=lambda n: bool(replayed(0, n).gaps.mean() <= enough)) + 1
        first = bisect_left(range(1, end), True, key=lambda n: bool(replayed(n, end).gaps.mean() > enough))
        where = f"layers {layers[first]} to {layers[end - 1]}" if end - first > 1 else f"layer {layers[first]}"
        return [Trial(whole, f"the engine chooses other experts in {where}", f"routing in {where}")]

    # -------------------------------------------------------------------------------------------- on other trainers
    def layout(self, left: Compared) -> list[Trial] | str:
        if (ranks := self._config.trainer.parallel.world_size) == 1:
            return "one rank"
        with self._opened(parse_layout(ONE_RANK).applied_to(self._config), self._checkpoint, False) as single:
            text = f"one rank gives other logprobs than {ranks}: try `slime-like verify layouts`"
            return [Trial(replace(left, trainer=single.score(left.rows)), text)]

    def precision(self, left: Compared) -> list[Trial] | str:
        """Compute both sides in float32, with the engine's routes if they are replayed."""
        if (dtype := self._config.model.dtype) == "float32":
            return "both in float32"
        model = self._config.model.model_copy(update={"dtype": "float32"})
        with self._opened(self._config.model_copy(update={"model": model}), self._checkpoint, True) as exact:
            engine, routes = exact.teach(left.rows)
            rows = left.rows if routes is None or left.rows[0].routes is None else _routed(left.rows, routes)
            after = replace(left, rows=rows, engine=engine, trainer=exact.score(rows))
        return [Trial(after, f"both in float32 instead of {dtype}", f"precision ({dtype})")]

    def _scored(self, left: Compared, rows: Sequence[ScoredTrajectory], text: str) -> Trial:
        return Trial(replace(left, rows=rows, trainer=self._sides.score(rows)), text)


def _over_vocabulary(rows: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    return [replace(row, support_ids=None, support_sizes=None) for row in rows]


def _routed(
    rows: Sequence[ScoredTrajectory], routes: Sequence[Tensor], first: int = 0, end: int | None = None
) -> list[ScoredTrajectory]:
    """Return rows with the engine's routes in the layers [first, end) with experts; other layers choose."""
    inside = [torch.full_like(each, -1) for each in routes]
    for part, each in zip(inside, routes, strict=True):
        part[:, first:end] = each[:, first:end]
    return [replace(row, routes=part) for row, part in zip(rows, inside, strict=True)]
