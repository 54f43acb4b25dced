"""Generalised advantage estimation over packed responses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.algorithms.segments import require_lengths
from slime_like.algorithms.tensor_checks import require_alike, require_bool_mask, require_tensors


@dataclass(slots=True)
class AdvantagesAndReturns:
    """(R,) each; 0 on masked tokens."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    token_rewards: Tensor | None = None,
) -> AdvantagesAndReturns:
    """Advantages and returns of every loss-carrying token (Schulman et al., arXiv:1506.02438, eq. 11 to 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, where t+1 is the sequence's next
    *loss-carrying* token: masked ones (tool output, observations) take no time and get nothing. After the last one
    comes value 0, and the sequence's reward belongs to it, not to the last position of the response.

    Args:
        rewards: (S,) terminal reward of every sequence.
        values: (R,) value of the state in which each response token was chosen.
        loss_mask: (R,) bool.
        response_lens: (S,) int64.
        gamma, lam: discount and trace decay per loss-carrying token.
        token_rewards: (R,) further rewards, e.g. a KL penalty; ignored on masked tokens.

    Returns:
        Advantages and ``advantages + values``, in the dtype of ``values``, without graph.

    Raises:
        ValueError: what is no tensor, shapes that do not fit together, a mask that is not bool, values that are
            no floats, or a ``gamma`` or ``lam`` outside 0 to 1.
    """
    _check_inputs(rewards, values, loss_mask, response_lens, token_rewards)
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}={factor} must be 0 to 1")
    row = torch.arange(response_lens.numel(), device=values.device).repeat_interleave(response_lens)[loss_mask]
    counts = torch.bincount(row, minlength=response_lens.numel())
    column = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    # Right-aligned, so that every sequence's last token is in the last column and one sweep serves them all.
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
    return AdvantagesAndReturns(advantages, returns)


def _check_inputs(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, response_lens: Tensor, token_rewards: Tensor | None
) -> None:
    require_tensors(
        rewards=rewards,
        values=values,
        loss_mask=loss_mask,
        response_lens=response_lens,
        token_rewards=token_rewards,
    )
    if values.shape != loss_mask.shape or int(response_lens.sum()) != values.numel():
        raise ValueError(
            f"values {tuple(values.shape)}, loss_mask {tuple(loss_mask.shape)} and response_lens adding up to "
            f"{int(response_lens.sum())} do not fit; give one value and one mask entry per response token"
        )
    require_bool_mask(loss_mask)
    require_lengths(response_lens, values.numel())
    if not values.is_floating_point():
        raise ValueError(f"values are {values.dtype}, which would round the advantages; give floats")
    require_alike(values=values, token_rewards=token_rewards)
    if rewards.shape != response_lens.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} need one entry per sequence, {tuple(response_lens.shape)}")


def _sweep(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """(S, width) advantages, from the last column to the first."""
    following = torch.cat([values[:, 1:], values.new_zeros(values.shape[0], 1)], dim=1)[:, : values.shape[1]]
    deltas = rewards + gamma * following - values
    advantages = torch.zeros_like(deltas)
    running = deltas.new_zeros(deltas.shape[0])
    for t in range(deltas.shape[1] - 1, -1, -1):
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages
