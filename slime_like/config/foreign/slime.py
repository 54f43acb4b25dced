"""Settings of slime's launch scripts (``train.py --hf-checkpoint ... --rollout-batch-size ...``)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slime_like.config.foreign.imported import (
    ELSEWHERE,
    UNKNOWN_VALUE,
    Given,
    Imported,
    number,
    printable,
    scalar,
    take_direct,
    text,
    texts,
    whole,
)
from slime_like.config.foreign.launch_script import Argument, absent_arrays

_DIRECT = MappingProxyType(
    {
        "hf-checkpoint": ("model.path", text),
        "prompt-data": ("data.train", texts),
        "input-key": ("data.prompt_key", text),
        "label-key": ("data.answer_key", text),
        "rollout-max-prompt-len": ("data.max_prompt_tokens", whole),
        "num-rollout": ("steps", whole),
        "rollout-batch-size": ("rollout.prompts_per_step", whole),
        "n-samples-per-prompt": ("rollout.samples_per_prompt", whole),
        "rollout-max-response-len": ("rollout.max_new_tokens", whole),
        "rollout-temperature": ("rollout.temperature", number),
        "rollout-top-p": ("rollout.top_p", number),
        "rollout-top-k": ("rollout.top_k", whole),
        "rollout-max-context-len": ("rollout.max_model_len", whole),
        "eval-interval": ("evaluation.every", whole),
        "n-samples-per-eval-prompt": ("evaluation.samples_per_prompt", whole),
        "eval-max-response-len": ("evaluation.max_new_tokens", whole),
        "eval-temperature": ("evaluation.temperature", number),
        "tensor-model-parallel-size": ("trainer.parallel.tensor", whole),
        "pipeline-model-parallel-size": ("trainer.parallel.pipeline", whole),
        "context-parallel-size": ("trainer.parallel.context", whole),
        "expert-model-parallel-size": ("trainer.parallel.expert", whole),
        "entropy-coef": ("algorithm.entropy_coef", number),
        "kl-coef": ("algorithm.kl_reward_coef", number),
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
        "actor-num-gpus-per-node": ("cluster.gpus_per_node", whole),
        "wandb-project": ("logging.wandb_project", text),
    }
)
_SWITCHES: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "sequence-parallel": ("trainer.parallel.sequence", True),
        "optimizer-cpu-offload": ("trainer.optimizer.offload", True),
        "use-wandb": ("logging.wandb", True),
        "async-save": ("checkpoint.async_save", True),
        "colocate": ("cluster.placement", "colocated"),
    }
)
# Where slime and Megatron-LM take another value than this project if none is given; the objective depends on them.
_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {"weight-decay": "0.01", "adam-beta2": "0.999", "lr-decay-style": "linear", "eps-clip": "0.2"}
)
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
        "num-gpus-per-node": "the cluster's nodes are asked",
        "wandb-group": "not used",
        "optimizer": "AdamW",
        "micro-batch-size": "sequences are always packed",
    }
)
_PAIRS = {"attention-dropout": "0", "hidden-dropout": "0", "expert-tensor-parallel-size": "1"}
_KL_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl"}
_ADVANTAGES = {
    "grpo": "grpo",
    "gspo": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def is_slime(commands: Sequence[Sequence[Argument]]) -> bool:
    """Whether these are the words of one of slime's launch scripts."""
    return any(word.text in ("--rollout-batch-size", "--prompt-data") for words in commands for word in words)


def read_slime(commands: Sequence[Sequence[Argument]]) -> Imported:
    """Take over what has one meaning here."""
    given, imported = _given(commands), Imported("slime")
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in given.values}
    given.values.update(defaults)

    def shown(name: str) -> str:
        return f"--{name}" + (", its default" if name in defaults else "")

    _sampling(given, imported)
    _model_and_data(given, imported)
    _objective(given, imported)
    _layout(given, imported)
    _schedule(given, imported, shown)
    take_direct(given, imported, _DIRECT, shown)
    for name, (target, value) in _SWITCHES.items():
        if given.has(name):
            given.take(name)
            imported.set(target, value, shown(name))
    _rest(given, imported)
    imported.set("rollout.engine", "sglang", "slime's engine")
    for array in absent_arrays(commands):
        imported.decide(array, ELSEWHERE)
    return imported


