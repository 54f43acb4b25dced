"""Comparison of every configured part of an objective with what it promises, next to exact other parts."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.importance import CORRECTIONS, LEVELS
from slime_like.algorithms.losses.kl import KL_ESTIMATORS
from slime_like.algorithms.losses.loss import find_policy
from slime_like.algorithms.promise import Promise
from slime_like.algorithms.reduction import build_reduction
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.algorithm import ImportanceConfig
from slime_like.config.part import Part
from slime_like.config.rollout import ENVIRONMENT, RewardConfig, RewardFunction
from slime_like.orchestration.rollout.advantages import configured_estimator
from slime_like.plugins.resolve import resolve_callable
from slime_like.verification.objective.expectation import UNBIASED, Enumeration, Policies, fit, true_gradients
from slime_like.verification.objective.trees import ACTIONS, one_token, two_turns

_SMALL, _FAR = 1e-6, 0.3
"""Standard deviations of differences of logits. The small one is far above ``UNBIASED``, and its square far below."""
_EXACT = {"loss": "policy_gradient", "advantage": "pass_through", "reduction": {"name": "constant", "length": 1}}
REWARDS = RewardConfig(functions=(RewardFunction(name=ENVIRONMENT),))
"""The enumeration has its own rewards."""


@dataclass(frozen=True, slots=True)
class Check:
    """A part of the objective, its settings next to exact others, and its promise, times the coefficient.

    ``engine``, ``update``: how far the engine's policy, and the one after an update, are from the old one.
    """

    part: str
    promise: Promise | None
    settings: dict[str, Any]
    coefficient: float = 1.0
    engine: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The promised multiple of a true gradient, the one that fits the part best, and the relative rest."""

    part: str
    target: str
    promised: float
    scale: float
    bias: float

    @property
    def is_wrong(self) -> bool:
        return not (self.bias <= UNBIASED and abs(self.scale - self.promised) <= UNBIASED * abs(self.promised))

    def __str__(self) -> str:
        found = f"{self.scale:.4g} times the gradient of the {self.target}"
        if not self.is_wrong:
            return f"{self.part}: {found}, as documented"
        return (
            f"{self.part}: WRONG: {found}, biased by {100 * self.bias:.3g}%; documented: {self.promised:.4g} times, 0%"
        )


def promises_of(algorithm: AlgorithmConfig) -> dict[str, Promise | None]:
    """Return what each part promises, by its field of ``algorithm``; ``None`` if it declares nothing."""
    correction, reduction = algorithm.importance.correction, algorithm.reduction
    parts: dict[str, object] = {
        "loss": find_policy(algorithm.loss.name),
        "advantage": configured_estimator(algorithm.advantage.name),
        "reduction": build_reduction(reduction.name, **reduction.options),
        "kl": resolve_callable("KL estimator", algorithm.kl.estimator, KL_ESTIMATORS),
        "kl_reward": KL_ESTIMATORS[algorithm.kl_reward.estimator],
    }
    if algorithm.importance.is_set:
        parts["importance"] = resolve_callable("importance correction", correction, CORRECTIONS)
    return {field: getattr(part, "promise", None) for field, part in parts.items()}


def _checks(algorithm: AlgorithmConfig) -> Iterator[Check]:
    """Yield the checks of all parts that the run uses."""
    promises, kl, kl_reward, importance = (
        promises_of(algorithm),
        algorithm.kl,
        algorithm.kl_reward,
        algorithm.importance,
    )
    loss, policy = (
        f"algorithm.loss={algorithm.loss}",
        {"loss": _defaults(find_policy(algorithm.loss.name), algorithm.loss)},
    )
    sampled = promises["loss"]
    yield Check(loss, sampled, policy, engine=_FAR if sampled and sampled.of == "likelihood" else 0.0)
    if sampled and sampled.follows:
        yield Check(f"{loss} after an update", replace(sampled, exact=False), policy, update=_SMALL)
    reduction = {"reduction": algorithm.reduction}
    yield Check(f"algorithm.reduction={algorithm.reduction}", promises["reduction"], reduction)
    if algorithm.supervised:
        return
    advantage = _defaults(configured_estimator(algorithm.advantage.name).compute, algorithm.advantage)
    yield Check(f"algorithm.advantage={advantage}", promises["advantage"], {"advantage": advantage})
    if promises.get("importance"):
        settings = {"importance": ImportanceConfig(correction=importance.correction, level=importance.level)}
        level = getattr(LEVELS[importance.level], "promise", None)
        yield Check(f"algorithm.importance.correction={importance.correction}", level, settings, engine=_SMALL)
    promise = Promise("KL") if kl.straight_through else promises["kl"]
    if promise and kl.importance_weighted:
        promise = replace(promise, of=promise.weighted)
    if kl.coef and promise and promise.of != "KL of responses":
        yield Check(f"algorithm.kl.estimator={kl.estimator}", promise, {"kl": kl}, kl.coef)
    promise = promises["kl_reward"]
    if kl_reward.coef and promise and promise.of == "KL of responses":
        yield Check(
            f"algorithm.kl_reward.estimator={kl_reward.estimator}", promise, {"kl_reward": kl_reward}, kl_reward.coef
        )
    if coefficient := algorithm.entropy_coef:
        yield Check("algorithm.entropy_coef", Promise("entropy"), {"entropy_coef": coefficient}, coefficient)


def _defaults(made: Callable[..., object], part: Part) -> Part:
    """Return the part with default options, for which it makes its promise, and those without a default."""
    known = inspect.signature(made).parameters
    kept = {name: value for name, value in part.options.items() if known[name].default is inspect.Parameter.empty}
    return Part(name=part.name, **kept)


def verify_promises(config: RunConfig) -> list[Verdict]:
    """Enumerate each part that promises something, and compare it with its promise."""
    run = RunConfig(run_dir=config.run_dir, model=config.model)
    return [_verdict(run, each, each.promise) for each in _checks(config.algorithm) if each.promise and each.promise.of]


def _verdict(run: RunConfig, check: Check, promise: Promise) -> Verdict:
    algorithm = AlgorithmConfig(**{**_EXACT, "old_logprobs": "score", **check.settings})
    tree, samples = (two_turns(small=True), 3) if promise.exact else (one_token(), 2)
    generator = torch.Generator().manual_seed(0)

    def table(size: float) -> Tensor:
        return size * torch.randn(1, tree.states, ACTIONS, generator=generator, dtype=torch.float64)

    old = table(1.0)
    policies = Policies(old + table(check.engine), old, old + table(check.update), old + table(_FAR))
    first = torch.rand(1, ACTIONS, generator=generator, dtype=torch.float64)
    rewards = torch.rand(1, len(tree.responses), generator=generator, dtype=torch.float64)
    if not promise.exact:
        rewards = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    if promise.of not in ("reward", "best reward"):
        rewards, first = 0 * rewards, 0 * first
    found = Enumeration(
        run.model_copy(update={"algorithm": algorithm, "reward": REWARDS}), tree, rewards, first, samples
    ).gradient(policies)
    penalty = promise.of in ("KL", "forward KL", "KL of responses")
    scale, bias = fit(found if penalty else -found, true_gradients(tree, rewards, policies, samples)[promise.of])
    return Verdict(check.part, promise.of, check.coefficient * promise.scale(samples), scale, bias)
