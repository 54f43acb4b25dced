"""Settings of slime's launch scripts (``train.py --hf-checkpoint ... --rollout-batch-size ...``)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from slime_like.config.foreign.given import Given, given_by_words
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.launch_script import Argument, Launch
from slime_like.config.foreign.slime_engines import ENGINE_RULES
from slime_like.config.foreign.slime_objective import OBJECTIVE_RULES, WITHOUT_VALUE
from slime_like.config.foreign.values import natural, number, scalar, text, whole
from slime_like.system.credentials import is_credential

_VARIABLE = re.compile(r"\$(?:\w+|[@*]|\{[^{}]*\}|\(command\))")
_MODEL = "${MODEL_ARGS[@]}"
"""The model's shape, from a file of slime's ``scripts/models``."""
_SEVERAL = {
    *("eval-prompt-data", "rollout-stop", "rollout-stop-token-ids", "rollout-external-engine-addrs"),
    *("only-train-params-name-list", "freeze-params-name-list"),
}
"""Options that take several words."""
_OTHER_FILE = "custom-config-path"
_PROGRAM = re.compile(r"(?:.*/)?train(?:_async)?\.py")
_DIRECT = MappingProxyType(
    {
        "hf-checkpoint": ("model.path", text),
        "rollout-max-prompt-len": ("data.max_prompt_tokens", whole),
        "num-rollout": ("steps", whole),
        "rollout-batch-size": ("rollout.prompts_per_step", natural),
        "n-samples-per-prompt": ("rollout.samples_per_prompt", natural),
        "rollout-max-response-len": ("rollout.max_new_tokens", whole),
        "rollout-temperature": ("rollout.temperature", number),
        "rollout-top-p": ("rollout.top_p", number),
        "rollout-top-k": ("rollout.top_k", whole),
        "rollout-max-context-len": ("rollout.max_model_len", whole),
        "eval-interval": ("evaluation.every", whole),
        "n-samples-per-eval-prompt": ("evaluation.samples_per_prompt", whole),
        "eval-max-response-len": ("evaluation.max_new_tokens", whole),
        "tensor-model-parallel-size": ("trainer.parallel.tensor", whole),
        "pipeline-model-parallel-size": ("trainer.parallel.pipeline", whole),
        "context-parallel-size": ("trainer.parallel.context", whole),
        "expert-model-parallel-size": ("trainer.parallel.expert", whole),
        "entropy-coef": ("algorithm.entropy_coef", number),
        "eps-clip-c": ("algorithm.dual_clip", number),
        "lr": ("trainer.optimizer.lr", number),
        "min-lr": ("trainer.optimizer.min_lr", number),
        "lr-warmup-iters": ("trainer.optimizer.warmup_steps", whole),
        "weight-decay": ("trainer.optimizer.weight_decay", number),
        "adam-beta1": ("trainer.optimizer.beta1", number),
        "adam-beta2": ("trainer.optimizer.beta2", number),
        "adam-eps": ("trainer.optimizer.eps", number),
        "clip-grad": ("trainer.optimizer.clip_grad", number),
        "seed": ("seed", whole),
        "save-interval": ("checkpoint.every", whole),
        "wandb-project": ("logging.wandb_project", text),
    }
)
_SWITCHES: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "sequence-parallel": ("trainer.parallel.sequence", True),
        "optimizer-cpu-offload": ("trainer.optimizer.offload", True),
        "use-wandb": ("logging.wandb", True),
        "use-tensorboard": ("logging.tensorboard", True),
        "async-save": ("checkpoint.async_save", True),
        "colocate": ("cluster.placement", "colocated"),
    }
)
# What slime takes if nothing is given, where it differs from this project and the run depends on it.
_DEFAULTS_OF_SLIME: Mapping[str, str] = MappingProxyType(
    {
        "n-samples-per-prompt": "1",
        "eps-clip": "0.2",
        "advantage-estimator": "grpo",
        "kl-loss-type": "k1",
        "kl-loss-coef": "0.0",
        "actor-num-gpus-per-node": "8",
        "num-gpus-per-node": "8",
        "seed": "1234",
    }
)
_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {**_DEFAULTS_OF_SLIME, "weight-decay": "0.01", "adam-beta2": "0.999", "lr-decay-style": "linear"}
)
"""With those of Megatron-LM, the usual trainer."""
_NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "load": "a run resumes from its own run_dir, and starts from model.path",
        "ref-load": "the reference is model.path, or reference.path",
        "save": "checkpoints are in run_dir",
        "use-dynamic-batch-size": "sequences are always packed",
        "balance-data": "replicas are always balanced (trainer.balance)",
        "recompute-method": "whole layers, one at a time",
        "recompute-num-layers": "whole layers, one at a time",
        "accumulate-allreduce-grads-in-fp32": "gradients are always float32",
        "attention-softmax-in-fp32": "always",
        "attention-backend": "trainer.attention chooses what is installed",
        "overlap-cpu-optimizer-d2h-h2d": "part of trainer.optimizer.offload",
        "wandb-group": "not used",
        "optimizer": "AdamW",
        "micro-batch-size": "sequences are always packed",
        **dict.fromkeys(
            [
                *("swiglu", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"),
                *("group-query-attention", "num-query-groups", "kv-channels", "qk-layernorm", "normalization"),
                *("norm-epsilon", "rotary-base", "use-rotary-position-embeddings", "disable-bias-linear"),
                *("add-qkv-bias", "vocab-size", "max-position-embeddings", "untie-embeddings-and-output-weights"),
                "make-vocab-size-divisible-by",
            ],
            "config.json of the model has it",
        ),
    }
)
_OF_SLIME = {
    *("hf-checkpoint", "prompt-data", "num-rollout", "rollout-batch-size", "advantage-estimator", "custom-config-path"),
    *("actor-num-gpus-per-node", "rollout-num-gpus", "rollout-num-gpus-per-engine", "n-samples-per-prompt"),
}
"""Options of which a run has at least one."""
_PAIRS = {"attention-dropout": "0", "hidden-dropout": "0", "expert-tensor-parallel-size": "1"}


def starts_slime(words: Sequence[Argument]) -> bool:
    """Whether a command starts slime's trainer, and not another ``train.py``."""
    program = next((place for place, word in enumerate(words) if _PROGRAM.fullmatch(word.text)), None)
    if program is None:
        return False
    names = {word.text.removeprefix("--").partition("=")[0] for word in words[program + 1 :] if word.known}
    return bool(names & _OF_SLIME)


