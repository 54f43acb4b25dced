"""Expected gradients of a configured objective, exactly: the sum over all batches of responses of small trees.

Advantages, token weights, denominators and losses are computed as in a run; only the policy is a table of logits.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_like.algorithms.advantages import kl_penalty
from slime_like.algorithms.losses.loss import build_loss
from slime_like.algorithms.losses.policy import LossInputs
from slime_like.algorithms.promise import Target
from slime_like.config import RunConfig
from slime_like.orchestration.rollout.advantages import Advantages, configured_estimator
from slime_like.orchestration.rollout.rows import Rollout
from slime_like.orchestration.trainer.batcher import ExperienceBatcher
from slime_like.trajectory import ScoredTrajectory

ACTIONS = 3
"""Tokens of the policy's vocabulary. 0 ends a response."""
_STOP = 0
OBSERVATION = ACTIONS
"""State of a token that the environment wrote. It has logits, so a loss on such a token has a gradient."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response: the state in which each token was chosen, ``OBSERVATION`` for others, and the tokens."""

    states: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def mask(self) -> list[bool]:
        """True where the policy chose the token."""
        return [state != OBSERVATION for state in self.states]


@dataclass(frozen=True, slots=True)
class Tree:
    """All responses to one prompt."""

    name: str
    responses: tuple[Response, ...]

    def likeliest(self, logits: Tensor) -> int:
        best = logits.argmax(dim=-1).tolist()
        pairs = [zip(each.states, each.tokens, strict=True) for each in self.responses]
        return next(i for i, each in enumerate(pairs) if all(best[s] == t for s, t in each if s != OBSERVATION))

    def logprobs(self, logits: Tensor, response: Response) -> Tensor:
        """Return (P, n) log-softmax of the (P, ACTIONS + 1, ACTIONS) ``logits`` at a response's tokens."""
        return logits.log_softmax(dim=-1)[:, response.states, response.tokens]


def one_turn(small: bool) -> Tree:
    return Tree("one turn", tuple(_responses(small, lambda a: 0)))


def two_turns(small: bool) -> Tree:
    """Return the tree of conversations: stop at once, or see an observation of one or two tokens and act again."""
    return Tree("two turns", tuple(_responses(small, lambda a: a)))


def one_token() -> Tree:
    """Return the tree of single tokens, each with as many observed ones after it."""
    return Tree("one token", tuple(Response((0, *(OBSERVATION,) * a), (a, *(_STOP,) * a)) for a in range(ACTIONS)))


def _responses(small: bool, observed: Callable[[int], int]) -> Iterator[Response]:
    """Yield all responses. After a first token other than 0, or in a small tree after 1 only, a second one follows.

    Args:
        observed: number of observation tokens after a first token.
    """
    for a in range(ACTIONS):
        if a == _STOP or (small and a > 1):
            yield Response((0,), (a,))
            continue
        for b in range(ACTIONS):
            seen = observed(a)
            yield Response((0, *(OBSERVATION,) * seen, a), (a, *(_STOP,) * seen, b))


_Place = tuple[int, int]
"""A prompt, and one of its responses."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Logits (prompts, states, ACTIONS) of the engine, of the trainer at the start of the step and now, and of the
    reference, which is the teacher, too."""

    behaviour: Tensor
    old: Tensor
    current: Tensor
    reference: Tensor


