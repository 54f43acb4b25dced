"""Settings of verl's PPO trainer: its YAML, or overrides in a launch script (``data.train_batch_size=...``)."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from slime_like.config.foreign.given import Given, Rule, given_by_words
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.interpolation import interpolated
from slime_like.config.foreign.launch_script import Argument, Launch
from slime_like.config.foreign.values import flag, natural, number, text, texts, whole
from slime_like.config.foreign.verl_command import MEGATRON, OWN_BASES, is_program, read_command
from slime_like.config.foreign.verl_engines import ENGINE_RULES, ROLLOUT
from slime_like.config.foreign.verl_objective import ACTOR, OBJECTIVE_RULES

_DIRECT = MappingProxyType(
    {
        "actor_rollout_ref.model.path": ("model.path", text),
        "actor_rollout_ref.model.trust_remote_code": ("model.trust_remote_code", flag),
        "data.train_files": ("data.train", texts),
        "data.val_files": ("evaluation.files", texts),
        "data.prompt_key": ("data.prompt_key", text),
        "data.max_prompt_length": ("data.max_prompt_tokens", whole),
        "data.max_response_length": ("rollout.max_new_tokens", whole),
        "data.train_batch_size": ("rollout.prompts_per_step", natural),
        "data.shuffle": ("data.shuffle", flag),
        "data.seed": ("seed", whole),
        f"{ACTOR}.clip_ratio_low": ("algorithm.clip_low", number),
        f"{ACTOR}.clip_ratio_high": ("algorithm.clip_high", number),
        f"{ACTOR}.entropy_coeff": ("algorithm.entropy_coef", number),
        f"{ACTOR}.ppo_epochs": ("algorithm.epochs", whole),
        f"{ACTOR}.optim.min_lr": ("trainer.optimizer.min_lr", number),
        f"{ACTOR}.optim.weight_decay": ("trainer.optimizer.weight_decay", number),
        f"{ACTOR}.megatron.tensor_model_parallel_size": ("trainer.parallel.tensor", whole),
        f"{ACTOR}.megatron.pipeline_model_parallel_size": ("trainer.parallel.pipeline", whole),
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": ("trainer.parallel.virtual_pipeline", whole),
        f"{ACTOR}.megatron.expert_model_parallel_size": ("trainer.parallel.expert", whole),
        f"{ACTOR}.checkpoint.async_save": ("checkpoint.async_save", flag),
        f"{ROLLOUT}.temperature": ("rollout.temperature", number),
        f"{ROLLOUT}.top_p": ("rollout.top_p", number),
        f"{ROLLOUT}.top_k": ("rollout.top_k", whole),
        f"{ROLLOUT}.min_p": ("rollout.min_p", number),
        f"{ROLLOUT}.n": ("rollout.samples_per_prompt", whole),
        f"{ROLLOUT}.max_model_len": ("rollout.max_model_len", whole),
        f"{ROLLOUT}.val_kwargs.n": ("evaluation.samples_per_prompt", whole),
        "trainer.total_training_steps": ("steps", whole),
        "trainer.n_gpus_per_node": ("cluster.gpus_per_node", whole),
        "trainer.nnodes": ("cluster.nodes", whole),
        "trainer.default_local_dir": ("run_dir", text),
        "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep", whole),
        "trainer.project_name": ("logging.wandb_project", text),
    }
)
# What verl takes if nothing is given, where it differs from this project and the run depends on it.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{ROLLOUT}.n": 1,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.optim.weight_decay": 0.01,
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_penalty": "kl",
    }
)
_BASED = "its settings count where these say nothing; import what verl prints with --cfg job --resolve instead"
_NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "data.truncation": "longer prompts are left out, never cut",
        "data.filter_overlong_prompts": "longer prompts are always left out",
        "data.filter_overlong_prompts_workers": "longer prompts are always left out",
        "data.val_batch_size": "all of them at once",
        "data.return_raw_chat": "not used",
        "data.gen_batch_size": "groups are sampled until a step is full (rollout.max_drops_per_step)",
        "actor_rollout_ref.model.use_remove_padding": "sequences are always packed",
        f"{ACTOR}.use_dynamic_bsz": "sequences are always packed",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": "micro-batches are bounded by tokens",
        f"{ACTOR}.ppo_micro_batch_size": "micro-batches are bounded by tokens",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "micro-batches are bounded by tokens",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "as trainer.target_tokens_per_batch",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": "sequences are always packed",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "micro-batches are bounded by tokens",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "as trainer.target_tokens_per_batch",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "sequences are always packed",
        f"{ROLLOUT}.mode": "engines are asynchronous",
        f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
        f"{ROLLOUT}.response_length": "data.max_response_length",
        **dict.fromkeys(
            [
                f"{ACTOR}.{section}.{kind}_offload"
                for section in ("fsdp_config", "megatron")
                for kind in ("param", "grad", "optimizer")
            ],
            "colocated trainers keep their state in host memory while engines sample",
        ),
        f"{ROLLOUT}.free_cache_engine": "colocated engines sleep during training",
        "trainer.experiment_name": "run_dir names the run",
        "trainer.val_before_train": "evaluation runs before and after training",
        "trainer.critic_warmup": "there is no critic",
        "trainer.balance_batch": "replicas are always balanced (trainer.balance)",
        "trainer.device": "found out at the start",
    }
)
_MOST_OF_A_PART = 3
"""Settings of a part that are listed one by one."""
_NEEDLESS_PARTS = ("critic.", "ray_kwargs.", "global_profiler.", "actor_rollout_ref.ref.", f"{ACTOR}.profiler.")


def starts_verl(words: Sequence[Argument]) -> bool:
    """Whether a command has settings of verl's trainer."""
    return any(word.text.lstrip("+").startswith("actor_rollout_ref.") or is_program(word.text) for word in words)


