"""The configured loss of a whole batch of logits, for direct use. Trainers call ``Loss`` (``loss.py``) instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slime_like.algorithms.importance import configured_weights, mean_weight
from slime_like.algorithms.logprobs import logprobs_and_entropy
from slime_like.algorithms.losses.loss import build_loss
from slime_like.algorithms.losses.policy import LossInputs, required
from slime_like.algorithms.reduction import step_denominator, token_weights
from slime_like.algorithms.segments import expanded_temperatures, require_alike, spread_over_tokens

if TYPE_CHECKING:
    from slime_like.config.algorithm import AlgorithmConfig  # needs pydantic, which this layer doesn't


class BatchLoss(NamedTuple):
    """Means over a batch. Only ``loss`` has a graph; ``kl_loss`` is without its coefficient.

    ``logprobs`` has the shape of the targets and is 0 at negative ones.
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    logprobs: Tensor


class GRPOLoss:
    """``build_loss(config)`` for direct use on a whole batch of logits, in one tensor or in chunks.

    Example:
        >>> loss = GRPOLoss(AlgorithmConfig(kl={"coef": 0.1}))
        >>> loss.forward(logits, targets, ref_logprobs, advantages).loss.backward()
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config, self.loss = config, build_loss(config)

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
        temperature: float | Tensor = 1.0,
    ) -> BatchLoss:
        """Return the mean loss of a whole batch, packed (R) or padded (B, T).

        Args:
            pi_logits: (R, V) or (B, T, V) logits that score ``targets``, or a list of chunks along the token axis.
            targets: (R,) or (B, T) int64; a negative id carries no loss.
            ref_logprobs, behaviour_logprobs: like ``targets``, if the configured loss needs them.
            advantages: like ``targets``, or one per sequence: (B,), or (S,) with ``response_lens``.
            padding_masks: like ``targets``, bool, True where the token carries loss.
            old_logprobs: like ``targets``. ``None`` declares that the current weights sampled the batch and are updated
                once: the ratio is 1 and nothing is clipped.
            response_lens: (S,) for packed input, if the loss or the reduction is per sequence.
            group_ids: one per sequence, for the reduction "groups".
            temperature: divisor of the logits: a number, or a tensor that expands to ``targets``.

        Raises:
            ValueError: shapes don't fit, a temperature isn't positive, or the configuration needs a missing input.
        """
        chunks = [pi_logits] if isinstance(pi_logits, Tensor) else list(pi_logits)
        sizes = [chunk.shape[-2] for chunk in chunks]  # targets are cut there, too, so the two can't drift apart
        parts = (values.split(sizes, dim=-1) for values in (targets, expanded_temperatures(temperature, targets)))
        scores = [logprobs_and_entropy(*part) for part in zip(chunks, *parts, strict=True)]
        logprobs, entropy = (torch.cat(values, dim=-1) for values in zip(*scores, strict=True))
        mask = targets >= 0 if padding_masks is None else (targets >= 0) & padding_masks
        is_padded = targets.ndim == 2 and response_lens is None
        lengths = torch.full_like(targets[:, 0], targets.shape[1]) if is_padded else response_lens
        if advantages is not None and lengths is not None and advantages.shape == lengths.shape != targets.shape:
            advantages = spread_over_tokens(advantages, lengths).view_as(targets)
        given = {"ref_logprobs": ref_logprobs, "advantages": advantages, "behaviour_logprobs": behaviour_logprobs}
        given["old_logprobs"] = logprobs.detach() if old_logprobs is None else old_logprobs
        require_alike(targets=targets, padding_masks=padding_masks, **given)  # flattened, (T, B) looks like (B, T)
        flat: dict[str, Any] = {name: None if values is None else values.flatten() for name, values in given.items()}
        weights, denominator = self._reduce(mask.flatten(), lengths, group_ids)
        cast_weights = weights.to(logprobs.dtype)
        inputs = LossInputs(logprobs.flatten(), mask.flatten(), cast_weights, entropy.flatten(), **flat)
        inputs.response_lens = lengths
        if self.config.importance.normalize and self.config.importance.correction != "none":
            old, behaviour = required(inputs, "old_logprobs"), required(inputs, "behaviour_logprobs")
            made, _ = configured_weights(self.config.importance, old, behaviour, inputs.loss_mask, lengths)
            inputs.mean_weights = torch.full_like(made, mean_weight(made, inputs.loss_mask, weights))
        output = self.loss(inputs)
        stats = output.sums.to_stats(denominator, 0.0, 0.0)
        means = stats.policy_loss, stats.kl_loss, stats.ratios, stats.clipfrac
        return BatchLoss(output.loss / denominator, *means, logprobs.detach())

    __call__ = forward

    def _reduce(
        self, mask: Tensor, lengths: Tensor | None, group_ids: Sequence[int] | Tensor | None
    ) -> tuple[Tensor, float]:
        name, options = self.config.reduction.name, self.config.reduction.options
        if (name != "tokens" and lengths is None) or (name == "groups" and group_ids is None):
            needed = "response_lens and group_ids" if name == "groups" else "response_lens"
            raise ValueError(f"reduction {name!r} needs {needed}; give them, or use the reduction 'tokens'")
        sizes = torch.tensor([mask.numel()]) if lengths is None else lengths
        counts = [int(part.sum()) for part in mask.split(sizes.tolist())]
        groups = [0] * len(counts) if group_ids is None else group_ids  # the other reductions ignore groups
        weights = spread_over_tokens(token_weights(name, counts, groups, **options), sizes.to(mask.device))
        return weights, step_denominator(name, counts, groups, **options)