class Enumeration:
    """All batches of a few prompts with a few samples each, and their rewards.

    Args:
        rewards: (prompts, responses of the tree) float64.
        first: (prompts, ACTIONS) part of it that the first turn of a conversation earns, by its token.
        samples: responses per prompt.
        exact_ratio: weigh each response by its probability ratio, from the engine's policy to the current one.
    """

    def __init__(
        self, config: RunConfig, tree: Tree, rewards: Tensor, first: Tensor, samples: int, exact_ratio: bool = False
    ) -> None:
        self._algorithm, self._drops = config.algorithm, config.rollout.drop_zero_spread
        self._distils = config.distillation.sampled_coef
        self._tree, self._rewards, self._first = tree, rewards, first
        self._samples, self._exact_ratio = samples, exact_ratio
        self._mask = torch.tensor([sampled for _ in rewards for each in tree.responses for sampled in each.mask])
        self._advantages = Advantages(config)
        self._batcher = ExperienceBatcher(config.algorithm, config.trainer, config.model, replicas=1, pad_token_id=0)
        self._loss = build_loss(config.algorithm, config.distillation.exact_coef)

    def gradient(self, policies: Policies) -> Tensor:
        """Return the expected gradient of the loss with respect to the current logits."""
        current = policies.current.clone().requires_grad_()
        tables = {"logprobs": current, "behaviour_logprobs": policies.behaviour}
        tables |= {"old_logprobs": policies.old, "ref_logprobs": policies.reference}
        columns = {name: self._columns(logits) for name, logits in tables.items()}
        batches = list(self._batches(columns["behaviour_logprobs"]))
        places = [place for batch, _ in batches for place in batch]
        greedy = [self._tree.likeliest(logits) for logits in policies.behaviour]
        spans = {place: self._tokens(place) for place in set(places)}
        samples = {place: self._row(place, columns, greedy[place[0]]) for place in spans}
        rows = [
            replace(samples[place], sequence_id=str(index), rollout_id="", group_id=index // self._samples)
            for index, place in enumerate(places)
        ]
        self._batcher.weigh(rows)
        size = len(self._rewards) * self._samples
        steps = [rows[start : start + size] for start in range(0, len(rows), size)]
        carrying = [tuple(self._tree.responses[one].mask.count(True) for _, one in batch) for batch, _ in batches]
        alike = dict(zip(carrying, steps, strict=True))  # others of the same numbers have the same denominator
        divisors = {numbers: self._batcher.denominator(step) for numbers, step in alike.items()}
        scales = [p / divisors[numbers] for (_, p), numbers in zip(batches, carrying, strict=True)]
        weights = [row.token_weight * scales[index // size] for index, row in enumerate(rows)]
        if self._exact_ratio:
            moved = self._sums(columns["logprobs"].detach() - columns["behaviour_logprobs"]).exp()
            weights = [weight * float(moved[place]) for weight, place in zip(weights, places, strict=True)]
        lengths = torch.tensor([row.response_len for row in rows])
        index = torch.cat([spans[place] for place in places])
        taught = columns["ref_logprobs"] - columns["old_logprobs"]
        logs = current.log_softmax(dim=-1)
        gaps = logs - policies.reference.log_softmax(dim=-1)
        output = self._loss(
            LossInputs(
                loss_mask=torch.cat([row.loss_mask for row in rows]),
                token_weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
                entropy=self._of_states(-(logs.exp() * logs).sum(dim=-1))[index],
                divergence=self._of_states((logs.exp() * gaps).sum(dim=-1))[index],
                advantages=self._advantages_of(steps, places, columns) + self._distils * taught[index],
                response_lens=lengths,
                fields={"chosen_tokens": torch.zeros(len(index), dtype=torch.bool)},
                **{name: column[index] for name, column in columns.items()},
            )
        )
        found: Tensor = torch.autograd.grad(output.loss, current)[0]
        return found

    # ----------------------------------------------------------------------- columns: tokens of all prompts' responses
    def _columns(self, logits: Tensor) -> Tensor:
        """Return logprobs of every token of every response, prompt after prompt."""
        return torch.cat([self._tree.logprobs(logits, each) for each in self._tree.responses], dim=1).flatten()

    def _of_states(self, values: Tensor) -> Tensor:
        """Return the (prompts, states) values at the states in which the tokens were chosen."""
        states = torch.tensor([state for response in self._tree.responses for state in response.states])
        return values[:, states].flatten()

    def _sums(self, column: Tensor) -> Tensor:
        lengths = torch.tensor([len(each.tokens) for each in self._tree.responses] * len(self._rewards))
        return torch.segment_reduce(column * self._mask, "sum", lengths=lengths).view(self._rewards.shape)

    def _tokens(self, place: _Place) -> Tensor:
        lengths = [len(each.tokens) for each in self._tree.responses]
        start = place[0] * sum(lengths) + sum(lengths[: place[1]])
        return torch.arange(start, start + lengths[place[1]])

    # ------------------------------------------------------------------------------------------------------- batches
    def _batches(self, behaviour: Tensor) -> Iterator[tuple[list[_Place], float]]:
        """Yield every batch with its probability; if groups without spread are replaced, among those that remain."""
        groups = [self._groups(prompt, each) for prompt, each in enumerate(self._sums(behaviour).exp().tolist())]
        for chosen in itertools.product(*groups):
            places = [(prompt, one) for prompt, (group, _) in enumerate(chosen) for one in group]
            yield places, math.prod(p for _, p in chosen)

    def _groups(self, prompt: int, probabilities: Sequence[float]) -> list[tuple[tuple[int, ...], float]]:
        made = []
        for group in itertools.product(range(len(probabilities)), repeat=self._samples):
            rewards = self._rewards[prompt, list(group)]
            if not self._drops or float(rewards.max() - rewards.min()) > self._algorithm.least_spread:
                made.append((group, math.prod(probabilities[one] for one in group)))
        total = sum(p for _, p in made)
        return [(group, p / total) for group, p in made]

    def _row(self, place: _Place, columns: Mapping[str, Tensor], greedy: int) -> ScoredTrajectory:
        response, prompt = self._tree.responses[place[1]], torch.zeros(1, dtype=torch.int64)
        row = ScoredTrajectory.unrewarded(str(place), prompt, torch.tensor(response.tokens))
        row.logprobs = columns["behaviour_logprobs"][self._tokens(place)]
        row.loss_mask, row.greedy_reward = torch.tensor(response.mask), float(self._rewards[place[0], greedy])
        row.reward_metadata["conversation"] = {"rewards": [float(self._first[place[0], response.tokens[0]])]}
        return row

    def _values(self, old: Tensor, penalties: Tensor) -> Tensor:
        """Return the values of an exact critic, like a column: the mean of what follows a state."""
        probabilities, totals = self._sums(old).exp(), self._rewards + penalties
        sums = torch.zeros(2, len(totals), OBSERVATION + 1, dtype=torch.float64)  # of returns, and of probabilities
        for index, response in enumerate(self._tree.responses):
            for place, state in enumerate(response.states):
                was_paid = OBSERVATION in response.states[:place]
                rest = totals[:, index] - was_paid * self._first[:, response.tokens[0]]
                sums[..., state] += probabilities[:, index] * torch.stack([rest, torch.ones_like(rest)])
        return self._of_states(sums[0] / sums[1])

    def _advantages_of(
        self, steps: Sequence[Sequence[ScoredTrajectory]], places: Sequence[_Place], columns: dict[str, Tensor]
    ) -> Tensor:
        """Return the advantages of every token. All batches together, unless they depend on the rest of their batch."""
        setting, rewards = self._algorithm.kl_reward, torch.stack([self._rewards[place] for place in places])
        totals, penalties = rewards, torch.zeros_like(self._rewards)
        if setting.coef:
            old, reference = columns["old_logprobs"], columns["ref_logprobs"]
            each, *_ = kl_penalty(old, reference, self._mask, torch.tensor([len(old)]), setting.coef, setting.estimator)
            penalties = self._sums(each)
            totals = rewards + torch.stack([penalties[place] for place in places])
        values = self._values(columns["old_logprobs"], penalties) if self._algorithm.needs_critic else None
        per_batch = self._algorithm.whiten or configured_estimator(self._algorithm.advantage.name).scope == "batch"
        found, start = [], 0
        for rows in steps if per_batch else [[row for step in steps for row in step]]:
            part = slice(start, start := start + len(rows))
            rollouts = [Rollout((row,)) for row in rows]
            pairs = zip(rows, places[part], strict=True)
            known = None if values is None else {row.sequence_id: values[self._tokens(place)] for row, place in pairs}
            made = self._advantages.of_rows(rollouts, rewards[part, None], totals[part], 1, known)
            found += [made[row.sequence_id].double().expand(row.response_len) for row in rows]
        return torch.cat(found)


def true_gradients(tree: Tree, rewards: Tensor, policies: Policies, samples: int) -> dict[Target, Tensor]:
    """Return the gradients of the true objectives, means over prompts, with respect to the current logits.

    Those of visited states are sums over a response. Which states are visited does not depend on the logits here: terms
    of a loss ignore that a token leads to other states. Samples of the likelihood come from ``policies.behaviour``.
    """
    current = policies.current.clone().requires_grad_()
    logs, references, samplers = (
        torch.stack([tree.logprobs(table, each)[:, each.mask].sum(dim=1) for each in tree.responses], dim=1)
        for table in (current, policies.reference, policies.behaviour)
    )
    own, others = current.log_softmax(dim=-1), policies.reference.log_softmax(dim=-1)
    visits = [[float(state in each.states) for state in range(OBSERVATION)] + [0.0] for each in tree.responses]
    probability, visited = logs.exp(), (logs.exp().detach() @ torch.tensor(visits).double())[..., None]
    groups = torch.tensor(list(itertools.product(range(len(tree.responses)), repeat=samples)))
    values: dict[Target, Tensor] = {
        "reward": probability * rewards,
        "best reward": probability[:, groups].prod(dim=2) * rewards[:, groups].amax(dim=2),
        "likelihood": samplers.exp() * logs,
        "KL of responses": probability * (logs - references),
        "KL": visited * own.exp() * (own - others),
        "forward KL": visited * others.exp() * (others - own),
        "entropy": -visited * own.exp() * own,
    }
    means = {name: value.sum() / len(rewards) for name, value in values.items()}
    return {name: torch.autograd.grad(mean, current, retain_graph=True)[0] for name, mean in means.items()}
