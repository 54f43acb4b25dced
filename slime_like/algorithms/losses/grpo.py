"""The configured loss of whole batches of logits or logprobs, for direct use.

Trainers do not use it: they compose ``Loss`` (``loss.py``) of a policy term (``policy.py``, where a new one goes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from slime_like.algorithms.importance import configured_weights, mean_weight
from slime_like.algorithms.logprobs import logprobs_and_entropy
from slime_like.algorithms.losses.loss import build_loss
from slime_like.algorithms.losses.sums import LossOutput
from slime_like.algorithms.losses.types import LossInputs
from slime_like.algorithms.reduction import RolloutIds, step_denominator, token_weights
from slime_like.algorithms.segments import require_lengths, spread_over_tokens
from slime_like.algorithms.tensor_checks import expanded_temperatures, require_alike, require_bool_mask, require_tensors

if TYPE_CHECKING:
    from slime_like.config.algorithm import AlgorithmConfig  # needs pydantic, which this layer does not


class BatchLoss(NamedTuple):
    """The mean loss of a whole batch.

    Attributes:
        loss: with graph; everything else is detached.
        policy_loss, kl_loss: means of the policy term, and of the KL without its coefficient.
        ratio, clip_fraction: mean of pi / pi_old, and fraction of clipped tokens, over loss-carrying tokens.
        logprobs: like ``targets``; 0 where these are negative.
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    logprobs: Tensor

    @classmethod
    def of_sums(cls, output: LossOutput, denominator: float, logprobs: Tensor) -> Self:
        """The means of ``output``'s sums."""
        stats = output.sums.to_stats(denominator, 0.0, 0.0)
        means = stats.policy_loss, stats.kl_loss, stats.ratios, stats.clipfrac
        return cls(output.loss / denominator, *means, logprobs.detach())


