"""Comparison of an objective's expected gradient with the true one, and the settings that cause a bias."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.importance import CORRECTIONS, LEVELS
from slime_like.algorithms.losses.kl import KL_ESTIMATORS
from slime_like.algorithms.losses.loss import find_policy
from slime_like.algorithms.promise import Promise, promise_of
from slime_like.algorithms.reduction import build_reduction
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.base import Part
from slime_like.config.rollout import ENVIRONMENT, RewardConfig, RewardFunction
from slime_like.config.sections import DistillationConfig
from slime_like.orchestration.rollout.advantages import configured_estimator
from slime_like.plugins.resolve import resolve
from slime_like.verification.expectation import (
    ACTIONS,
    Enumeration,
    Policies,
    Tree,
    one_token,
    one_turn,
    true_gradients,
    two_turns,
)

UNBIASED = 1e-9
"""Largest relative deviation that is rounding."""

ON_POLICY = "on-policy"

_UPHILL = 1e-12
"""Least scale that is more than rounding."""
_CAUSES = {"kl": "algorithm.kl.estimator={0.kl.estimator}", "entropy": "algorithm.entropy_coef"}
_EXACT = {"loss": "policy_gradient", "advantage": "pass_through", "reduction": {"name": "constant", "length": 1}}
_REWARD = RewardConfig(functions=(RewardFunction(name=ENVIRONMENT),))
"""The enumeration has its own rewards."""

_ENGINE, _UPDATE, _STALE, _SMALL = 0.02, 0.1, 0.3, 1e-6
"""Standard deviations of the logits' differences: between engine and trainer, over an update, over staleness, and one
that is far above ``UNBIASED``, with a square far below."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Differences between the policies of a step, as standard deviations of logits.

    Attributes:
        engine: between the engine and the trainer at the start of the step.
        update: between the trainer at the start of the step and now.
    """

    name: str
    engine: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part of the objective in one scenario.

    Attributes:
        part: "reward", "kl", "entropy" or "distillation", or what a setting promises.
        scale: the factor of the true gradient that fits best; 0 or less if the objective does not follow it at all.
        bias: norm of the rest, relative to the fitted gradient.
        terms: bias that would remain if a setting were exact, by the setting, for each setting that adds to it.
        promised: the scale that a setting's documents state, without a bias; ``None`` for the whole objective.
    """

    scenario: str
    tree: str
    part: str
    scale: float
    bias: float
    terms: Mapping[str, float]
    promised: float | None = None

    @property
    def is_unbiased(self) -> bool:
        return self.scale > _UPHILL and self.bias <= UNBIASED

    @property
    def is_wrong(self) -> bool:
        """True if a promise is broken, or the whole gradient does not point uphill. Known biases are right."""
        if self.promised is not None:
            return not (self.is_unbiased and abs(self.scale - self.promised) <= UNBIASED * self.promised)
        return not self.scale > _UPHILL or (self.scenario == ON_POLICY and self.bias >= 1)


def verify_objective(config: RunConfig) -> list[PartResult]:
    """Enumerate the objective in every scenario that the run can meet."""
    algorithm = config.algorithm.model_copy(update={"minibatches": 1, "epochs": 1, "old_logprobs": "score"})
    tested = config.model_copy(update={"reward": _REWARD, "algorithm": algorithm})
    estimator, drops = configured_estimator(config.algorithm.advantage.name), config.rollout.drop_zero_spread
    # Two prompts, if samples of one of them change what the other one counts.
    per_batch = estimator.scope == "batch" or config.algorithm.whiten or drops
    talks = config.rollout.environment.name is not None or config.rollout.agent.is_set
    trees = [one_turn(per_batch), two_turns(per_batch)] if talks else [one_turn(per_batch)]
    shape = (2, 2) if per_batch else (1, 3)
    return [
        finding
        for scenario in scenarios(config.algorithm, config.rollout.max_staleness)
        for tree in trees
        for finding in _findings(tested, tree, scenario, *shape)
    ]


def scenarios(algorithm: AlgorithmConfig, max_staleness: int) -> list[Scenario]:
    """Return on-policy sampling, an engine that computes slightly differently, later updates and staleness."""
    found = [Scenario(ON_POLICY), Scenario("engine rounds", engine=_ENGINE)]
    if algorithm.epochs * algorithm.minibatches > 1:
        found.append(Scenario("later update", update=_UPDATE))
    if max_staleness > 0:
        found.append(Scenario("stale samples", engine=_STALE))
    return found


