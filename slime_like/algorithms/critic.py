"""The critic: generalized advantage estimation over packed responses, and the loss of the values."""

import torch
from torch import Tensor

from slime_like.algorithms.losses.sums import ValueSums
from slime_like.algorithms.segments import require_alike, require_bool_mask, require_lengths


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    token_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of every loss-carrying token (Schulman et al., arXiv:1506.02438, eq. 11 to 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, where t+1 is the sequence's next
    *loss-carrying* token. Masked tokens (tool output, observations) are skipped. The value after the last loss-carrying
    token is 0, and that token gets the sequence's reward, even if the response continues after it.

    Args:
        rewards: (S,) terminal rewards of the sequences.
        values: (R,) value of the state in which each response token was chosen.
        loss_mask: (R,) bool.
        response_lens: (S,) int64.
        gamma, lam: discount and trace decay per loss-carrying token.
        token_rewards: (R,) additional rewards, such as a KL penalty; ignored on masked tokens.

    Returns:
        Advantages, and returns (``advantages + values``), (R,) in the dtype of ``values``, 0 on masked tokens, without
        graph.

    Raises:
        ValueError: shapes don't fit together, or the mask isn't bool.
    """
    require_bool_mask(loss_mask)
    require_lengths(response_lens, values.numel())
    require_alike(values=values, loss_mask=loss_mask, token_rewards=token_rewards)
    row = torch.arange(response_lens.numel(), device=values.device).repeat_interleave(response_lens)[loss_mask]
    counts = torch.bincount(row, minlength=response_lens.numel())
    column = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    # Right-aligned: every sequence's last token is in the last column, and one sweep serves all sequences.
    width = int(counts.max()) if row.numel() else 0
    column += width - counts[row]
    carried = values.detach()[loss_mask].double()
    grid_values, grid_rewards = (carried.new_zeros(response_lens.numel(), width) for _ in range(2))
    grid_values[row, column] = carried
    if token_rewards is not None:
        grid_rewards[row, column] = token_rewards.detach()[loss_mask].double()
    if width:
        grid_rewards[:, -1] += rewards.double()
    advantages = torch.zeros_like(values, requires_grad=False)
    flat = _sweep(grid_rewards, grid_values, gamma, lam)[row, column]
    advantages[loss_mask] = flat.to(values.dtype)
    returns = torch.zeros_like(advantages)
    returns[loss_mask] = (flat + carried).to(values.dtype)
    return advantages, returns


def _sweep(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Compute (S, width) advantages from the last column to the first."""
    following = torch.cat([values[:, 1:], values.new_zeros(values.shape[0], 1)], dim=1)[:, : values.shape[1]]
    deltas = rewards + gamma * following - values
    advantages = torch.zeros_like(deltas)
    running = deltas.new_zeros(deltas.shape[0])
    for t in range(deltas.shape[1] - 1, -1, -1):
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    clip: float | None = None,
) -> tuple[Tensor, ValueSums]:
    """Return ``0.5 * max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)``, weighted and summed.

    Source: the clipped value objective of OpenAI Baselines' PPO (Engstrom et al., arXiv:2005.12729, section 3).

    Args:
        values: (R,) with graph.
        old_values: (R,) when the batch was sampled.
        returns: (R,) targets, from ``gae``.
        loss_mask: (R,) bool.
        token_weights: (R,).
        clip: largest change of a value that lowers the loss; ``None`` for no bound.

    Returns:
        The loss, a scalar with graph, and detached metrics; a token counts as clipped if the second term won. Values on
        masked tokens (inf and nan too) have no effect.

    Raises:
        ValueError: shapes differ, or the mask isn't bool.
    """
    require_bool_mask(loss_mask)
    require_alike(
        values=values, old_values=old_values, returns=returns, token_weights=token_weights, loss_mask=loss_mask
    )
    values, old_values, returns, token_weights = (
        torch.where(loss_mask, tensor, 0.0) for tensor in (values, old_values, returns, token_weights)
    )
    error = (values - returns).square()
    won = torch.zeros_like(loss_mask)
    if clip is not None:
        change = values - old_values
        bounded = (old_values + change.clamp(-clip, clip) - returns).square()
        won = (bounded > error) & (change.abs() > clip) & loss_mask  # otherwise they differ only by rounding
        error = torch.maximum(error, bounded)
    loss = (0.5 * error * token_weights).sum()
    return loss, _sums(loss, values, old_values, returns, won, loss_mask)


@torch.no_grad()
def _sums(
    loss: Tensor, values: Tensor, old_values: Tensor, returns: Tensor, won: Tensor, loss_mask: Tensor
) -> ValueSums:
    error = returns.double() - values.double()
    gap = torch.cat([values - old_values, values.new_zeros(1)]).abs().amax()
    entries = loss, values, returns, returns.double().square(), error, error.square(), won, loss_mask, gap
    return ValueSums(*[each.detach().double().sum() for each in entries])
