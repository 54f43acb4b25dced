"""Objective and optimizer of verl's PPO trainer."""

from typing import Any

from slime_like.config.foreign.imported import Given, Imported, flag, number, scalar, whole

ACTOR = "actor_rollout_ref.actor"

_ADVANTAGES = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_REDUCTIONS = {"token-mean": "tokens", "seq-mean-token-mean": "samples"}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl"}


def read_objective(given: Given, imported: Imported) -> None:
    estimator = given.take("algorithm.adv_estimator", "gae")
    if estimator in _ADVANTAGES:
        with_std = flag(given.take("algorithm.norm_adv_by_std_in_grpo", True))
        name = "grpo_mean_only" if estimator == "grpo" and not with_std else _ADVANTAGES[estimator]
        imported.set("algorithm.advantage", name, "algorithm.adv_estimator, norm_adv_by_std_in_grpo")
    else:
        imported.decide(f"algorithm.adv_estimator={estimator}", "needs a critic, or is not supported")
    mode = given.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in ("vanilla", "gspo"):
        imported.set("algorithm.loss", "gspo" if mode == "gspo" else "ppo_clip", f"{ACTOR}.policy_loss.loss_mode")
    else:
        imported.decide(f"{ACTOR}.policy_loss.loss_mode={mode}", "not supported")
    reduction = given.take(f"{ACTOR}.loss_agg_mode", "token-mean")
    if reduction in _REDUCTIONS:
        imported.set("algorithm.reduction", _REDUCTIONS[reduction], f"{ACTOR}.loss_agg_mode")
    else:
        imported.decide(f"{ACTOR}.loss_agg_mode={reduction}", "see algorithm.reduction, and constant_length")
    if given.has(f"{ACTOR}.clip_ratio"):
        value = given.take(f"{ACTOR}.clip_ratio")
        if not given.has(f"{ACTOR}.clip_ratio_low") or not given.has(f"{ACTOR}.clip_ratio_high"):
            why = "versions of verl differ in which bounds it sets; set algorithm.clip_low and algorithm.clip_high"
            imported.decide(f"{ACTOR}.clip_ratio={value}", why)
    _kl(given, imported)


def _kl(given: Given, imported: Imported) -> None:
    for switch, coefficient, kind, target, estimator in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "kl_coef", "kl_estimator"),
        (
            "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl_reward_coef",
            "kl_reward_estimator",
        ),
    ):  # fmt: skip
        is_on, value, name = flag(given.take(switch, False)), given.take(coefficient), given.take(kind)
        if not is_on:
            unused = {coefficient: value, kind: name}
            imported.needless |= {
                f"{key}={each}": f"{switch} is off" for key, each in unused.items() if each is not None
            }
            continue
        if value is None:
            imported.decide(coefficient, f"{switch} is on; set algorithm.{target}")
        else:
            imported.set(f"algorithm.{target}", number(value), f"{switch}, {coefficient}")
        if name in _ESTIMATORS:
            imported.set(f"algorithm.{estimator}", _ESTIMATORS[name], kind)
        elif name is not None:
            imported.decide(f"{kind}={name}", f"set algorithm.{estimator}")


def read_correction(given: Given, imported: Imported) -> None:
    """Importance weights of engine to trainer."""
    prefix = "algorithm.rollout_correction"
    names = ("rollout_is", "rollout_rs", "rollout_is_threshold", "rollout_token_veto_threshold")
    level, rejection, high, veto = (_unless_null(given.take(f"{prefix}.{name}")) for name in names)
    bounds = [_unless_null(given.take(f"{prefix}.rollout_rs_threshold{end}")) for end in ("", "_lower")]
    is_normalized = flag(given.take(f"{prefix}.rollout_is_batch_normalize", False))
    if rejection is not None:
        shown = ", ".join(str(bound) for bound in bounds if bound is not None)
        why = "algorithm.importance_correction: mask also weighs what it keeps, by the ratio"
        imported.decide(f"{prefix}.rollout_rs={rejection}{f' ({shown})' if shown else ''}", why)
    if level in ("token", "sequence"):
        imported.set("algorithm.importance_correction", "truncate", f"{prefix}.rollout_is")
        imported.set("algorithm.importance_level", level, f"{prefix}.rollout_is")
        imported.set("algorithm.importance_high", number(high or 2.0), f"{prefix}.rollout_is_threshold")
        if is_normalized:
            imported.set("algorithm.importance_normalize", True, f"{prefix}.rollout_is_batch_normalize")
        if veto is not None:
            imported.set("algorithm.importance_veto", number(veto), f"{prefix}.rollout_token_veto_threshold")
    elif level is not None or veto is not None:
        imported.decide(f"{prefix}.rollout_is={level}, rollout_token_veto_threshold={veto}", "no counterpart is known")
    _earlier_correction(given, imported)