class GRPOLoss:
    """``build_loss(config)`` for direct use: from logprobs, or from logits in one tensor or in chunks.

    Args:
        config: the objective; ``loss``, clip bounds, KL, entropy and ``reduction`` are taken from it.

    Example:
        >>> GRPOLoss(AlgorithmConfig(kl_coef=0.1)).forward(logits, targets, ref_logprobs, advantages).loss.backward()
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.loss = build_loss(config)

    def compute_loss_from_logprobs(
        self,
        logprobs: Tensor,
        *,
        advantages: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        behaviour_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        loss_mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        response_lens: Tensor | None = None,
    ) -> LossOutput:
        """The weighted sum and its metrics, undivided.

        Args:
            logprobs: (R,) with graph; every other per-token tensor is (R,) too.
            advantages: (R,); each sequence's advantage on its tokens.
            old_logprobs, ref_logprobs, behaviour_logprobs, entropy: where the configured loss needs them.
            loss_mask: bool; none means that every token carries loss.
            token_weights: none means weight 1.
            response_lens: (S,), for losses with a ratio per sequence.

        Returns:
            ``loss``, with graph, and ``sums``: divide by ``step_denominator``, after the sums of all micro-batches.

        Raises:
            ValueError: an input that the configured loss needs is missing, or a mask is not bool. A ratio
                against a detached copy of the same logprobs would be 1 by construction, so it is never made up here.
        """
        require_tensors(logprobs=logprobs)
        mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask
        weights = torch.ones_like(logprobs) if token_weights is None else token_weights
        return self.loss(
            LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                old_logprobs=old_logprobs,
                behaviour_logprobs=behaviour_logprobs,
                ref_logprobs=ref_logprobs,
                advantages=advantages,
                loss_mask=mask,
                token_weights=weights,
                response_lens=response_lens,
            )
        )

    def forward(
        self,
        pi_logits: Tensor | Sequence[Tensor],
        targets: Tensor,
        ref_logprobs: Tensor | None,
        advantages: Tensor | None,
        padding_masks: Tensor | None = None,
        *,
        old_logprobs: Tensor | None = None,
        behaviour_logprobs: Tensor | None = None,
        response_lens: Tensor | None = None,
        group_ids: Sequence[int] | Tensor | None = None,
        rollout_ids: RolloutIds | None = None,
        temperature: float | Tensor = 1.0,
    ) -> BatchLoss:
        """The mean loss of a whole batch, packed (R) or padded (B, T).

        Args:
            pi_logits: (R, V) or (B, T, V), scoring ``targets`` (already shifted); or a list of chunks along the token
                axis, of any sizes.
            targets: (R,) or (B, T) int64; a negative id carries no loss.
            ref_logprobs: as ``targets``; may be none where ``kl_coef`` is 0.
            advantages: as ``targets``, or one per sequence: (B,) for padded input, (S,) for packed with
                ``response_lens``; none where the loss uses none (sft).
            padding_masks: as ``targets``, bool, True where the token carries loss.
            old_logprobs: as ``targets``. None declares that these very weights drew the samples and are updated once:
                then pi_old is the current policy, the ratio is 1 and nothing can be clipped.
            behaviour_logprobs: as ``targets``.
            response_lens: (S,) for packed input, where the loss or the reduction is per sequence; refused for padded
                input, whose rows are sequences already and whose padding is marked in ``padding_masks``.
            group_ids: of every sequence, for the reduction "groups".
            rollout_ids: of every sequence, where several are rows of one rollout; see ``token_weights``.
            temperature: what the logits are divided by: a number, or a tensor that expands to ``targets``.

        Raises:
            ValueError: no tensor, shapes that do not fit, a mask that is not bool, a temperature that is not positive,
                something missing that the configuration needs, or ratios per sequence where rollouts have several rows.
        """
        require_tensors(targets=targets, advantages=advantages)
        _check_input(targets)
        given = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "behaviour_logprobs": behaviour_logprobs}
        # Before flattening, after which (T, B) looks like (B, T).
        require_alike(targets=targets, padding_masks=padding_masks, **given)
        logprobs, entropy = _score(pi_logits, targets, temperature)
        mask = _loss_mask(targets, padding_masks)
        lengths = _sequence_lengths(targets, response_lens)
        weights, denominator = self._reduce(mask, lengths, group_ids, rollout_ids)
        given["old_logprobs"] = logprobs.detach() if old_logprobs is None else old_logprobs
        given["advantages"] = None if advantages is None else _broadcast(advantages, targets, lengths)
        flat = {name: None if values is None else values.flatten() for name, values in given.items()}
        self._normalise(flat, mask, lengths, weights)
        output = self.compute_loss_from_logprobs(
            logprobs.flatten(),
            **flat,
            entropy=entropy.flatten(),
            loss_mask=mask,
            token_weights=weights.to(logprobs.dtype),
            response_lens=lengths,
        )
        return BatchLoss.of_sums(output, denominator, logprobs)

    __call__ = forward

    def _normalise(self, flat: dict[str, Tensor | None], mask: Tensor, lengths: Tensor | None, weights: Tensor) -> None:
        """Where configured, divide advantages by the mean importance weight of this batch."""
        old, behaviour, advantages = flat["old_logprobs"], flat["behaviour_logprobs"], flat["advantages"]
        if self.config.importance_correction == "none" or not self.config.importance_normalize:
            return
        if old is None or behaviour is None or advantages is None:
            return  # the loss itself names what is missing
        made = configured_weights(self.config, old, behaviour, mask, lengths)
        flat["advantages"] = advantages / mean_weight(made.weights, mask, weights)

    def _reduce(
        self,
        mask: Tensor,
        lengths: Tensor | None,
        group_ids: Sequence[int] | Tensor | None,
        rollout_ids: RolloutIds | None,
    ) -> tuple[Tensor, float]:
        reduction = self.config.reduction
        sizes = [mask.numel()] if lengths is None else lengths.tolist()
        if lengths is None and reduction != "tokens":
            raise ValueError(f"reduction {reduction!r} is per sequence; give response_lens, or reduction 'tokens'")
        if reduction == "groups" and group_ids is None:
            raise ValueError("reduction 'groups' needs group_ids, one for each sequence")
        if rollout_ids is not None and (settings := self.config.per_sequence):
            raise ValueError(
                f"{', '.join(settings)}: ratios per sequence, which rows of a rollout do not have; use losses and "
                "corrections per token, or give no rollout_ids"
            )
        counts = [int(part.sum()) for part in mask.split(sizes)]
        groups = [0] * len(counts) if group_ids is None else list(group_ids)  # one group: other reductions ignore it
        weights = token_weights(reduction, counts, groups, self.config.constant_length, rollout_ids)
        per_token = spread_over_tokens(weights, torch.tensor(sizes, device=mask.device))
        return per_token, step_denominator(reduction, counts, groups, rollout_ids)


def _check_input(targets: Tensor) -> None:
    if targets.ndim not in (1, 2):
        raise ValueError(f"targets have shape {tuple(targets.shape)}; give (R,) for a pack, (B, T) for padded input")


def _score(pi_logits: Tensor | Sequence[Tensor], targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies; targets are cut at the chunks' own offsets, so the two cannot drift apart."""
    chunks = [pi_logits] if isinstance(pi_logits, Tensor) else list(pi_logits)
    for chunk in chunks:
        require_tensors(pi_logits=chunk)
        if chunk.ndim != targets.ndim + 1:
            raise ValueError(
                f"pi_logits have shape {tuple(chunk.shape)}, targets {tuple(targets.shape)}; give (R, V) for a pack, "
                "(B, T, V) for padded input"
            )
    sizes = [chunk.shape[-2] for chunk in chunks]
    if sum(sizes) != targets.shape[-1]:
        raise ValueError(f"chunks of {sizes} tokens do not cover targets of shape {tuple(targets.shape)}")
    parts = (values.split(sizes, dim=-1) for values in (targets, expanded_temperatures(temperature, targets)))
    scores = [logprobs_and_entropy(*given) for given in zip(chunks, *parts, strict=True)]
    return torch.cat([s[0] for s in scores], dim=-1), torch.cat([s[1] for s in scores], dim=-1)