def _given(commands: Sequence[Sequence[Argument]]) -> Given:
    """Options by name, each with all words up to the next one; "true" without any. Of a command line that starts
    something else first, those of the trainer."""
    values: dict[str, Any] = {}
    unknown = set[str]()
    for words in commands:
        if [word.text for word in words[:1]] == ["ray"] and [word.text for word in words[1:2]] != ["job"]:
            continue
        programs = [place for place, word in enumerate(words) if word.text.endswith("train.py")]
        name = ""
        for word in words[programs[-1] + 1 if programs else 0 :]:
            if word.text.startswith("--"):
                name, _, first = word.text[2:].partition("=")
                values[name] = first
            elif name:
                values[name] = f"{values[name]} {word.text}".strip()
            if name and not word.known:
                unknown.add(name)
    return Given({key: value or "true" for key, value in values.items()}, frozenset(unknown))


def _model_and_data(given: Given, imported: Imported) -> None:
    for name, target in (("apply-chat-template", "data.apply_chat_template"), ("rollout-shuffle", "data.shuffle")):
        is_on = given.has(name)
        given.take(name)
        imported.set(target, is_on, f"--{name}" if is_on else f"without --{name}")
    if given.has("eval-prompt-data"):
        pairs = given.take("eval-prompt-data").split()
        if len(pairs) % 2:
            imported.decide(f"--eval-prompt-data {' '.join(pairs)}", "expected pairs of a name and a path")
        else:
            imported.set("evaluation.files", pairs[1::2], "--eval-prompt-data")
    for name, remedy in (("rm-type", "reward.functions"), ("custom-rm-path", "a function of prompt, response, answer")):
        if given.has(name):
            imported.decide(
                f"--{name} {given.take(name)}", f"rewards have other names and arguments here; set {remedy}"
            )
    imported.decide("run_dir", "a new directory of this run")


def _objective(given: Given, imported: Imported) -> None:
    estimator = given.take("advantage-estimator", "grpo")
    if estimator in _ADVANTAGES:
        keeps_mean = given.has("disable-grpo-std-normalization") and estimator in ("grpo", "gspo")
        given.take("disable-grpo-std-normalization")
        imported.set(
            "algorithm.advantage",
            "grpo_mean_only" if keeps_mean else _ADVANTAGES[estimator],
            "--advantage-estimator" + (", --disable-grpo-std-normalization" if keeps_mean else ""),
        )
        imported.set("algorithm.loss", "gspo" if estimator == "gspo" else "ppo_clip", "--advantage-estimator")
    else:
        imported.decide(f"--advantage-estimator {estimator}", "needs a critic, or is not supported")
    per_token = given.has("calculate-per-token-loss")
    given.take("calculate-per-token-loss")
    origin = "--calculate-per-token-loss" if per_token else "without --calculate-per-token-loss"
    imported.set("algorithm.reduction", "tokens" if per_token else "samples", origin)
    low = given.take("eps-clip")
    imported.set("algorithm.clip_low", number(low), "--eps-clip")
    is_given = given.has("eps-clip-high")
    high = given.take("eps-clip-high", low)
    imported.set("algorithm.clip_high", number(high), "--eps-clip-high" if is_given else "--eps-clip")
    _kl(given, imported)
    if given.has("use-tis"):
        given.take("use-tis")
        imported.set("algorithm.importance_correction", "truncate", "--use-tis")
        imported.set("algorithm.importance_high", number(given.take("tis-clip", "2.0")), "--tis-clip")


def _kl(given: Given, imported: Imported) -> None:
    coefficient, kind = given.take("kl-loss-coef", "0"), given.take("kl-loss-type")
    if given.has("use-kl-loss"):
        given.take("use-kl-loss")
        imported.set("algorithm.kl_coef", number(coefficient), "--use-kl-loss, --kl-loss-coef")
    if kind in _KL_ESTIMATORS:
        imported.set("algorithm.kl_estimator", _KL_ESTIMATORS[kind], "--kl-loss-type")
    elif kind is not None:
        imported.decide(f"--kl-loss-type {kind}", "not an estimator here")


