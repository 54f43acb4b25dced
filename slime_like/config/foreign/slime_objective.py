"""How data, the objective and the optimizer follow from settings of slime, where one is not simply another."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from slime_like.config.foreign.given import Given, Rule
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.values import number, text, texts, whole

WITHOUT_VALUE = frozenset(
    (
        *("apply-chat-template", "rollout-shuffle", "use-kl-loss", "use-tis", "calculate-per-token-loss"),
        *(
            "normalize-advantages",
            "disable-grpo-std-normalization",
            "disable-rewards-normalization",
            "gradient-checkpointing",
        ),
    )
)
"""Switches that the rules read."""
_SLICE = re.compile(r"@\[[^]]*\]$")
_KL_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl"}
_ADVANTAGES = {
    "grpo": "grpo",
    "gspo": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def is_supervised(given: Given) -> bool:
    """Whether it fine-tunes on demonstrations, without engines and rewards."""
    return bool(given.get("loss-type") == "sft_loss")


def _chat_template(given: Given, imported: Imported) -> None:
    if is_supervised(given):  # conversations
        given.unused(imported, "--loss-type sft_loss", "apply-chat-template")
    else:
        _is_on(given, imported, "apply-chat-template", "data.apply_chat_template")


def _row_keys(given: Given, imported: Imported) -> None:
    prompt = text(given.get("input-key", "input"))
    if is_supervised(given):
        imported.set("data.messages_key", prompt, "--input-key")
        given.unused(imported, "--loss-type sft_loss", "label-key")
        return
    imported.set("data.prompt_key", prompt, "--input-key")
    if given.has("label-key"):
        imported.set("data.answer_key", text(given.get("label-key")), "--label-key")
    else:
        imported.decide("data.answer_key", "--label-key is not given, and rows need an answer here")


def _response_length(given: Given, imported: Imported) -> None:
    if not (given.has("rollout-max-response-len") or is_supervised(given)):
        imported.decide("rollout.max_new_tokens", "--rollout-max-response-len is not given")


def _shuffle(given: Given, imported: Imported) -> None:
    _is_on(given, imported, "rollout-shuffle", "data.shuffle")


def _is_on(given: Given, imported: Imported, name: str, target: str) -> None:
    is_on = given.note(name)
    imported.set(target, is_on, f"--{name}" if is_on else f"without --{name}")


def _prompt_length(given: Given, imported: Imported) -> None:
    if not given.has("rollout-max-prompt-len"):
        imported.decide("data.max_prompt_tokens", "--rollout-max-prompt-len is not given")


def _training_data(given: Given, imported: Imported) -> None:
    if given.has("prompt-data"):
        _set_files(given, imported, "prompt-data", "data.train", texts(given.get("prompt-data")))


def _held_out(given: Given, imported: Imported) -> None:
    if given.has("eval-config"):
        why = "this file names the held-out data; set evaluation.files and what it has for each"
        imported.decide(given.setting("eval-config"), why)
        given.get("eval-config")
        given.unused(imported, "--eval-config counts", "eval-prompt-data")
        return
    pairs = given.get("eval-prompt-data", "").split()
    if len(pairs) % 2:
        imported.decide(given.setting("eval-prompt-data"), "expected pairs of a name and a path")
    elif pairs:
        _set_files(given, imported, "eval-prompt-data", "evaluation.files", pairs[1::2])


def _set_files(given: Given, imported: Imported, name: str, target: str, paths: list[str]) -> None:
    if any(map(_SLICE.search, paths)):
        imported.decide(given.setting(name), f"rows of a file are not chosen here; write them to one for {target}")
    else:
        imported.set(target, paths, f"--{name}")


def _evaluation_temperature(given: Given, imported: Imported) -> None:
    bounds = [name for name in ("eval-top-p", "eval-top-k") if given.has(name)]
    if "eval-top-p" in bounds and number(given.get("eval-top-p")) == 1:
        bounds.remove("eval-top-p")
        given.unused(imported, "the whole distribution", "eval-top-p")
    for name in bounds:
        given.get(name)
        imported.decide(given.setting(name), "evaluations draw from the whole distribution, or are greedy")
    if given.get("eval-top-k") == "1":
        imported.set("evaluation.temperature", 0.0, "--eval-top-k 1")
        given.unused(imported, "--eval-top-k 1", "eval-temperature")
        return
    if given.has("eval-temperature"):
        imported.set("evaluation.temperature", number(given.get("eval-temperature")), "--eval-temperature")
    elif given.has("eval-prompt-data"):
        origin = "--rollout-temperature, in evaluations too"
        imported.set("evaluation.temperature", number(given.get("rollout-temperature", "1.0")), origin)


def _rewards(given: Given, imported: Imported) -> None:
    names = [name for name in ("rm-type", "custom-rm-path") if given.note(name)]
    for name in names:
        imported.decide(given.setting(name), "rewards have other names and arguments here; set reward.functions")
    if not (names or is_supervised(given)):
        imported.decide("reward.functions", "the script names no reward")


def _advantage(given: Given, imported: Imported) -> None:
    if given.get("loss-type", "policy_loss") != "policy_loss":
        return
    estimator = given.get("advantage-estimator")
    if estimator not in _ADVANTAGES:
        imported.decide(f"--advantage-estimator {estimator}", "set algorithm.advantage and algorithm.loss")
        return
    if given.note("disable-rewards-normalization"):
        imported.decide("--disable-rewards-normalization", "set algorithm.advantage; pass_through takes raw rewards")
        return
    is_reinforce = estimator.startswith("reinforce")
    if is_reinforce != given.note("normalize-advantages"):
        shown = f"--advantage-estimator {estimator}, {'without' if is_reinforce else 'with'} --normalize-advantages"
        imported.decide(
            shown, "set algorithm.advantage: reinforce_pp and reinforce_pp_baseline divide by the deviation"
        )
        return
    keeps_mean = given.note("disable-grpo-std-normalization") and estimator in ("grpo", "gspo")
    origin = given.origin("advantage-estimator") + (", --disable-grpo-std-normalization" if keeps_mean else "")
    imported.set("algorithm.advantage", "grpo_mean_only" if keeps_mean else _ADVANTAGES[estimator], origin)


def _loss(given: Given, imported: Imported) -> None:
    estimator, kind = given.get("advantage-estimator"), given.get("loss-type", "policy_loss")
    if kind == "sft_loss":
        imported.set("algorithm.loss", "sft", "--loss-type")
    elif kind != "policy_loss":
        imported.decide(given.setting("loss-type"), "set algorithm.loss")
    elif estimator in _ADVANTAGES:
        loss = "gspo" if estimator == "gspo" else "ppo_clip"
        imported.set("algorithm.loss", loss, given.origin("advantage-estimator"))


def _reduction(given: Given, imported: Imported) -> None:
    per_token = given.note("calculate-per-token-loss")
    origin = "--calculate-per-token-loss" if per_token else "without --calculate-per-token-loss"
    imported.set("algorithm.reduction", "tokens" if per_token else "samples", origin)


def _clip_low(given: Given, imported: Imported) -> None:
    if is_supervised(given):
        given.unused(imported, "--loss-type sft_loss", "eps-clip", "eps-clip-high")
        return
    imported.set("algorithm.clip_low", number(given.get("eps-clip")), given.origin("eps-clip"))


def _clip_high(given: Given, imported: Imported) -> None:
    if is_supervised(given):
        return
    name = "eps-clip-high" if given.has("eps-clip-high") else "eps-clip"
    imported.set("algorithm.clip_high", number(given.get(name)), given.origin(name))


def _tis(given: Given, imported: Imported) -> None:
    if given.note("use-tis") and number(given.get("tis-clip-low", "0")) > 0:
        low, high = given.get("tis-clip-low"), given.get("tis-clip", "2.0")
        why = f"set algorithm.importance_correction, importance_low and importance_high ({high})"
        imported.decide(f"--use-tis --tis-clip-low {low}", why)
    elif given.note("use-tis"):
        imported.set("algorithm.importance_correction", "truncate", "--use-tis")
        origin = "--tis-clip" if given.has("tis-clip") else "--tis-clip, its default"
        imported.set("algorithm.importance_high", number(given.get("tis-clip", "2.0")), origin)
    else:
        given.unused(imported, "without --use-tis", "tis-clip")


def _kl(given: Given, imported: Imported) -> None:
    if not given.note("use-kl-loss"):
        given.unused(imported, "without --use-kl-loss", "kl-loss-coef", "kl-loss-type")
        return
    imported.set("algorithm.kl_coef", number(given.get("kl-loss-coef", "0")), "--use-kl-loss, --kl-loss-coef")
    kind = given.get("kl-loss-type")
    if kind in _KL_ESTIMATORS:
        imported.set("algorithm.kl_estimator", _KL_ESTIMATORS[kind], "--kl-loss-type")
    else:
        shown = "--kl-loss-type" + ("" if kind is None else f" {kind}")
        imported.decide(shown, "set algorithm.kl_estimator")


def _kl_reward(given: Given, imported: Imported) -> None:
    """slime's GRPO and GSPO take the reward alone; of the others' the estimator is that of the loss."""
    if not given.has("kl-coef"):
        return
    estimator = given.get("advantage-estimator")
    if estimator in ("grpo", "gspo"):
        given.unused(imported, f"no part of the advantages of {estimator}", "kl-coef")
        return
    kind = given.get("kl-loss-type", "k1")
    imported.set("algorithm.kl_reward_coef", number(given.get("kl-coef")), "--kl-coef")
    if kind in _KL_ESTIMATORS:
        imported.set("algorithm.kl_reward_estimator", _KL_ESTIMATORS[kind], "--kl-loss-type")
    else:
        imported.decide(f"--kl-loss-type {kind}", "set algorithm.kl_reward_estimator")


def _stop_tokens(given: Given, imported: Imported) -> None:
    ids = [whole(each) for each in given.get("rollout-stop-token-ids", "").split()]
    if ids:
        imported.set("rollout.stop_token_ids", ids, "--rollout-stop-token-ids")


def _dropped(given: Given, imported: Imported) -> None:
    choice = given.get("dynamic-sampling-filter-path")
    if choice is not None and choice.rpartition(".")[2] == "check_reward_nonzero_std":
        imported.set("rollout.drop_zero_spread", True, "--dynamic-sampling-filter-path")
    elif choice is not None:
        why = "groups are left out by the spread of their rewards alone, rollout.drop_zero_spread"
        imported.decide(f"--dynamic-sampling-filter-path {choice}", why)


def _warm_up(given: Given, imported: Imported) -> None:
    name = "lr-warmup-fraction"
    if given.has(name) and not given.has("lr-warmup-iters"):
        given.get(name)
        imported.decide(given.setting(name), "set trainer.optimizer.warmup_steps, a number of updates")


def _decay(given: Given, imported: Imported) -> None:
    style = given.get("lr-decay-style")
    if style is None:
        return
    if style in ("constant", "linear", "cosine"):
        imported.set("trainer.optimizer.decay", style, given.origin("lr-decay-style"))
    else:
        imported.decide(f"--lr-decay-style {style}", "set trainer.optimizer.decay to constant, linear or cosine")


def _minibatches(given: Given, imported: Imported) -> None:
    updates, size, samples = given.get("num-steps-per-rollout"), given.get("global-batch-size"), None
    if size is not None and given.has("rollout-batch-size"):
        samples = whole(given.get("rollout-batch-size")) * whole(given.get("n-samples-per-prompt", "1"))
    if updates is not None:
        if samples is not None and samples != whole(updates) * whole(size):
            why = f"times --num-steps-per-rollout {updates} is not the {samples} samples of a step; set one"
            imported.decide(f"--global-batch-size {size}", why)
        else:
            imported.set("algorithm.minibatches", whole(updates), "--num-steps-per-rollout")
    elif samples is not None:
        if samples % whole(size):
            imported.decide(f"--global-batch-size {size}", f"does not divide the {samples} samples of a step")
        else:
            origin = "samples of a step over --global-batch-size"
            imported.set("algorithm.minibatches", samples // whole(size), origin)
    elif size is not None:
        imported.decide(given.setting("global-batch-size"), "set algorithm.minibatches, updates of a step")


def _steps(given: Given, imported: Imported) -> None:
    if not given.has("num-rollout"):
        epochs = given.get("num-epoch")
        imported.decide("steps", f"rows over --rollout-batch-size, times {epochs or 'the'} epochs of --num-epoch")


OBJECTIVE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "data.apply_chat_template": _chat_template,
        "data.prompt_key, answer_key": _row_keys,
        "rollout.max_new_tokens": _response_length,
        "trainer.optimizer.warmup_steps": _warm_up,
        "data.shuffle": _shuffle,
        "data.max_prompt_tokens": _prompt_length,
        "data.train": _training_data,
        "evaluation.files": _held_out,
        "evaluation.temperature": _evaluation_temperature,
        "reward.functions": _rewards,
        "algorithm.advantage": _advantage,
        "algorithm.loss": _loss,
        "algorithm.reduction": _reduction,
        "algorithm.clip_low": _clip_low,
        "algorithm.clip_high": _clip_high,
        "algorithm.importance_correction, importance_high": _tis,
        "algorithm.kl_coef, kl_estimator": _kl,
        "algorithm.kl_reward_coef, kl_reward_estimator": _kl_reward,
        "rollout.stop_token_ids": _stop_tokens,
        "rollout.drop_zero_spread": _dropped,
        "trainer.optimizer.decay": _decay,
        "algorithm.minibatches": _minibatches,
        "steps": _steps,
    }
)
"""By the fields here that a rule decides."""