def _sequence_lengths(targets: Tensor, response_lens: Tensor | None) -> Tensor | None:
    if targets.ndim == 1:
        if response_lens is not None:
            require_lengths(response_lens, targets.numel())
        return response_lens
    if response_lens is not None:
        raise ValueError(
            f"response_lens belong to packed targets (R,), these are {tuple(targets.shape)}; mark the padding of their "
            "rows in padding_masks"
        )
    return torch.full((targets.shape[0],), targets.shape[1], dtype=torch.int64, device=targets.device)


def _loss_mask(targets: Tensor, padding_masks: Tensor | None) -> Tensor:
    """(tokens,) True where a token carries loss."""
    mask = targets >= 0
    if padding_masks is not None:
        require_bool_mask(padding_masks, "padding_masks")
        mask = mask & padding_masks
    return mask.flatten()


def _broadcast(advantages: Tensor, targets: Tensor, lengths: Tensor | None) -> Tensor:
    if targets.ndim == 1 and lengths is not None and advantages.shape == lengths.shape != targets.shape:
        return spread_over_tokens(advantages, lengths)
    rows = advantages[:, None] if targets.ndim == 2 and advantages.ndim == 1 else advantages
    if rows.ndim != targets.ndim or rows.shape not in (targets.shape, (*targets.shape[:1], 1)):
        raise ValueError(
            f"advantages {tuple(advantages.shape)} do not fit targets {tuple(targets.shape)}; give one per target, or "
            "one per sequence, (B,) for padded targets (B, T), (S,) for packed ones with response_lens"
        )
    return rows.expand(targets.shape)
