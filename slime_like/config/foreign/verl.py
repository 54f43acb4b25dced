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
    take_direct,
    text,
    texts,
    whole,
)
from slime_like.config.foreign.launch_script import Argument, absent_arrays
from slime_like.config.foreign.verl_engines import ROLLOUT, read_dropped_groups, read_engine, read_layout, read_turns
from slime_like.config.foreign.verl_objective import (
    ACTOR,
    read_correction,
    read_objective,
    read_optimizer,
    read_rewards,
)

_OVERRIDE = re.compile(
    r"\+*((?:actor_rollout_ref|algorithm|data|trainer|critic|reward_model|reward|custom_reward_function"
    r"|ray_kwargs|global_profiler)(?:\.\w+)+)=(.*)",
    re.DOTALL,
)
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
        f"{ACTOR}.clip_ratio_low": ("algorithm.clip_low", number),
        f"{ACTOR}.clip_ratio_high": ("algorithm.clip_high", number),
        f"{ACTOR}.clip_ratio_c": ("algorithm.dual_clip", number),
        f"{ACTOR}.entropy_coeff": ("algorithm.entropy_coef", number),
        f"{ACTOR}.ppo_epochs": ("algorithm.epochs", whole),
        f"{ACTOR}.grad_clip": ("trainer.optimizer.clip_grad", number),
        f"{ACTOR}.optim.clip_grad": ("trainer.optimizer.clip_grad", number),
        f"{ACTOR}.optim.lr": ("trainer.optimizer.lr", number),
        f"{ACTOR}.optim.weight_decay": ("trainer.optimizer.weight_decay", number),
        f"{ACTOR}.megatron.tensor_model_parallel_size": ("trainer.parallel.tensor", whole),
        f"{ACTOR}.megatron.pipeline_model_parallel_size": ("trainer.parallel.pipeline", whole),
        f"{ACTOR}.megatron.context_parallel_size": ("trainer.parallel.context", whole),
        f"{ACTOR}.megatron.expert_model_parallel_size": ("trainer.parallel.expert", whole),
        f"{ACTOR}.ulysses_sequence_parallel_size": ("trainer.parallel.context", whole),
        f"{ACTOR}.checkpoint.async_save": ("checkpoint.async_save", flag),
        f"{ROLLOUT}.temperature": ("rollout.temperature", number),
        f"{ROLLOUT}.top_p": ("rollout.top_p", number),
        f"{ROLLOUT}.top_k": ("rollout.top_k", whole),
        f"{ROLLOUT}.n": ("rollout.samples_per_prompt", whole),
        f"{ROLLOUT}.max_model_len": ("rollout.max_model_len", whole),
        f"{ROLLOUT}.val_kwargs.n": ("evaluation.samples_per_prompt", whole),
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
_DEFAULTS: Mapping[str, Any] = MappingProxyType({f"{ACTOR}.clip_ratio_c": 3.0, f"{ACTOR}.optim.weight_decay": 0.01})
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
        **dict.fromkeys(
            [
                f"{ACTOR}.{section}.{kind}_offload"
                for section in ("fsdp_config", "megatron")
                for kind in ("param", "grad", "optimizer")
            ],
            "colocated trainers keep their state in host memory while engines sample",
        ),
        f"{ROLLOUT}.free_cache_engine": "colocated engines sleep during training",
        "actor_rollout_ref.hybrid_engine": "cluster.placement",
        "trainer.experiment_name": "run_dir names the run",
        "trainer.val_before_train": "evaluation runs before and after training",
        "trainer.critic_warmup": "there is no critic",
        "trainer.balance_batch": "replicas are always balanced (trainer.balance)",
        "trainer.device": "found out at the start",
    }
)
_NEEDLESS_PARTS = ("critic.", "ray_kwargs.", "global_profiler.", "actor_rollout_ref.ref.", f"{ACTOR}.profiler.")


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
    read_objective(given, imported)
    read_correction(given, imported)
    read_turns(given, imported)
    read_rewards(given, imported)
    read_engine(given, imported)
    read_dropped_groups(given, imported)
    read_layout(given, imported)
    read_optimizer(given, imported)  # behind the number of updates of a step
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


def _rest(given: Given, imported: Imported) -> None:
    imported.account_for({name: f"{name}={printable(name, value)}" for name, value in given.taken.items()})
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