def read_slime(launch: Launch) -> Imported:
    """Take over what has one meaning here."""
    program = max(place for place, word in enumerate(launch.words) if _PROGRAM.fullmatch(word.text))
    imported, further = Imported("slime"), list[str]()
    given = _given(launch, launch.words[program + 1 :], further)
    if given.is_based:
        imported.decide(given.setting(_OTHER_FILE), "its settings count before these, and where these say nothing")
    for targets, rule in {**OBJECTIVE_RULES, **ENGINE_RULES}.items():
        given.apply(imported, targets, rule)
    given.take_direct(imported, _DIRECT)
    given.take_switches(imported, _SWITCHES)
    _rest(given, imported)
    if "rollout.engine" in imported.values and launch.words[program].text.endswith("train_async.py"):
        imported.set("rollout.max_staleness", 1, "train_async.py")
    if imported.values.get("algorithm.loss", ("",))[0] != "sft":
        imported.leave_reward()
    imported.decide("run_dir", "a new directory of this run")
    imported.list_arguments(launch, further)
    return imported


def _given(launch: Launch, words: Sequence[Argument], further: list[str]) -> Given:
    """Options by name, each with all words up to the next one; "" without any. ``further`` gets variables that stand
    behind a whole option, or before the first."""
    found: list[tuple[str, Argument]] = []
    for word in words:
        is_variable = not word.known and _VARIABLE.fullmatch(word.text) is not None
        if re.match(r"--\w", word.text):
            name, _, value = word.text[2:].partition("=")
            found.append((name, replace(word, text=value)))
        elif is_variable and (word.text in ("$@", "$*") or not found or _is_whole(*found[-1])):
            further.append(word.text)
        elif found:
            name, before = found[-1]
            text = f"{before.text} {word.text}" if before.text else word.text
            found[-1] = name, Argument(text, before.known and word.known, before.defaults + word.defaults)
    backend = next((value.text for name, value in reversed(found) if name == "train-backend"), "megatron")
    others = [array for array in launch.absent if array != _MODEL]
    own = _DEFAULTS if backend == "megatron" else _DEFAULTS_OF_SLIME
    is_based = any(name == _OTHER_FILE for name, _ in found)
    further_words = (*others, *further)
    return given_by_words(found, own, prefix="--", between=" ", further=further_words, is_based=is_based)


def _is_whole(name: str, value: Argument) -> bool:
    """Whether the option takes no further word."""
    takes_several = name in _SEVERAL or name.startswith("sglang-")
    return name in _SWITCHES or name in WITHOUT_VALUE or (value.text != "" and not takes_several)


def _rest(given: Given, imported: Imported) -> None:
    fields = {name: target for name, (target, _) in _DIRECT.items()}
    for name in given.close(imported, fields):
        setting = given.setting(name)
        argument = name.removeprefix("sglang-").replace("-", "_")
        if name == "custom-generate-function-path":
            imported.decide(setting, "set rollout.environment.name; or rollout.agent.name instead")
        elif name in _NEEDLESS:
            imported.needless[setting] = _NEEDLESS[name]
        elif name in _PAIRS and scalar(given.values[name]) == scalar(_PAIRS[name]):
            imported.needless[setting] = "the only value here"
        elif name.startswith("sglang-") and argument.isidentifier() and not is_credential(name):
            value, target = given.values[name], f"rollout.engine_args.{argument}"
            if " " in value:
                imported.decide(setting, f"set {target} to a list, or a text")
            else:
                imported.set(target, value == "" or scalar(value), f"--{name}")
        else:
            imported.unmatched.append(setting)