def _findings(config: RunConfig, tree: Tree, scenario: Scenario, prompts: int, samples: int) -> Iterator[PartResult]:
    policies, rewards, first = _problem(tree, scenario, prompts)
    truth = true_gradients(tree, rewards, policies, samples)
    of = configured_estimator(config.algorithm.advantage.name).promise.of or "reward"
    earned = truth[of] - config.algorithm.kl_reward.coef * truth["KL of responses"]

    def expected(changed: RunConfig, exact_ratio: bool = False) -> Tensor:
        return -Enumeration(changed, tree, rewards, first, samples, exact_ratio).gradient(policies)

    coefficients = {"kl": config.algorithm.kl.coef, "entropy": config.algorithm.entropy_coef}
    coefficients["distillation"] = config.distillation.coef
    alone = _without(config, *coefficients)
    reward = expected(alone)
    scale, bias = _fit(reward, earned)
    terms = {}
    for term, changed, exact_ratio in _exact_terms(alone) if bias > UNBIASED else ():
        left = _fit(expected(changed, exact_ratio), earned)[1]
        if left < bias - UNBIASED:
            terms[term] = left
    terms = dict(sorted(terms.items(), key=lambda one: one[1]))
    yield PartResult(scenario.name, tree.name, "reward", scale, bias, terms)
    for part, coefficient in coefficients.items():
        if coefficient > 0:
            added = expected(_without(config, *(coefficients.keys() - {part}))) - reward
            sign, true = (1, truth["entropy"]) if part == "entropy" else (-1, truth["KL"])
            scale, bias = _fit(sign * added, true)
            cause = _CAUSES.get(part, "").format(config.algorithm)
            terms = {cause: 0.0} if cause and bias > UNBIASED else {}
            yield PartResult(scenario.name, tree.name, part, scale / coefficient, bias, terms)


def _problem(tree: Tree, scenario: Scenario, prompts: int) -> tuple[Policies, Tensor, Tensor]:
    """Return random policies, and the rewards of responses and of first turns, of which they are sums."""
    generator = torch.Generator().manual_seed(0)

    def table(size: float) -> Tensor:
        chosen = size * torch.randn(prompts, ACTIONS, ACTIONS, generator=generator, dtype=torch.float64)
        return torch.cat([chosen, chosen[:, :1].flip(-1)], dim=1)  # observations have a row, too

    old = table(1.0)
    policies = Policies(old + table(scenario.engine), old, old + table(scenario.update), table(1.0))
    rewards = torch.rand(prompts, len(tree.responses), generator=generator, dtype=torch.float64)
    first = torch.rand(prompts, ACTIONS, generator=generator, dtype=torch.float64)
    return policies, rewards + first[:, [response.tokens[0] for response in tree.responses]], first


