"""Expected gradients of a configured objective, exactly: the sum over all batches of responses.

The advantages, token weights, denominators and losses are those of a run; only the policy is a table of logits.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.common.step.objective import configured_loss
from slime_like.algorithms.losses.types import LossInputs
from slime_like.algorithms.shaping import kl_penalty
from slime_like.config import RunConfig
from slime_like.orchestration.rollout.advantages import Advantages
from slime_like.orchestration.rollout.rows import Rollout
from slime_like.orchestration.trainer.batcher import ExperienceBatcher
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.objective.trees import Tree

Logprobs = dict[str, list[list[Tensor]]]
"""Logprobs of each policy, [prompt][response]."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Logits (prompts, states, ACTIONS) of the engine, of the trainer at the start of the step and now, and of the
    reference."""

    behaviour: Tensor
    old: Tensor
    current: Tensor
    reference: Tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    """Responses [prompt][sample] of one step, with their probability under the engine's policy."""

    responses: tuple[tuple[int, ...], ...]
    probability: float


class Enumeration:
    """All batches of a few prompts with a few samples each, and their rewards.

    Args:
        rewards: (prompts, responses of the tree) float64.
        samples: responses per prompt.
    """

    def __init__(self, config: RunConfig, tree: Tree, rewards: Tensor, samples: int, exact_ratio: bool = False) -> None:
        self._config, self._tree, self._rewards, self._samples = config, tree, rewards, samples
        self._exact_ratio = exact_ratio
        algorithm = config.algorithm
        self._advantages = Advantages(config)
        self._batcher = ExperienceBatcher(algorithm, config.trainer, config.model, replicas=1, pad_token_id=0)
        self._loss = configured_loss(algorithm)

    def gradient(self, policies: Policies) -> Tensor:
        """Return the expected gradient of the loss with respect to the current logits."""
        current = policies.current.clone().requires_grad_()
        logs = {
            name: self._logprobs(current if name == "current" else getattr(policies, name))
            for name in ("behaviour", "old", "current", "reference")
        }
        parts = [self._batch(batch, logs, current) for batch in self._batches(logs["behaviour"])]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        output = self._loss(LossInputs(**columns))
        found: Tensor = torch.autograd.grad(output.loss, current)[0]
        return found

    def _logprobs(self, logits: Tensor) -> list[list[Tensor]]:
        """Return logprobs [prompt][response]."""
        return [[self._tree.logprobs(table, response) for response in self._tree.responses] for table in logits]

    def _batches(self, behaviour: Sequence[Sequence[Tensor]]) -> list[_Batch]:
        """Return every batch. Without zero spread, the probability is that of the groups that remain."""
        probabilities = [[float(each.sum().exp()) for each in of_prompt] for of_prompt in behaviour]
        groups = [self._groups(prompt, each) for prompt, each in enumerate(probabilities)]
        return [
            _Batch(tuple(group for group, _ in chosen), math.prod(p for _, p in chosen))
            for chosen in itertools.product(*groups)
        ]

    def _groups(self, prompt: int, probabilities: Sequence[float]) -> list[tuple[tuple[int, ...], float]]:
        made = []
        for group in itertools.product(range(len(probabilities)), repeat=self._samples):
            rewards = self._rewards[prompt, list(group)]
            if self._config.rollout.drop_zero_spread:
                spread = float(rewards.max() - rewards.min())
                if spread <= self._config.algorithm.least_spread:
                    continue
            made.append((group, math.prod(probabilities[one] for one in group)))
        total = sum(p for _, p in made)
        return [(group, p / total) for group, p in made]

    def _batch(self, batch: _Batch, logs: Logprobs, current: Tensor) -> dict[str, Tensor]:
        """Return the fields of ``LossInputs`` of one batch; token weights contain its probability."""
        places = [(prompt, one) for prompt, group in enumerate(batch.responses) for one in group]
        rows = [self._row(index, prompt, one) for index, (prompt, one) in enumerate(places)]
        rollouts = [Rollout((row,)) for row in rows]
        rewards = torch.stack([self._rewards[place] for place in places])
        totals = rewards + torch.stack([self._penalty(prompt, one, logs) for prompt, one in places])
        advantages = self._advantages.of_rows(rollouts, rewards[:, None], totals, step=1)
        self._batcher.weigh(rows)
        scale = batch.probability / self._batcher.denominator(rows)
        weights = [row.token_weight * scale * self._ratio(place, logs) for row, place in zip(rows, places, strict=True)]
        lengths = [row.response_len for row in rows]

        def joined(name: str) -> Tensor:
            return torch.cat([logs[name][prompt][one] for prompt, one in places])

        return {
            "logprobs": joined("current"),
            "loss_mask": torch.cat([row.loss_mask for row in rows]),
            "token_weights": torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
            "entropy": torch.cat([self._entropy(current[prompt], one) for prompt, one in places]),
            "old_logprobs": joined("old").detach(),
            "behaviour_logprobs": joined("behaviour").detach(),
            "ref_logprobs": joined("reference").detach(),
            "advantages": torch.cat([advantages[row.sequence_id].double().expand(row.response_len) for row in rows]),
            "response_lens": torch.tensor(lengths),
        }

    def _row(self, index: int, prompt: int, one: int) -> ScoredTrajectory:
        response = self._tree.responses[one]
        tokens, mask = torch.tensor(response.tokens), torch.tensor(response.mask)
        return ScoredTrajectory.unrewarded(str(index), torch.zeros(1).long(), tokens, group_id=prompt, loss_mask=mask)

    def _penalty(self, prompt: int, one: int, logs: Logprobs) -> Tensor:
        """Return the KL in the reward, of the policy at the start of the step."""
        setting, mask = self._config.algorithm.kl_reward, torch.tensor(self._tree.responses[one].mask)
        if not setting.coef:
            return torch.zeros(()).double()
        old, reference = logs["old"][prompt][one], logs["reference"][prompt][one]
        return kl_penalty(old, reference, mask, torch.tensor([len(mask)]), setting.coef, setting.estimator)[1][0]

    def _ratio(self, place: tuple[int, int], logs: Logprobs) -> float:
        """Return the probability ratio of the whole response, from the engine's policy to the current one."""
        prompt, one = place
        if not self._exact_ratio:
            return 1.0
        return float((logs["current"][prompt][one].detach() - logs["behaviour"][prompt][one]).sum().exp())

    def _entropy(self, logits: Tensor, one: int) -> Tensor:
        """Return (n,) entropies of the states in which a response's tokens were chosen."""
        states = torch.tensor(self._tree.responses[one].states)
        logs = logits.log_softmax(dim=-1)
        return torch.where(states >= 0, -(logs.exp() * logs).sum(dim=-1)[states.clamp_min(0)], 0.0)


