"""The configured loss of whole batches of logits or logprobs, for direct use.

Trainers do not use it: they compose ``Loss`` (``loss.py``) of a policy term (``policy.py``, where a new one goes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from slime_like.algorithms.importance import configured_weights, mean_weight
from slime_like.algorithms.logprobs import logprobs_and_entropy
from slime_like.algorithms.losses.loss import build_loss
from slime_like.algorithms.losses.sums import LossOutput
from slime_like.algorithms.losses.types import LossInputs
from slime_like.algorithms.reduction import RolloutIds, step_denominator, token_weights
from slime_like.algorithms.segments import require_lengths, spread_over_tokens
from slime_like.algorithms.tensor_checks import expanded_temperatures, require_alike

if TYPE_CHECKING:
    from slime_like.config.algorithm import AlgorithmConfig  # needs pydantic, which this layer does not


class BatchLoss(NamedTuple):
    """Means of a whole batch: ``loss`` with graph, policy term, KL without its coefficient, pi / pi_old and fraction of
    clipped tokens over loss-carrying tokens; and ``logprobs``, like the targets, 0 where these are negative."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    logprobs: Tensor


class GRPOLoss:
    """``build_loss(config)`` for direct use: from logprobs, or from logits in one tensor or in chunks.

    Example:
        >>> GRPOLoss(AlgorithmConfig(kl_coef=0.1)).forward(logits, targets, ref_logprobs, advantages).loss.backward()
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config, self.loss = config, build_loss(config)

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
        """Return the weighted sum, undivided, with its metrics; ``step_denominator`` is what to divide by.

        Args:
            logprobs: (R,) with graph. Every other tensor is (R,) too, as ``LossInputs`` describes it.
            loss_mask: bool; by default every token carries loss.
            token_weights: by default 1.
            response_lens: (S,), for losses with a ratio per sequence.

        Raises:
            ValueError: an input that the configured loss needs is missing, or inputs do not fit together. A ratio
                against a detached copy of the same logprobs would be 1 by construction, so it is never made up here.
        """
        if response_lens is not None:
            require_lengths(response_lens, logprobs.numel())
        ones = torch.ones_like(logprobs)
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=old_logprobs,
            behaviour_logprobs=behaviour_logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages,
            loss_mask=ones.bool() if loss_mask is None else loss_mask,
            token_weights=ones if token_weights is None else token_weights,
            response_lens=response_lens,
        )
        return self.loss(inputs)

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
        """Return the mean loss of a whole batch, packed (R) or padded (B, T).

        Args:
            pi_logits: (R, V) or (B, T, V), scoring ``targets`` (already shifted); or a list of chunks along the token
                axis, of any sizes.
            targets: (R,) or (B, T) int64; a negative id carries no loss.
            ref_logprobs, behaviour_logprobs: like ``targets``, if the configured loss needs them.
            advantages: like ``targets``, or one per sequence: (B,), or (S,) with ``response_lens``.
            padding_masks: like ``targets``, bool, True where the token carries loss.
            old_logprobs: like ``targets``. None declares that these very weights drew the samples and are updated once:
                then pi_old is the current policy, the ratio is 1 and nothing can be clipped.
            response_lens: (S,) for packed input, if the loss or the reduction is per sequence.
            group_ids, rollout_ids: one per sequence, for ``token_weights``.
            temperature: divisor of the logits: a number, or a tensor that expands to ``targets``.

        Raises:
            ValueError: shapes that do not fit, a temperature that is not positive, something missing that the
                configuration needs, or ratios per sequence although rollouts have several rows.
        """
        logprobs, entropy = _score(pi_logits, targets, temperature)
        mask = targets >= 0 if padding_masks is None else (targets >= 0) & padding_masks
        is_padded = targets.ndim == 2 and response_lens is None
        lengths = torch.full_like(targets[:, 0], targets.shape[1]) if is_padded else response_lens
        if advantages is not None and lengths is not None and advantages.shape == lengths.shape != targets.shape:
            advantages = spread_over_tokens(advantages, lengths).view_as(targets)
        given = {"ref_logprobs": ref_logprobs, "advantages": advantages, "behaviour_logprobs": behaviour_logprobs}
        given["old_logprobs"] = logprobs.detach() if old_logprobs is None else old_logprobs
        require_alike(targets=targets, padding_masks=padding_masks, **given)  # flattened, (T, B) looks like (B, T)
        flat = {name: None if values is None else values.flatten() for name, values in given.items()}
        weights, denominator = self._reduce(mask.flatten(), lengths, group_ids, rollout_ids)
        self._normalise(flat, mask.flatten(), lengths, weights)
        output = self.compute_loss_from_logprobs(
            logprobs.flatten(),
            **flat,
            entropy=entropy.flatten(),
            loss_mask=mask.flatten(),
            token_weights=weights.to(logprobs.dtype),
            response_lens=lengths,
        )
        stats = output.sums.to_stats(denominator, 0.0, 0.0)
        means = stats.policy_loss, stats.kl_loss, stats.ratios, stats.clipfrac
        return BatchLoss(output.loss / denominator, *means, logprobs.detach())

    __call__ = forward

    def _normalise(self, flat: dict[str, Tensor | None], mask: Tensor, lengths: Tensor | None, weights: Tensor) -> None:
        """Divide advantages by the mean importance weight of this batch, if configured."""
        old, behaviour, advantages = flat["old_logprobs"], flat["behaviour_logprobs"], flat["advantages"]
        if self.config.importance_correction == "none" or not self.config.importance_normalize:
            return
        if (
            old is not None and behaviour is not None and advantages is not None
        ):  # the loss itself names what is missing
            made = configured_weights(self.config, old, behaviour, mask, lengths)
            flat["advantages"] = advantages / mean_weight(made.weights, mask, weights)

    def _reduce(
        self,
        mask: Tensor,
        lengths: Tensor | None,
        group_ids: Sequence[int] | Tensor | None,
        rollout_ids: RolloutIds | None,
    ) -> tuple[Tensor, float]:
        """Return the weight of every token, and the denominator of the batch."""
        reduction = self.config.reduction
        for name, needed, given in (
            ("response_lens", reduction != "tokens", lengths),
            ("group_ids", reduction == "groups", group_ids),
        ):
            if needed and given is None:
                raise ValueError(f"reduction {reduction!r} needs {name}; give them, or use the reduction 'tokens'")
        if rollout_ids is not None and (settings := self.config.per_sequence):
            raise ValueError(
                f"{', '.join(settings)}: ratios per sequence, which rows of a rollout do not have; use losses and "
                "corrections per token, or give no rollout_ids"
            )
        sizes = [mask.numel()] if lengths is None else lengths.tolist()
        counts = [int(part.sum()) for part in mask.split(sizes)]
        groups = [0] * len(counts) if group_ids is None else group_ids  # one group: other reductions ignore it
        weights = token_weights(reduction, counts, groups, self.config.constant_length, rollout_ids)
        per_token = spread_over_tokens(weights, torch.tensor(sizes, device=mask.device))
        return per_token, step_denominator(reduction, counts, groups, rollout_ids)


def _score(pi_logits: Tensor | Sequence[Tensor], targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies; targets are cut at the chunks' own offsets, so the two cannot drift apart."""
    chunks = [pi_logits] if isinstance(pi_logits, Tensor) else list(pi_logits)
    sizes = [chunk.shape[-2] for chunk in chunks]
    parts = (values.split(sizes, dim=-1) for values in (targets, expanded_temperatures(temperature, targets)))
    scores = [logprobs_and_entropy(*given) for given in zip(chunks, *parts, strict=True)]
    return torch.cat([s[0] for s in scores], dim=-1), torch.cat([s[1] for s in scores], dim=-1)
