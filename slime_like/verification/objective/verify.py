"""Comparison of an objective's expected gradient with the true one, and the settings that cause a bias."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.promise import Promise, Target
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.part import Part
from slime_like.config.sections import DistillationConfig
from slime_like.orchestration.rollout.advantages import configured_estimator
from slime_like.verification.objective.expectation import UNBIASED, Enumeration, Policies, fit, true_gradients
from slime_like.verification.objective.promises import REWARDS, promises_of
from slime_like.verification.objective.trees import ACTIONS, Tree, one_turn, two_turns

ON_POLICY = "on-policy"

_UPHILL = 1e-12
"""Least scale that is more than rounding."""
_CAUSES = {"kl": "algorithm.kl.estimator={0.kl.estimator}", "entropy": "algorithm.entropy_coef"}
_LESS = 0.95
"""Share of a bias below which a replaced part was a cause of it."""

_ENGINE, _UPDATE, _STALE = 0.02, 0.1, 0.3
"""Standard deviations of the logits' differences: between engine and trainer, over an update, and over staleness."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How far the policies differ: the engine's from the trainer's at the start of the step, and that from now."""

    name: str
    engine: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of the objective in one scenario.

    Attributes:
        part: "reward", "kl", "entropy" or "distillation".
        scale: the factor of the true gradient that fits best; 0 or less if the objective does not follow it at all.
        bias: norm of the rest, relative to the fitted gradient.
        terms: bias that would remain if a setting were exact, by the setting, for each setting that adds to it.
        worse: custom code whose plain built-in counterpart has less bias.
    """

    scenario: str
    tree: str
    part: str
    scale: float
    bias: float
    terms: Mapping[str, float]
    worse: Sequence[str] = ()

    @property
    def is_unbiased(self) -> bool:
        return self.scale > _UPHILL and self.bias <= UNBIASED

    @property
    def is_wrong(self) -> bool:
        """True if the gradient does not point uphill, or custom code biases it. Biases of built-in parts are known."""
        return not self.scale > _UPHILL or (self.scenario == ON_POLICY and self.bias >= 1) or bool(self.worse)


def verify_objective(config: RunConfig) -> list[Finding]:
    """Enumerate the objective in every scenario that the run can meet."""
    algorithm = config.algorithm.model_copy(update={"minibatches": 1, "epochs": 1, "old_logprobs": "score"})
    tested = config.model_copy(update={"reward": REWARDS, "algorithm": algorithm})
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


def _findings(config: RunConfig, tree: Tree, scenario: Scenario, prompts: int, samples: int) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(0)

    def table(size: float) -> Tensor:
        return size * torch.randn(prompts, tree.states, ACTIONS, generator=generator, dtype=torch.float64)

    old = table(1.0)
    policies = Policies(old + table(scenario.engine), old, old + table(scenario.update), table(1.0))
    rewards = torch.rand(prompts, len(tree.responses), generator=generator, dtype=torch.float64)
    first = torch.rand(prompts, ACTIONS, generator=generator, dtype=torch.float64)
    rewards += first[:, [response.tokens[0] for response in tree.responses]]
    truth, promises = true_gradients(tree, rewards, policies, samples), promises_of(config.algorithm)
    earned = truth[_target(promises)] - config.algorithm.kl_reward.coef * truth["KL of responses"]

    def expected(changed: RunConfig, exact_ratio: bool = False) -> Tensor:
        return -Enumeration(changed, tree, rewards, first, samples, exact_ratio).gradient(policies)

    coefficients = {"kl": config.algorithm.kl.coef, "entropy": config.algorithm.entropy_coef}
    coefficients["distillation"] = config.distillation.coef
    alone = _without(config, *coefficients)
    reward = expected(alone)
    scale, bias = fit(reward, earned)
    terms = {}
    for term, changed, exact_ratio in _exact_terms(alone) if bias > UNBIASED else ():
        left = fit(expected(changed, exact_ratio), earned)[1]
        if left < bias - UNBIASED:
            terms[term] = left
    plain = _plain(alone.algorithm) if bias > UNBIASED else ()
    rests = {name: fit(expected(alone.model_copy(update=change)), earned)[1] for name, change in plain}
    worse = [name for name, rest in rests.items() if rest < _LESS * bias]
    ordered = dict(sorted(terms.items(), key=lambda one: one[1]))
    yield Finding(scenario.name, tree.name, "reward", scale, bias, ordered, worse)
    for part, coefficient in coefficients.items():
        if coefficient > 0:
            added = expected(_without(config, *(coefficients.keys() - {part}))) - reward
            sign, true = (1, truth["entropy"]) if part == "entropy" else (-1, truth["KL"])
            scale, bias = fit(sign * added, true)
            cause = _CAUSES.get(part, "").format(config.algorithm)
            terms = {cause: 0.0} if cause and bias > UNBIASED else {}
            worse = [*terms] if part == "kl" and promises["kl"] is None and scenario.name == ON_POLICY else []
            yield Finding(scenario.name, tree.name, part, scale / coefficient, bias, terms, worse)


def _target(promises: Mapping[str, Promise | None]) -> Target:
    """Return the objective that advantages are of."""
    promise = promises["advantage"]
    return promise.of if promise is not None and promise.of is not None else "reward"


def _without(config: RunConfig, *parts: str) -> RunConfig:
    algorithm = config.algorithm
    changes: dict[str, Any] = {}
    if "kl" in parts:
        changes["kl"] = algorithm.kl.model_copy(update={"coef": 0.0})
    if "entropy" in parts:
        changes["entropy_coef"] = 0.0
    update: dict[str, Any] = {"algorithm": algorithm.model_copy(update=changes)}
    return config.model_copy(
        update=update | ({"distillation": DistillationConfig()} if "distillation" in parts else {})
    )


def _plain(algorithm: AlgorithmConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part that declares no promise, and the change of the configuration to a plain built-in one."""
    promises = promises_of(algorithm)
    none = algorithm.importance.model_copy(update={"correction": "none"})
    for field, name, part in (
        ("loss", algorithm.loss.name, Part(name="policy_gradient")),
        ("advantage", algorithm.advantage.name, Part(name="rloo")),
        ("importance", algorithm.importance.correction, none),
    ):
        if promises.get(field, Promise()) is None:
            yield f"algorithm.{field}={name}", {"algorithm": algorithm.model_copy(update={field: part})}


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
    if _target(promises_of(algorithm)) == "reward":
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


def _percent(bias: float) -> str:
    return f"{100 * bias:.3g}%" if bias > UNBIASED else "0%"


def sentences(findings: Sequence[Finding]) -> Iterator[str]:
    for one in findings:
        where = f"{one.scenario}, {one.tree}: {one.part}"
        if not one.scale > _UPHILL:
            yield f"{where}: WRONG: the expected gradient does not point uphill (scale {one.scale:.3g})"
        elif one.is_unbiased:
            yield f"{where}: unbiased, {one.scale:.4g} times the true gradient"
        else:
            causes = ", ".join(f"{term} ({_percent(left)} if it were exact)" for term, left in one.terms.items())
            verdict = "WRONG: biased" if one.is_wrong else "biased"
            yield f"{where}: {verdict} by {_percent(one.bias)} of the gradient" + (f": {causes}" if causes else "")