def objective(tree: Tree, rewards: Tensor, policies: Policies, config: RunConfig, samples: int) -> dict[str, Tensor]:
    """Return the true objectives, means over prompts, as functions of ``policies.current``.

    ``reward``: the expected reward, or the best of a group's for ``pass_at_k``, minus the KL in the reward, which is of
    whole responses. ``kl``, ``entropy``: expected sums over the visited states, which do not depend on the logits here:
    terms of a loss ignore that a token leads to other states.
    """
    found = {name: torch.zeros(()).double() for name in ("reward", "kl", "entropy")}
    for prompt, table in enumerate(policies.current):
        logs = torch.stack([tree.logprobs(table, each).sum() for each in tree.responses])
        reference = torch.stack([tree.logprobs(policies.reference[prompt], each).sum() for each in tree.responses])
        probability, kl = logs.exp(), (logs.exp() * (logs - reference)).sum()
        states, others = table.log_softmax(dim=-1), policies.reference[prompt].log_softmax(dim=-1)
        visits = torch.stack(
            [
                torch.bincount(torch.tensor([s for s in each.states if s >= 0]), minlength=len(table))
                for each in tree.responses
            ]
        )
        visited = (probability.detach()[:, None] * visits).sum(dim=0)
        reward = (probability * rewards[prompt]).sum()
        if config.algorithm.advantage.name == "pass_at_k":
            groups = torch.tensor(list(itertools.product(range(len(logs)), repeat=samples)))
            reward = (probability[groups].prod(dim=1) * rewards[prompt][groups].amax(dim=1)).sum()
        found["reward"] += (reward - config.algorithm.kl_reward.coef * kl) / len(policies.current)
        found["kl"] += (visited * (states.exp() * (states - others)).sum(dim=-1)).sum() / len(policies.current)
        found["entropy"] -= (visited * (states.exp() * states).sum(dim=-1)).sum() / len(policies.current)
    return found