def _earlier_correction(given: Given, imported: Imported) -> None:
    """The same as earlier versions of verl name it: weights need a threshold and ``rollout_is: true``."""
    prefix = "algorithm.rollout_is"
    high, is_on = _unless_null(given.take(f"{prefix}_threshold")), flag(given.take(prefix, False))
    level, mode = given.take(f"{prefix}_level", "token"), given.take(f"{prefix}_mode", "truncate")
    low, veto = (_unless_null(given.take(f"{prefix}_{name}")) for name in ("threshold_lower", "veto_threshold"))
    if not is_on or high is None:
        return
    if mode not in ("truncate", "mask") or level not in ("token", "sequence", "geometric"):
        imported.decide(f"{prefix}_mode={mode}, {prefix}_level={level}", "set algorithm.importance_correction")
        return
    imported.set("algorithm.importance_correction", mode, f"{prefix}, {prefix}_mode")
    imported.set("algorithm.importance_level", level, f"{prefix}_level")
    imported.set("algorithm.importance_high", number(high), f"{prefix}_threshold")
    if mode == "mask":
        bound = number(low) if low is not None else 1 / number(high)
        imported.set(
            "algorithm.importance_low", bound, f"{prefix}_threshold_lower" + ", else 1 / threshold" * (low is None)
        )
    if veto is not None:
        imported.set("algorithm.importance_veto", number(veto), f"{prefix}_veto_threshold")


def _unless_null(value: Any) -> Any:
    return None if value in ("null", "None", "none", "") else value


def read_rewards(given: Given, imported: Imported) -> None:
    for part in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        is_on = flag(given.take(f"{part}.enable", False))
        length, factor = given.take(f"{part}.len"), given.take(f"{part}.penalty_factor")
        given.take(f"{part}.log")
        if is_on and length is not None:
            imported.set("algorithm.overlong_buffer", whole(length), f"{part}.len")
            origin = f"{part}.penalty_factor"
            imported.set("algorithm.overlong_factor", number(factor if factor is not None else 1.0), origin)
    path, name = given.take("custom_reward_function.path"), given.take("custom_reward_function.name")
    given_manager = given.take("reward_model.reward_manager")
    manager = f", reward_manager={given_manager}" if given_manager is not None else ""
    if path is not None:
        why = "a function of prompt, response, answer in reward.functions; verl's has other arguments"
        imported.decide(f"custom_reward_function.path={path}, name={name}{manager}", why)
    else:
        imported.decide(f"the reward of each data_source{manager}", "choose reward.functions")


def read_optimizer(given: Given, imported: Imported) -> None:
    prefix = f"{ACTOR}.optim"
    steps = given.take(f"{prefix}.lr_warmup_steps")
    ratio = given.take(f"{prefix}.lr_warmup_steps_ratio")
    updates = imported.values.get("algorithm.minibatches", (None,))[0]
    epochs = whole(given.known(f"{ACTOR}.ppo_epochs", 1))
    if steps is not None and whole(steps) > 0 and updates is None:
        why = "trainer.optimizer.warmup_steps counts updates, and how many a step has is not known here"
        imported.decide(f"{prefix}.lr_warmup_steps={steps}", why)
    elif steps is not None and whole(steps) >= 0:
        # verl's schedule advances once in a training step, this project's with every update.
        origin = f"{prefix}.lr_warmup_steps" + (f" times the {(updates or 1) * epochs} updates of a step")
        imported.set("trainer.optimizer.warmup_steps", whole(steps) * (updates or 1) * epochs, origin)
    elif ratio is not None and number(ratio) > 0:
        imported.decide(f"{prefix}.lr_warmup_steps_ratio={ratio}", "set trainer.optimizer.warmup_steps")
    style = given.take(f"{prefix}.lr_scheduler_type", given.take(f"{prefix}.warmup_style"))
    if style in ("constant", "cosine"):
        imported.set("trainer.optimizer.decay", style, f"{prefix}.warmup_style")
    elif style is not None:
        imported.decide(f"{prefix}.lr_scheduler_type={style}", "use constant, linear or cosine")
    betas = scalar(given.take(f"{prefix}.betas", [0.9, 0.999]))
    if isinstance(betas, list) and len(betas) == 2:
        imported.set("trainer.optimizer.beta1", number(betas[0]), f"{prefix}.betas")
        imported.set("trainer.optimizer.beta2", number(betas[1]), f"{prefix}.betas")
    lr, least = given.known(f"{prefix}.lr", None), given.take(f"{prefix}.min_lr_ratio")
    if lr is not None and least is not None and number(least) > 0:
        imported.set("trainer.optimizer.min_lr", number(least) * number(lr), f"{prefix}.min_lr_ratio times lr")