def _fit(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the scale c that fits ``found`` to ``c * truth`` best, and the norm of the rest relative to the fit."""
    scale = float((found * truth).sum() / (truth * truth).sum())
    rest = float((found - scale * truth).norm())
    return scale, rest / max(abs(scale) * float(truth.norm()), torch.finfo(torch.float64).tiny)


def _without(config: RunConfig, *parts: str) -> RunConfig:
    algorithm, teacher = config.algorithm, DistillationConfig() if "distillation" in parts else config.distillation
    kl = algorithm.kl.model_copy(update={"coef": 0.0}) if "kl" in parts else algorithm.kl
    entropy = 0.0 if "entropy" in parts else algorithm.entropy_coef
    changed = algorithm.model_copy(update={"kl": kl, "entropy_coef": entropy})
    return config.model_copy(update={"algorithm": changed, "distillation": teacher})


def _exact_terms(config: RunConfig) -> Iterator[tuple[str, RunConfig, bool]]:
    """Yield each setting that may bias the gradient, the configuration with an exact one, and whether its loss then
    weighs by the exact ratio of whole responses."""
    algorithm = config.algorithm

    def changed(**settings: Any) -> RunConfig:
        return config.model_copy(update={"algorithm": algorithm.model_copy(update=settings)})

    none = algorithm.importance.model_copy(update={"correction": "none"})
    exact = algorithm.importance.model_copy(
        update={"correction": "mask", "level": "sequence", "low": 0.0, "high": 1e300}
    )
    yield f"algorithm.loss={algorithm.loss}", changed(loss=Part(name="policy_gradient"), importance=none), True
    if configured_estimator(algorithm.advantage.name).promise.of in ("reward", None):
        yield f"algorithm.advantage={algorithm.advantage}", changed(advantage=Part(name="rloo")), False
    if algorithm.reduction.name != "constant":
        length = Part(name="constant", length=1)
        yield f"algorithm.reduction={algorithm.reduction}", changed(reduction=length), False
    yield f"algorithm.importance.correction={algorithm.importance.correction}", changed(importance=exact), False
    if algorithm.rejection.is_set:
        kept = algorithm.rejection.model_copy(update={"estimator": "none"})
        yield f"algorithm.rejection.estimator={algorithm.rejection.estimator}", changed(rejection=kept), False
    if algorithm.off_policy_mask is not None:
        yield f"algorithm.off_policy_mask={algorithm.off_policy_mask:g}", changed(off_policy_mask=None), False
    if algorithm.whiten:
        yield "algorithm.whiten=true", changed(whiten=False), False
    if config.rollout.drop_zero_spread:
        rollout = config.rollout.model_copy(update={"drop_zero_spread": False})
        yield "rollout.drop_zero_spread=true", config.model_copy(update={"rollout": rollout}), False


def verify_parts(config: RunConfig) -> Iterator[PartResult]:
    """Enumerate every part that promises something next to exact other parts, and compare it with its promise."""
    algorithm, importance, reduction = config.algorithm, config.algorithm.importance, config.algorithm.reduction
    # A built-in part makes its promise for default options.
    loss, advantage = (one if ":" in one.name else Part(name=one.name) for one in (algorithm.loss, algorithm.advantage))
    check, promise = partial(_checked, config), promise_of(find_policy(loss.name))
    yield from check(f"loss={loss}", promise, {"loss": loss})
    if promise.follows:
        yield from check(f"loss={loss}, moved by {_SMALL}", replace(promise, exact=False), {"loss": loss}, gap="update")
    promise = promise_of(build_reduction(reduction.name, **reduction.options))
    yield from check(f"reduction={reduction}", promise, {"reduction": reduction})
    if config.supervised:
        return
    yield from check(f"advantage={advantage}", configured_estimator(advantage.name).promise, {"advantage": advantage})
    name, level = importance.correction, promise_of(LEVELS[importance.level])
    if promise_of(resolve("correction", name, {"none": None, **CORRECTIONS})).of:
        plain = {"importance": {"correction": name, "level": importance.level}}
        yield from check(f"importance.correction={name}, off by {_SMALL}", level, plain, gap="engine")
    for name, kl in (("kl", algorithm.kl), ("kl_reward", algorithm.kl_reward)):
        promise = promise_of(resolve("KL estimator", kl.estimator, KL_ESTIMATORS))
        of = promise.weighted if algorithm.kl.importance_weighted else promise.of
        of = promise.rewarded if kl is not algorithm.kl else "KL" if algorithm.kl.straight_through else of
        yield from check(f"{name}.estimator={kl.estimator}", replace(promise, of=of), {name: kl}, kl.coef)
    coefficient = algorithm.entropy_coef
    yield from check("entropy_coef", Promise("entropy"), {"entropy_coef": coefficient}, coefficient)


def _checked(
    config: RunConfig, part: str, promise: Promise, settings: dict[str, Any], coefficient: float = 1.0, gap: str = ""
) -> Iterator[PartResult]:
    """Yield the finding of a part that is on and promises something. ``gap``: attribute of ``Scenario`` to be small."""
    if promise.of is None or not coefficient:
        return
    tree, samples = (two_turns(small=True), 3) if promise.exact else (one_token(), 2)
    gaps = {"engine": _STALE} if promise.of == "likelihood" else {gap: _SMALL} if gap else {}
    policies, rewards, first = _problem(tree, Scenario(part, **gaps), 1)
    rewards = rewards - 1 if promise.exact else torch.tensor([[0.5, -0.5, 0.5]], dtype=torch.float64)  # of both signs
    if promise.of not in ("reward", "best reward"):
        rewards, first = 0 * rewards, 0 * first
    update = {"algorithm": AlgorithmConfig(**{**_EXACT, **settings}), "reward": _REWARD}
    run = RunConfig(run_dir=config.run_dir, model=config.model).model_copy(update=update)
    found = Enumeration(run, tree, rewards, first, samples).gradient(policies)
    sign = 1 if promise.of in ("KL", "forward KL", "KL of responses") else -1
    scale, bias = _fit(sign * found, true_gradients(tree, rewards, policies, samples)[promise.of])
    yield PartResult(f"algorithm.{part}", tree.name, promise.of, scale, bias, {}, coefficient * promise.scale(samples))


def _percent(bias: float) -> str:
    return f"{100 * bias:.3g}%" if bias > UNBIASED else "0%"


def sentences(findings: Sequence[PartResult]) -> Iterator[str]:
    for one in findings:
        where = f"{one.scenario}, {one.tree}: {one.part}"
        if one.promised is not None:
            wrong = f"biased by {_percent(one.bias)}: WRONG: documented are {one.promised:.4g} times, without a bias"
            found = f"{one.scenario}: {one.scale:.4g} times the gradient of the {one.part}"
            yield f"{found}, {wrong if one.is_wrong else 'as documented'}"
        elif not one.scale > _UPHILL:
            yield f"{where}: WRONG: the expected gradient does not point uphill (scale {one.scale:.3g})"
        elif one.is_unbiased:
            yield f"{where}: unbiased, {one.scale:.4g} times the true gradient"
        else:
            causes = ", ".join(f"{term} ({_percent(left)} if it were exact)" for term, left in one.terms.items())
            verdict = "WRONG: biased" if one.is_wrong else "biased"
            yield f"{where}: {verdict} by {_percent(one.bias)} of the gradient" + (f": {causes}" if causes else "")