def read_verl_script(launch: Launch) -> Imported:
    """Take over the overrides that have one meaning here."""
    imported, command = Imported("verl"), read_command(launch.words)
    imported.unmatched += command.others
    imported.needless |= dict.fromkeys(command.own_bases, "verl's own")
    is_megatron = any(MEGATRON in base for base in command.own_bases)
    defaults = {**_DEFAULTS, **({f"{ACTOR}.strategy": "megatron"} if is_megatron else {})}
    further, base = (*launch.absent, *command.further), ", ".join(command.bases)
    given = given_by_words(command.overrides, defaults, further=further, is_based=base != "")
    _read(given, imported, base, is_dapo=command.is_dapo)
    imported.list_arguments(launch, command.further)
    return imported


def read_verl_yaml(data: Mapping[str, Any]) -> Imported:
    """Take over what has one meaning here; of interpolations those that name another setting of the file."""
    listed = data.get("defaults") or []
    others = [each for each in (listed if isinstance(listed, list) else [listed]) if each not in OWN_BASES]
    values = {name: value for name, value in interpolated(data).items() if name.partition(".")[0] != "defaults"}
    unknown = frozenset(name for name, value in values.items() if "${" in str(value))
    base = "defaults: " + ", ".join(map(str, others)) if others else ""
    imported = Imported("verl")
    _read(Given(values, unknown, _DEFAULTS, is_based=base != ""), imported, base)
    return imported


def _read(given: Given, imported: Imported, base: str, is_dapo: bool = False) -> None:
    if base:
        imported.decide(base, _BASED)
    for targets, rule in {**OBJECTIVE_RULES, **ENGINE_RULES, **_RULES}.items():
        given.apply(imported, targets, rule)
    given.apply(imported, "rollout.drop_zero_spread", partial(_zero_spread, is_dapo=is_dapo))
    given.take_direct(imported, _DIRECT)
    imported.set("data.answer_key", "reward_model.ground_truth", "where verl's rows have it")
    imported.leave_reward()
    if "run_dir" not in imported.values:
        imported.decide("run_dir", "a new directory of this run")
    _rest(given, imported)


def _interval(given: Given, imported: Imported, name: str, target: str) -> None:
    if given.has(name):
        imported.set(target, max(0, whole(given.get(name))), name)


def _zero_spread(given: Given, imported: Imported, is_dapo: bool) -> None:
    name = "algorithm.filter_groups.enable"
    if is_dapo or not flag(given.get(name, False)):
        imported.set("rollout.drop_zero_spread", flag(given.get(name, False)), name)
    else:
        why = "versions of verl's trainer differ in whether they read it, as recipe.dapo does"
        imported.decide(given.setting(name), f"{why}; set rollout.drop_zero_spread")


def _held_out_rows(given: Given, imported: Imported) -> None:
    name = "data.val_max_samples"
    if given.has(name) and whole(given.get(name)) > 0:
        imported.set("evaluation.max_prompts", whole(given.get(name)), name)


def _reference(given: Given, imported: Imported) -> None:
    """Another model than the policy's; verl loads it where a divergence is computed."""
    name, switches = "actor_rollout_ref.ref.model.path", ("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
    if not given.has(name) or given.get(name) == given.get("actor_rollout_ref.model.path"):
        return
    is_used = {flag(given.get(switch, False)) for switch in switches}
    if True in is_used:
        imported.set("reference.path", text(given.get(name)), name)
    else:
        given.unused(imported, f"neither {' nor '.join(switches)} is on", name)


def _logger(given: Given, imported: Imported) -> None:
    if "wandb" in texts(given.get("trainer.logger", "console")):
        imported.set("logging.wandb", True, "trainer.logger")


def _resume(given: Given, imported: Imported) -> None:
    mode = given.get("trainer.resume_mode", "auto")
    if mode in ("auto", "disable"):
        imported.set("resume", "auto" if mode == "auto" else "never", "trainer.resume_mode")
    else:
        imported.decide(f"trainer.resume_mode={mode}", "its checkpoints cannot be read here; start from a model")


def _steps(given: Given, imported: Imported) -> None:
    if not given.has("trainer.total_training_steps"):
        epochs = given.get("trainer.total_epochs", 30)
        imported.decide("steps", f"rows over data.train_batch_size, times {epochs} epochs")
    else:
        name = "trainer.total_epochs"
        if name in given.values:
            given.get(name)
            imported.decide(given.setting(name), "verl ends with these, if that is sooner; here steps alone counts")


_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "checkpoint.every": partial(_interval, name="trainer.save_freq", target="checkpoint.every"),
        "evaluation.every": partial(_interval, name="trainer.test_freq", target="evaluation.every"),
        "evaluation.max_prompts": _held_out_rows,
        "reference.path": _reference,
        "logging.wandb": _logger,
        "resume": _resume,
        "steps": _steps,
    }
)


def _rest(given: Given, imported: Imported) -> None:
    parts = dict[str, list[str]]()
    for name in given.close(imported, {name: target for name, (target, _) in _DIRECT.items()}):
        setting = given.setting(name)
        if name in _NEEDLESS:
            imported.needless[setting] = _NEEDLESS[name]
        elif part := next(filter(name.startswith, _NEEDLESS_PARTS), ""):
            parts.setdefault(part, []).append(setting)
        else:
            imported.unmatched.append(setting)
    for part, settings in parts.items():
        shown = settings if len(settings) <= _MOST_OF_A_PART else [f"{part}* ({len(settings)} settings)"]
        imported.needless |= dict.fromkeys(shown, "this part has no counterpart")