def _layout(given: Given, imported: Imported) -> None:
    """Data parallelism and engines follow from the number of GPUs."""
    axes = [
        whole(given.values.get(f"{axis}-parallel-size", "1")) for axis in ("tensor-model", "pipeline-model", "context")
    ]
    nodes, per_node = given.take("actor-num-nodes", "1"), given.values.get("actor-num-gpus-per-node")
    if per_node is not None:
        gpus = whole(nodes) * whole(per_node)
        ranks = axes[0] * axes[1] * axes[2]
        if gpus % ranks:
            imported.decide("trainer.parallel.data", f"{gpus} GPUs are no multiple of {ranks} ranks of one replica")
        else:
            imported.set("trainer.parallel.data", gpus // ranks, "GPUs of --actor-num-nodes over the other axes")
        engine_gpus = whole(given.take("rollout-num-gpus", gpus)) if not given.has("colocate") else gpus
        per_engine = whole(given.take("rollout-num-gpus-per-engine", "1"))
        imported.set("rollout.tensor", per_engine, "--rollout-num-gpus-per-engine")
        imported.set("rollout.num_engines", max(1, engine_gpus // per_engine), "GPUs of the engines")
        total = gpus if given.has("colocate") else gpus + engine_gpus
        imported.set("cluster.nodes", max(1, -(-total // whole(per_node))), "all GPUs over those of a node")
        given.take("rollout-num-gpus")
    else:
        imported.decide("trainer.parallel.data, rollout.num_engines", "the script names no number of GPUs")
    if given.has("max-tokens-per-gpu"):
        tokens = whole(given.take("max-tokens-per-gpu")) * axes[2]
        origin = "--max-tokens-per-gpu" + (" times --context-parallel-size" if axes[2] > 1 else "")
        imported.set("trainer.target_tokens_per_batch", tokens, origin)
    granularity = given.take("recompute-granularity")
    if granularity in ("full", "selective"):
        imported.set("trainer.recompute", granularity, "--recompute-granularity")


def _sampling(given: Given, imported: Imported) -> None:
    if given.has("eval-prompt-data") and not given.has("eval-temperature"):
        origin = "--rollout-temperature, in evaluations too"
        imported.set("evaluation.temperature", number(given.values.get("rollout-temperature", "1.0")), origin)
    if given.has("rollout-stop-token-ids"):
        ids = [whole(each) for each in given.take("rollout-stop-token-ids").split()]
        imported.set("rollout.stop_token_ids", ids, "--rollout-stop-token-ids")
    choice = given.take("dynamic-sampling-filter-path")
    if choice is not None and choice.rpartition(".")[2] == "check_reward_nonzero_std":
        imported.set("rollout.drop_zero_spread", True, "--dynamic-sampling-filter-path")
    elif choice is not None:
        why = "groups are left out by the spread of their rewards alone, rollout.drop_zero_spread"
        imported.decide(f"--dynamic-sampling-filter-path {choice}", why)


def _schedule(given: Given, imported: Imported, shown: Any) -> None:
    style = given.take("lr-decay-style")
    if style in ("constant", "linear", "cosine"):
        imported.set("trainer.optimizer.decay", style, shown("lr-decay-style"))
    elif style is not None:
        imported.decide(f"--lr-decay-style {style}", "use constant, linear or cosine in trainer.optimizer.decay")
    if given.has("num-steps-per-rollout"):
        updates = whole(given.take("num-steps-per-rollout"))
        imported.set("algorithm.minibatches", updates, "--num-steps-per-rollout")
        given.take("global-batch-size")
    elif all(given.has(name) for name in ("global-batch-size", "rollout-batch-size", "n-samples-per-prompt")):
        samples = whole(given.values["rollout-batch-size"]) * whole(given.values["n-samples-per-prompt"])
        size = whole(given.take("global-batch-size"))
        if samples % size:
            imported.decide(f"--global-batch-size {size}", f"does not divide the {samples} samples of a step")
        else:
            imported.set("algorithm.minibatches", samples // size, "samples of a step over --global-batch-size")


def _rest(given: Given, imported: Imported) -> None:
    read = {name: value for name, value in given.taken.items() if name not in _DEFAULTS}
    imported.account_for({f"--{name}": _setting(name, value) for name, value in read.items()})
    imported.forget([f"--{name}" for name in given.unknown])
    for name, value in given.values.items():
        setting = _setting(name, value)
        if name in given.unknown:
            imported.decide(setting, UNKNOWN_VALUE)
        elif name in _NEEDLESS:
            imported.needless[setting] = _NEEDLESS[name]
        elif name in _PAIRS and number(value) == float(_PAIRS[name]):
            imported.needless[setting] = "the only value here"
        elif name.startswith("sglang-"):
            argument = name.removeprefix("sglang-").replace("-", "_")
            imported.set(f"rollout.engine_args.{argument}", scalar(value), f"--{name}")
        else:
            imported.decide(setting, "no counterpart is known")


def _setting(name: str, value: str) -> str:
    return f"--{name}" + ("" if value == "true" else f" {printable(name, value)}")
