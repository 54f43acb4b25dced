"""Settings of verl's PPO trainer: its YAML, or overrides in a launch script (``data.train_batch_size=...``)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slime_like.config.foreign.imported import (
    ELSEWHERE,
    UNKNOWN_VALUE,
    Given,
    Imported,
    flag,
    number,
    printable,
    scalar,
    take_direct,
    text,
    texts,
    whole,
)
from slime_like.config.foreign.launch_script import Argument, absent_arrays

_OVERRIDE = re.compile(
    r"\+*((?:actor_rollout_ref|algorithm|data|trainer|critic|reward_model|reward|custom_reward_function"
    r"|ray_kwargs|global_profiler)(?:\.\w+)+)=(.*)",
    re.DOTALL,
)
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_DIRECT = MappingProxyType(
    {
        "actor_rollout_ref.model.path": ("model.path", text),
        "actor_rollout_ref.model.trust_remote_code": ("model.trust_remote_code", flag),
        "data.train_files": ("data.train", texts),
        "data.val_files": ("evaluation.files", texts),
        "data.prompt_key": ("data.prompt_key", text),
        "data.max_prompt_length": ("data.max_prompt_tokens", whole),
        "data.max_response_length": ("rollout.max_new_tokens", whole),
        "data.train_batch_size": ("rollout.prompts_per_step", whole),
        "data.shuffle": ("data.shuffle", flag),
        "data.seed": ("seed", whole),
        f"{_ACTOR}.clip_ratio_low": ("algorithm.clip_low", number),
        f"{_ACTOR}.clip_ratio_high": ("algorithm.clip_high", number),
        f"{_ACTOR}.clip_ratio_c": ("algorithm.dual_clip", number),
        f"{_ACTOR}.entropy_coeff": ("algorithm.entropy_coef", number),
        f"{_ACTOR}.ppo_epochs": ("algorithm.epochs", whole),
        f"{_ACTOR}.grad_clip": ("trainer.optimizer.clip_grad", number),
        f"{_ACTOR}.optim.clip_grad": ("trainer.optimizer.clip_grad", number),
        f"{_ACTOR}.optim.lr": ("trainer.optimizer.lr", number),
        f"{_ACTOR}.optim.weight_decay": ("trainer.optimizer.weight_decay", number),
        f"{_ACTOR}.megatron.tensor_model_parallel_size": ("trainer.parallel.tensor", whole),
        f"{_ACTOR}.megatron.pipeline_model_parallel_size": ("trainer.parallel.pipeline", whole),
        f"{_ACTOR}.megatron.context_parallel_size": ("trainer.parallel.context", whole),
        f"{_ACTOR}.megatron.expert_model_parallel_size": ("trainer.parallel.expert", whole),
        f"{_ACTOR}.ulysses_sequence_parallel_size": ("trainer.parallel.context", whole),
        f"{_ACTOR}.checkpoint.async_save": ("checkpoint.async_save", flag),
        f"{_ROLLOUT}.temperature": ("rollout.temperature", number),
        f"{_ROLLOUT}.top_p": ("rollout.top_p", number),
        f"{_ROLLOUT}.top_k": ("rollout.top_k", whole),
        f"{_ROLLOUT}.n": ("rollout.samples_per_prompt", whole),
        f"{_ROLLOUT}.max_model_len": ("rollout.max_model_len", whole),
        f"{_ROLLOUT}.val_kwargs.n": ("evaluation.samples_per_prompt", whole),
        "trainer.total_training_steps": ("steps", whole),
        "trainer.n_gpus_per_node": ("cluster.gpus_per_node", whole),
        "trainer.nnodes": ("cluster.nodes", whole),
        "trainer.default_local_dir": ("run_dir", text),
        "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep", whole),
        "trainer.project_name": ("logging.wandb_project", text),
        "algorithm.filter_groups.enable": ("rollout.drop_zero_spread", flag),
    }
)
# What verl takes if nothing is given, where it differs from this project and the objective depends on it.
_DEFAULTS: Mapping[str, Any] = MappingProxyType({f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.optim.weight_decay": 0.01})
_ADVANTAGES = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_REDUCTIONS = {"token-mean": "tokens", "seq-mean-token-mean": "samples"}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl"}
_NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "data.truncation": "longer prompts are left out, never cut",
        "data.filter_overlong_prompts": "longer prompts are always left out",
        "data.filter_overlong_prompts_workers": "longer prompts are always left out",
        "data.val_batch_size": "all of them at once",
        "data.return_raw_chat": "not used",
        "data.gen_batch_size": "groups are sampled until a step is full (rollout.max_drops_per_step)",
        "actor_rollout_ref.model.use_remove_padding": "sequences are always packed",
        f"{_ACTOR}.use_dynamic_bsz": "sequences are always packed",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "micro-batches are bounded by tokens",
        f"{_ACTOR}.ppo_micro_batch_size": "micro-batches are bounded by tokens",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "micro-batches are bounded by tokens",
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "as trainer.target_tokens_per_batch",
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": "sequences are always packed",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "micro-batches are bounded by tokens",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "as trainer.target_tokens_per_batch",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "sequences are always packed",
        f"{_ROLLOUT}.mode": "engines are asynchronous",
        **dict.fromkeys(
            [
                f"{_ACTOR}.{section}.{kind}_offload"
                for section in ("fsdp_config", "megatron")
                for kind in ("param", "grad", "optimizer")
            ],
            "colocated trainers keep their state in host memory while engines sample",
        ),
        f"{_ROLLOUT}.free_cache_engine": "colocated engines sleep during training",
        "actor_rollout_ref.hybrid_engine": "cluster.placement",
        "trainer.experiment_name": "run_dir names the run",
        "trainer.val_before_train": "evaluation runs before and after training",
        "trainer.critic_warmup": "there is no critic",
        "trainer.balance_batch": "replicas are always balanced (trainer.balance)",
        "trainer.device": "found out at the start",
    }
)
_NOT_ITS_OWN = "no setting of its own"
_NEEDLESS_PARTS = ("critic.", "ray_kwargs.", "global_profiler.", "actor_rollout_ref.ref.", f"{_ACTOR}.profiler.")


def is_verl(commands: Sequence[Sequence[Argument]]) -> bool:
    """Whether these are the words of a launch script of verl."""
    begins = ("actor_rollout_ref.", "+actor_rollout_ref.")
    return any(word.text.startswith(begins) for words in commands for word in words)


def read_verl_script(commands: Sequence[Sequence[Argument]]) -> Imported:
    """Take over the overrides that have one meaning here."""
    words = [word for words in commands for word in words]
    found = [(match, word.known) for word in words if (match := _OVERRIDE.fullmatch(word.text))]
    unknown = frozenset(match[1] for match, known in found if not known)
    imported = _read(Given({match[1]: match[2] for match, _ in found}, unknown))
    for array in absent_arrays(commands):
        imported.decide(array, ELSEWHERE)
    return imported


def read_verl_yaml(data: Mapping[str, Any]) -> Imported:
    """Take over what has one meaning here; interpolations are known to verl alone."""
    values = dict(_flat(data, ""))
    unknown = frozenset(name for name, value in values.items() if isinstance(value, str) and "${" in value)
    return _read(Given(values, unknown))


def _flat(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_" and value not in (None, {}, []):
            yield f"{prefix}{name}", value


def _read(given: Given) -> Imported:
    imported = Imported("verl")
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in given.values}
    given.values.update(defaults)
    _objective(given, imported)
    _correction(given, imported)
    _turns(given, imported)
    _rewards(given, imported)
    _engine(given, imported)
    _dropped_groups(given, imported)
    _layout(given, imported)
    _optimizer(given, imported)  # behind the number of updates of a step
    _intervals(given, imported)
    take_direct(given, imported, _DIRECT, lambda name: name + (", its default" if name in defaults else ""))
    imported.set("data.answer_key", "reward_model.ground_truth", "where verl's rows have it")
    if "steps" not in imported.values:
        epochs = given.take("trainer.total_epochs")
        imported.decide("steps", f"rows over data.train_batch_size, times {epochs or 'the'} epochs")
    if "run_dir" not in imported.values:
        imported.decide("run_dir", "a new directory of this run")
    _rest(given, imported)
    return imported


def _objective(given: Given, imported: Imported) -> None:
    estimator = given.take("algorithm.adv_estimator", "gae")
    if estimator in _ADVANTAGES:
        with_std = flag(given.take("algorithm.norm_adv_by_std_in_grpo", True))
        name = "grpo_mean_only" if estimator == "grpo" and not with_std else _ADVANTAGES[estimator]
        imported.set("algorithm.advantage", name, "algorithm.adv_estimator, norm_adv_by_std_in_grpo")
    else:
        imported.decide(f"algorithm.adv_estimator={estimator}", "needs a critic, or is not supported")
    mode = given.take(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in ("vanilla", "gspo"):
        imported.set("algorithm.loss", "gspo" if mode == "gspo" else "ppo_clip", f"{_ACTOR}.policy_loss.loss_mode")
    else:
        imported.decide(f"{_ACTOR}.policy_loss.loss_mode={mode}", "not supported")
    reduction = given.take(f"{_ACTOR}.loss_agg_mode", "token-mean")
    if reduction in _REDUCTIONS:
        imported.set("algorithm.reduction", _REDUCTIONS[reduction], f"{_ACTOR}.loss_agg_mode")
    else:
        imported.decide(f"{_ACTOR}.loss_agg_mode={reduction}", "see algorithm.reduction, and constant_length")
    if given.has(f"{_ACTOR}.clip_ratio"):
        value = given.take(f"{_ACTOR}.clip_ratio")
        if not given.has(f"{_ACTOR}.clip_ratio_low") or not given.has(f"{_ACTOR}.clip_ratio_high"):
            why = "versions of verl differ in which bounds it sets; set algorithm.clip_low and algorithm.clip_high"
            imported.decide(f"{_ACTOR}.clip_ratio={value}", why)
    _kl(given, imported)


def _kl(given: Given, imported: Imported) -> None:
    for switch, coefficient, kind, target, estimator in (
        (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type", "kl_coef", "kl_estimator"),
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


def _correction(given: Given, imported: Imported) -> None:
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


def _rewards(given: Given, imported: Imported) -> None:
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


def _optimizer(given: Given, imported: Imported) -> None:
    prefix = f"{_ACTOR}.optim"
    steps = given.take(f"{prefix}.lr_warmup_steps")
    ratio = given.take(f"{prefix}.lr_warmup_steps_ratio")
    updates = imported.values.get("algorithm.minibatches", (None,))[0]
    epochs = whole(given.known(f"{_ACTOR}.ppo_epochs", 1))
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


def _engine(given: Given, imported: Imported) -> None:
    engine = given.take(f"{_ROLLOUT}.name")
    _evaluation(given, imported)
    if engine not in ("vllm", "sglang"):
        shown = f"{_ROLLOUT}.name" + ("" if engine is None else f"={engine}")
        imported.decide(shown, "use vllm, sglang or transformers in rollout.engine")
        return
    memory, sequences = given.take(f"{_ROLLOUT}.gpu_memory_utilization"), given.take(f"{_ROLLOUT}.max_num_seqs")
    eager, batched = given.take(f"{_ROLLOUT}.enforce_eager"), given.take(f"{_ROLLOUT}.max_num_batched_tokens")
    imported.set("rollout.engine", engine, f"{_ROLLOUT}.name")
    sources = ("gpu_memory_utilization", "max_num_seqs", "enforce_eager", "max_num_batched_tokens")
    names: Sequence[str] = sources
    values = (memory, sequences, eager, batched)
    if engine == "sglang":
        names = ("mem_fraction_static", "max_running_requests", "disable_cuda_graph")
        if batched is not None:
            imported.decide(f"{_ROLLOUT}.max_num_batched_tokens={batched}", "an argument of vLLM's alone")
    for name, value, source in zip(names, values, sources, strict=False):
        if value is not None:
            imported.set(f"rollout.engine_args.{name}", scalar(value), f"{_ROLLOUT}.{source}")


def _evaluation(given: Given, imported: Imported) -> None:
    if flag(given.take(f"{_ROLLOUT}.val_kwargs.do_sample", False)):
        imported.set(
            "evaluation.temperature",
            number(given.take(f"{_ROLLOUT}.val_kwargs.temperature", 1.0)),
            f"{_ROLLOUT}.val_kwargs.temperature",
        )
    given.take(f"{_ROLLOUT}.val_kwargs.temperature")
    for name, whole_distribution in (("top_p", 1.0), ("top_k", -1.0)):
        value = given.take(f"{_ROLLOUT}.val_kwargs.{name}")
        if value is not None and number(value) != whole_distribution:
            imported.decide(f"{_ROLLOUT}.val_kwargs.{name}={value}", "evaluations draw from the whole distribution")


def _dropped_groups(given: Given, imported: Imported) -> None:
    """verl bounds batches of prompts, this project prompts that were left out. Of 0 there is no bound."""
    most = whole(given.take("algorithm.filter_groups.max_num_gen_batches", 0))
    if not flag(given.known("algorithm.filter_groups.enable", False)):
        imported.needless |= (
            {f"algorithm.filter_groups.max_num_gen_batches={most}": "filter_groups is off"} if most else {}
        )
        return
    batch = given.known("data.train_batch_size", None)
    sampled = given.known("data.gen_batch_size", batch)
    if "data.gen_batch_size" in given.unknown:
        imported.decide("rollout.max_drops_per_step", "data.gen_batch_size, which it depends on, is not known here")
    elif most > 0 and batch is not None:
        origin = "max_num_gen_batches times the prompts of one, less those of a step"
        imported.set("rollout.max_drops_per_step", max(1, most * whole(sampled) - whole(batch)), origin)
    else:
        imported.decide("rollout.max_drops_per_step", "verl has no bound here; set one")


def _layout(given: Given, imported: Imported) -> None:
    """verl's trainer and engines share their GPUs; data parallelism and the number of engines follow."""
    imported.set("cluster.placement", "colocated", "verl's hybrid engine")
    strategy = given.take(f"{_ACTOR}.strategy", "fsdp")
    is_megatron = strategy == "megatron" or any(name.startswith(f"{_ACTOR}.megatron.") for name in given.values)
    imported.set("trainer.backend", "megatron" if is_megatron else "fsdp", f"{_ACTOR}.strategy")
    names = (
        [
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.context_parallel_size",
        ]
        if is_megatron
        else ["ulysses_sequence_parallel_size"]
    )
    sizes = [whole(given.known(f"{_ACTOR}.{name}", 1)) for name in names]
    ranks, context = 1, sizes[-1]
    for size in sizes:
        ranks *= size
    tokens = given.take(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    if tokens is not None:
        origin = f"{_ACTOR}.ppo_max_token_len_per_gpu" + (" times context parallelism" if context > 1 else "")
        imported.set("trainer.target_tokens_per_batch", whole(tokens) * context, origin)
    counts = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, **{f"{_ACTOR}.{name}": 1 for name in names}}
    open_counts = [name for name in counts if name in given.unknown]
    gpus = whole(given.known("trainer.nnodes", 1)) * whole(given.known("trainer.n_gpus_per_node", 8))
    engine = whole(given.take(f"{_ROLLOUT}.tensor_model_parallel_size", 2))
    imported.set("rollout.tensor", engine, f"{_ROLLOUT}.tensor_model_parallel_size")
    for target, parts, what in (
        ("trainer.parallel.data", ranks, "ranks of a replica"),
        ("rollout.num_engines", engine, "GPUs of an engine"),
    ):
        if open_counts:
            imported.decide(target, f"GPUs over {what}, and {', '.join(open_counts)} is not known here")
        elif gpus % parts:
            imported.decide(target, f"{gpus} GPUs are no multiple of {parts} {what}")
        else:
            imported.set(target, gpus // parts, f"GPUs over {what}")
    batch, size = given.known("data.train_batch_size", None), given.take(f"{_ACTOR}.ppo_mini_batch_size")
    if batch is None and size is not None:
        imported.decide(f"{_ACTOR}.ppo_mini_batch_size={size}", "set algorithm.minibatches, updates of a step")
    if batch is not None and size is not None:
        if whole(batch) % whole(size):
            imported.decide(f"{_ACTOR}.ppo_mini_batch_size={size}", f"does not divide data.train_batch_size={batch}")
        else:
            origin = f"data.train_batch_size over {_ACTOR}.ppo_mini_batch_size"
            imported.set("algorithm.minibatches", whole(batch) // whole(size), origin)
    if flag(given.take(f"{_ACTOR}.use_prefix_grouper", False)):
        imported.set("trainer.share_prefixes", "prompts", f"{_ACTOR}.use_prefix_grouper")
    if flag(given.take("actor_rollout_ref.model.enable_gradient_checkpointing", True)):
        imported.set("trainer.recompute", "full", "actor_rollout_ref.model.enable_gradient_checkpointing")


def _intervals(given: Given, imported: Imported) -> None:
    for name, target in (("save_freq", "checkpoint.every"), ("test_freq", "evaluation.every")):
        value = given.take(f"trainer.{name}")
        if value is not None:
            imported.set(target, max(0, whole(value)), f"trainer.{name}")
    logger = str(given.take("trainer.logger", ""))
    if "wandb" in logger:
        imported.set("logging.wandb", True, "trainer.logger")
    mode = given.take("trainer.resume_mode", "auto")
    if mode in ("auto", "disable"):
        imported.set("resume", "auto" if mode == "auto" else "never", "trainer.resume_mode")
    else:
        imported.decide(f"trainer.resume_mode={mode}", "its checkpoints cannot be read here; start from a model")


def _turns(given: Given, imported: Imported) -> None:
    for name in [name for name in given.values if name.startswith(f"{_ROLLOUT}.multi_turn.")]:
        value = given.take(name)
        if value is not None:
            why = "conversations are rollout.environment's, with max_turns, or rollout.agent's"
            imported.decide(f"{name}={value}", why)


def _rest(given: Given, imported: Imported) -> None:
    for name, value in given.taken.items():
        if not imported.mentions(name):
            imported.needless[f"{name}={value}"] = _NOT_ITS_OWN
    imported.forget(given.unknown)
    for name, value in given.values.items():
        setting = f"{name}={printable(name, value)}"
        if name in given.unknown:
            imported.decide(setting, UNKNOWN_VALUE)
        elif name in _NEEDLESS:
            imported.needless[setting] = _NEEDLESS[name]
        elif name.startswith(_NEEDLESS_PARTS):
            imported.needless[setting] = "this part has no counterpart"
        else:
            imported.decide(setting, "no counterpart is known")
