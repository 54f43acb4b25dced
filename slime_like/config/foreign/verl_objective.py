"""How the objective and the optimizer follow from settings of verl's PPO trainer."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from slime_like.config.foreign.given import Given, Rule
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.values import flag, natural, number, scalar, unless_null, whole

ACTOR = "actor_rollout_ref.actor"
OPTIMIZER = f"{ACTOR}.optim"

_ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_LOSS = f"{ACTOR}.policy_loss.loss_mode"
_REDUCTIONS = {"token-mean": "tokens", "seq-mean-token-mean": "samples"}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "low_var_kl", "low_var_kl": "low_var_kl"}
_STYLES = (f"{OPTIMIZER}.lr_scheduler_type", f"{OPTIMIZER}.lr_decay_style", f"{OPTIMIZER}.warmup_style")
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)


def _advantage(given: Given, imported: Imported) -> None:
    estimator = given.get("algorithm.adv_estimator", "gae")
    if estimator not in _ADVANTAGES:
        imported.decide(f"algorithm.adv_estimator={estimator}", "set algorithm.advantage; there is no critic here")
        given.unused(imported, "of grpo alone", "algorithm.norm_adv_by_std_in_grpo")
        return
    if estimator == "reinforce_plus_plus" and flag(given.get("algorithm.use_kl_in_reward", False)):
        why = "verl sums and whitens rewards, with the KL's, from each token on; set algorithm.advantage"
        imported.decide(f"algorithm.adv_estimator={estimator}, with algorithm.use_kl_in_reward", why)
        return
    with_std = flag(given.get("algorithm.norm_adv_by_std_in_grpo", True))
    name = "grpo_mean_only" if _ADVANTAGES[estimator] == "grpo" and not with_std else _ADVANTAGES[estimator]
    imported.set("algorithm.advantage", name, "algorithm.adv_estimator, norm_adv_by_std_in_grpo")


def _loss(given: Given, imported: Imported) -> None:
    mode = given.get(_LOSS, "vanilla")
    if mode in ("vanilla", "gspo"):
        imported.set("algorithm.loss", "gspo" if mode == "gspo" else "ppo_clip", _LOSS)
    else:
        imported.decide(f"{_LOSS}={mode}", "set algorithm.loss, and its bounds")


def _dual_clip(given: Given, imported: Imported) -> None:
    name = f"{ACTOR}.clip_ratio_c"
    if given.get(_LOSS, "vanilla") == "vanilla":
        imported.set("algorithm.dual_clip", number(given.get(name)), given.origin(name))
    else:
        given.unused(imported, f"{_LOSS} has no such bound", name)


def _reduction(given: Given, imported: Imported) -> None:
    reduction = given.get(f"{ACTOR}.loss_agg_mode", "token-mean")
    if given.get(_LOSS) == "gspo" and reduction != "seq-mean-token-mean":
        why = "versions of verl differ in whether gspo heeds it; set algorithm.reduction (samples, as GSPO's paper)"
        imported.decide(f"{ACTOR}.loss_agg_mode={reduction}", why)
    elif reduction in _REDUCTIONS:
        imported.set("algorithm.reduction", _REDUCTIONS[reduction], f"{ACTOR}.loss_agg_mode")
    else:
        imported.decide(f"{ACTOR}.loss_agg_mode={reduction}", "see algorithm.reduction, and constant_length")


def _clip(given: Given, imported: Imported) -> None:
    name = f"{ACTOR}.clip_ratio"
    if given.has(name) and not (given.has(f"{name}_low") and given.has(f"{name}_high")):
        why = "versions of verl differ in which bounds it sets; set algorithm.clip_low and algorithm.clip_high"
        imported.decide(f"{name}={given.get(name)}", why)
    else:
        given.unused(imported, f"{name}_low and {name}_high stand beside it", name)


def _kl(given: Given, imported: Imported, names: tuple[str, str, str], targets: tuple[str, str]) -> None:
    (switch, coefficient, kind), (target, estimator) = names, targets
    if not flag(given.get(switch, False)):
        given.unused(imported, f"{switch} is off", coefficient, kind)
        return
    value, name = given.get(coefficient), given.get(kind)
    if value is None:
        imported.decide(coefficient, f"{switch} is on; set {target}")
    else:
        imported.set(target, number(value), f"{switch}, {coefficient}")
    if name in _ESTIMATORS:
        imported.set(estimator, _ESTIMATORS[name], kind)
    else:
        imported.decide(kind if name is None else f"{kind}={name}", f"set {estimator}")


def _correction(given: Given, imported: Imported) -> None:
    """Importance weights of engine to trainer."""
    prefix = "algorithm.rollout_correction"
    level, veto = (
        unless_null(given.get(f"{prefix}.{name}")) for name in ("rollout_is", "rollout_token_veto_threshold")
    )
    others = (f"{prefix}.rollout_is_threshold", f"{prefix}.rollout_is_batch_normalize")
    if level is None and veto is None:
        given.unused(imported, f"{prefix}.rollout_is is null", *others)
        return
    if level not in ("token", "sequence"):
        imported.decide(f"{prefix}.rollout_is={level}, rollout_token_veto_threshold={veto}", "no counterpart is known")
        return
    imported.set("algorithm.importance_correction", "truncate", f"{prefix}.rollout_is")
    imported.set("algorithm.importance_level", level, f"{prefix}.rollout_is")
    imported.set("algorithm.importance_high", number(given.get(others[0]) or 2.0), others[0])
    if flag(given.get(others[1], False)):
        imported.set("algorithm.importance_normalize", True, others[1])
    if veto is not None:
        imported.set("algorithm.importance_veto", number(veto), f"{prefix}.rollout_token_veto_threshold")


def _rejection(given: Given, imported: Imported) -> None:
    prefix = "algorithm.rollout_correction.rollout_rs"
    bounds = [unless_null(given.get(f"{prefix}_threshold{end}")) for end in ("", "_lower")]
    rejection = unless_null(given.get(prefix))
    if rejection is None:
        given.unused(imported, f"{prefix} is null", f"{prefix}_threshold", f"{prefix}_threshold_lower")
        return
    shown = ", ".join(str(bound) for bound in bounds if bound is not None)
    why = "algorithm.importance_correction: mask also weighs what it keeps, by the ratio"
    imported.decide(f"{prefix}={rejection}{f' ({shown})' if shown else ''}", why)


def _earlier_correction(given: Given, imported: Imported) -> None:
    """The same as earlier versions of verl name it: weights need a threshold and ``rollout_is: true``."""
    prefix = "algorithm.rollout_is"
    names = [f"{prefix}_{end}" for end in ("threshold", "level", "mode", "threshold_lower", "veto_threshold")]
    high = unless_null(given.get(names[0]))
    if high is None or not flag(given.get(prefix, False)):
        given.unused(imported, f"{prefix} is off, or has no threshold", prefix, *names)
        return
    level, mode = given.get(names[1], "token"), given.get(names[2], "truncate")
    low, veto = (unless_null(given.get(name)) for name in names[3:])
    if mode not in ("truncate", "mask") or level not in ("token", "sequence", "geometric"):
        imported.decide(f"{prefix}_mode={mode}, {prefix}_level={level}", "set algorithm.importance_correction")
        return
    imported.set("algorithm.importance_correction", mode, f"{prefix}, {prefix}_mode")
    imported.set("algorithm.importance_level", level, f"{prefix}_level")
    imported.set("algorithm.importance_high", number(high), f"{prefix}_threshold")
    if mode == "mask":
        bound = number(low) if low is not None else 1 / number(high)
        origin = f"{prefix}_threshold_lower" + ", else 1 / threshold" * (low is None)
        imported.set("algorithm.importance_low", bound, origin)
    if veto is not None:
        imported.set("algorithm.importance_veto", number(veto), f"{prefix}_veto_threshold")


def _oldest_correction(given: Given, imported: Imported) -> None:
    """Weights of tokens, as verl first had them."""
    name = f"{ACTOR}.tis_imp_ratio_cap"
    if given.has(name) and number(given.get(name)) > 0:
        imported.set("algorithm.importance_correction", "truncate", name)
        imported.set("algorithm.importance_high", number(given.get(name)), name)


def _clip_grad(given: Given, imported: Imported) -> None:
    """The trainers read one of two settings; which one, depends on version and trainer."""
    names = (f"{ACTOR}.grad_clip", f"{OPTIMIZER}.clip_grad")
    bounds = {name: number(given.get(name)) for name in names if given.has(name)}
    if len(set(bounds.values())) == 1:
        imported.set("trainer.optimizer.clip_grad", next(iter(bounds.values())), ", ".join(bounds))
    elif bounds:
        shown = ", ".join(f"{name}={bound}" for name, bound in bounds.items())
        imported.decide(shown, "set trainer.optimizer.clip_grad")


def _overlong(given: Given, imported: Imported) -> None:
    for part in _OVERLONG:
        if not flag(given.get(f"{part}.enable", False)):
            given.unused(imported, f"{part}.enable is off", f"{part}.len", f"{part}.penalty_factor", f"{part}.log")
            continue
        given.unused(imported, "not used", f"{part}.log")
        imported.set("algorithm.overlong_buffer", whole(given.get(f"{part}.len")), f"{part}.len")
        origin = f"{part}.penalty_factor"
        imported.set("algorithm.overlong_factor", number(given.get(origin, 1.0)), origin)


def _rewards(given: Given, imported: Imported) -> None:
    managers = [given.get(f"{part}.reward_manager") for part in ("reward_model", "reward")]
    manager = "".join(f", reward_manager={name}" for name in managers if name is not None)
    for part in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = given.get(f"{part}.path"), given.get(f"{part}.name")
        if path is not None:
            why = "a function of prompt, response, answer in reward.functions; verl's has other arguments"
            imported.decide(f"{part}.path={path}, name={name}{manager}", why)
            return
    imported.decide(f"the reward of each data_source{manager}", "choose reward.functions")


def updates_of_a_step(given: Given) -> int | None:
    """Of one epoch; ``None`` where that is not in the file.

    Raises:
        ValueError: the batch is no multiple of the minibatch.
    """
    batch, size = given.get("data.train_batch_size"), given.get(f"{ACTOR}.ppo_mini_batch_size")
    if batch is None or size is None:
        return None
    if natural(batch) % natural(size):
        raise ValueError(f"{ACTOR}.ppo_mini_batch_size={size} does not divide data.train_batch_size={batch}")
    return natural(batch) // natural(size)


def _rate(given: Given, imported: Imported) -> None:
    name, ranks = f"{OPTIMIZER}.lr", ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank")
    rank = next((each for each in ranks if given.has(each) and whole(given.get(each)) > 0), None)
    if rank is not None:
        why = "all weights are trained here, for which a rate of adapters is too high; set trainer.optimizer.lr"
        imported.decide(
            f"{given.setting(rank)}, {given.setting(name)}" if given.has(name) else given.setting(rank), why
        )
        given.get(name)
    elif given.has(name):
        imported.set("trainer.optimizer.lr", number(given.get(name)), given.origin(name))


def _warm_up(given: Given, imported: Imported) -> None:
    """verl's schedule advances once in a training step, this project's with every update."""
    steps, ratio = given.get(f"{OPTIMIZER}.lr_warmup_steps"), given.get(f"{OPTIMIZER}.lr_warmup_steps_ratio")
    if steps is None or whole(steps) < 0:
        total = given.get("trainer.total_training_steps")
        if ratio is None or number(ratio) <= 0:
            return
        if total is None:
            why = "set trainer.optimizer.warmup_steps, a number of updates"
            imported.decide(f"{OPTIMIZER}.lr_warmup_steps_ratio={ratio}", why)
            return
        steps = int(number(ratio) * whole(total))
    updates, epochs = updates_of_a_step(given), whole(given.get(f"{ACTOR}.ppo_epochs", 1))
    if updates is None and whole(steps) > 0:
        why = "how many updates a step has is not known here; set trainer.optimizer.warmup_steps, a number of updates"
        imported.decide(f"{OPTIMIZER}.lr_warmup_steps={steps}", why)
    else:
        count = (updates or 1) * epochs
        origin = f"{OPTIMIZER}.lr_warmup_steps{'' if given.has(f'{OPTIMIZER}.lr_warmup_steps') else '_ratio'}"
        origin += f", {steps} steps, times the {count} updates of a step"
        imported.set("trainer.optimizer.warmup_steps", whole(steps) * count, origin)


def _decay(given: Given, imported: Imported) -> None:
    name = next(filter(given.has, _STYLES), None)
    if name is None:
        return
    style = given.get(name)
    given.unused(imported, f"{name} stands beside it", *(other for other in _STYLES if other != name))
    if style in ("constant", "cosine", "linear"):
        imported.set("trainer.optimizer.decay", style, name)
    else:
        imported.decide(f"{name}={style}", "set trainer.optimizer.decay to constant, linear or cosine")


def _betas(given: Given, imported: Imported) -> None:
    betas = scalar(given.get(f"{OPTIMIZER}.betas", [0.9, 0.999]))
    if not isinstance(betas, list) or len(betas) != 2:
        raise ValueError(betas)
    for number_of, beta in enumerate(betas, start=1):
        imported.set(f"trainer.optimizer.beta{number_of}", number(beta), f"{OPTIMIZER}.betas")


def _least_rate(given: Given, imported: Imported) -> None:
    least = given.get(f"{OPTIMIZER}.min_lr_ratio")
    if least is not None and number(least) > 0:
        rate = number(least) * number(given.get(f"{OPTIMIZER}.lr", 1e-6))
        imported.set("trainer.optimizer.min_lr", rate, f"{OPTIMIZER}.min_lr_ratio times lr")


_KL_LOSS = partial(
    _kl,
    names=(f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
    targets=("algorithm.kl_coef", "algorithm.kl_estimator"),
)
_KL_REWARD = partial(
    _kl,
    names=("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
    targets=("algorithm.kl_reward_coef", "algorithm.kl_reward_estimator"),
)
OBJECTIVE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "algorithm.advantage": _advantage,
        "algorithm.loss": _loss,
        "algorithm.reduction": _reduction,
        "algorithm.clip_low, clip_high": _clip,
        "algorithm.dual_clip": _dual_clip,
        "algorithm.kl_coef, kl_estimator": _KL_LOSS,
        "algorithm.kl_reward_coef, kl_reward_estimator": _KL_REWARD,
        "algorithm.importance_correction and its bounds": _correction,
        "algorithm.importance_correction: mask": _rejection,
        "algorithm.importance_correction and its bounds, as earlier": _earlier_correction,
        "algorithm.importance_correction, importance_high, of old versions": _oldest_correction,
        "trainer.optimizer.clip_grad": _clip_grad,
        "algorithm.overlong_buffer, overlong_factor": _overlong,
        "reward.functions": _rewards,
        "trainer.optimizer.warmup_steps": _warm_up,
        "trainer.optimizer.lr": _rate,
        "trainer.optimizer.decay": _decay,
        "trainer.optimizer.beta1, beta2": _betas,
        "trainer.optimizer.min_lr": _least_rate,
    }
)
"""By the fields here that a rule decides."""
