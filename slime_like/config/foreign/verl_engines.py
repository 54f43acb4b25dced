"""How engines, and the division of GPUs, follow from settings of verl's PPO trainer."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from slime_like.config.foreign.given import Given, Rule
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.values import flag, number, scalar, whole
from slime_like.config.foreign.verl_objective import ACTOR, updates_of_a_step

ROLLOUT = "actor_rollout_ref.rollout"
_MEGATRON_AXES = tuple(
    f"{ACTOR}.megatron.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")
)
_ENGINE_GPUS = f"{ROLLOUT}.tensor_model_parallel_size"
_OWN_NODES = (f"{ROLLOUT}.nnodes", "rollout.nnodes")
_ULYSSES_OF_FSDP = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
_ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
_ENGINE_ARGUMENTS = {
    "gpu_memory_utilization": ("gpu_memory_utilization", "mem_fraction_static"),
    "max_num_seqs": ("max_num_seqs", "max_running_requests"),
    "enforce_eager": ("enforce_eager", "disable_cuda_graph"),
    "max_num_batched_tokens": ("max_num_batched_tokens", None),
}
"""verl's name, to vLLM's argument and SGLang's."""


def _engine(given: Given, imported: Imported) -> None:
    engine = given.get(f"{ROLLOUT}.name")
    if engine in ("vllm", "sglang"):
        imported.set("rollout.engine", engine, f"{ROLLOUT}.name")
    else:
        shown = f"{ROLLOUT}.name" + ("" if engine is None else f"={engine}")
        imported.decide(shown, "use vllm, sglang or transformers in rollout.engine")


def _engine_argument(given: Given, imported: Imported, name: str) -> None:
    setting = f"{ROLLOUT}.{name}"
    value = given.get(setting)
    if value is None:
        return
    engine = given.get(f"{ROLLOUT}.name")
    argument = _ENGINE_ARGUMENTS[name][engine == "sglang"] if engine in ("vllm", "sglang") else None
    if argument is None:
        imported.decide(f"{setting}={value}", "set it in rollout.engine_args, where the engine has such an argument")
    else:
        imported.set(f"rollout.engine_args.{argument}", scalar(value), setting)


def _own_arguments(given: Given, imported: Imported) -> None:
    """``engine_kwargs`` of the engine that is used; those of another one have no effect."""
    engine, prefix = given.get(f"{ROLLOUT}.name"), f"{ROLLOUT}.engine_kwargs."
    for name in [name for name in given.values if name.startswith(prefix)]:
        owner, _, argument = name.removeprefix(prefix).partition(".")
        if owner != engine:
            given.unused(imported, f"{ROLLOUT}.name={engine}", name)
        elif not argument.isidentifier():
            imported.decide(given.setting(name), "set it in rollout.engine_args")
        else:
            imported.set(f"rollout.engine_args.{argument}", scalar(given.get(name)), name)


def _evaluation_temperature(given: Given, imported: Imported) -> None:
    """Greedy by default, in both projects."""
    name, switch = f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.do_sample"
    temperature = number(given.get(name, 0))
    if flag(given.get(switch, False)) or temperature == 0:
        imported.set("evaluation.temperature", temperature, name)
    else:
        why = f"versions of verl differ in whether it counts while {switch} is off; set evaluation.temperature"
        imported.decide(given.setting(name), why)


def _evaluation_support(given: Given, imported: Imported) -> None:
    for name, whole_distribution in (("top_p", 1.0), ("top_k", -1.0)):
        setting = f"{ROLLOUT}.val_kwargs.{name}"
        value = given.get(setting)
        if value is not None and number(value) != whole_distribution:
            imported.decide(f"{setting}={value}", "evaluations draw from the whole distribution")


def _dropped_groups(given: Given, imported: Imported) -> None:
    """verl bounds batches of prompts, this project prompts that were left out. Of 0 there is no bound."""
    name = "algorithm.filter_groups.max_num_gen_batches"
    if not flag(given.get("algorithm.filter_groups.enable", False)):
        given.unused(imported, "algorithm.filter_groups.enable is off", name, "algorithm.filter_groups.metric")
        return
    most, batch = whole(given.get(name, 0)), given.get("data.train_batch_size")
    sampled = given.get("data.gen_batch_size", batch)
    if most > 0 and batch is not None:
        origin = "max_num_gen_batches times the prompts of one, less those of a step"
        imported.set("rollout.max_drops_per_step", max(1, most * whole(sampled) - whole(batch)), origin)
    else:
        imported.decide("rollout.max_drops_per_step", "verl has no bound here; set one")


def _turns(given: Given, imported: Imported) -> None:
    switch = f"{ROLLOUT}.multi_turn.enable"
    names = [name for name in given.values if name.startswith(f"{ROLLOUT}.multi_turn.")]
    if not flag(given.get(switch, False)):
        given.unused(imported, f"{switch} is off", *names)
        return
    for name in filter(given.note, names):
        imported.decide(
            given.setting(name), "conversations are rollout.environment's, with max_turns, or rollout.agent's"
        )


def _strategy(given: Given) -> str:
    """``model_engine`` chooses it in later versions; settings of Megatron-LM alone choose it, too."""
    if f"{ACTOR}.strategy" not in given.values:
        engine = given.get("model_engine")
        if engine is not None and engine != "dp":
            return str(engine)
        if any(name.startswith(f"{ACTOR}.megatron.") for name in given.values):
            return "megatron"
    return str(given.get(f"{ACTOR}.strategy", "fsdp"))


def _is_megatron(given: Given) -> bool:
    return _strategy(given) == "megatron"


def _backend(given: Given, imported: Imported) -> None:
    strategy = _strategy(given)
    is_chosen = f"{ACTOR}.strategy" not in given.values and "model_engine" in given.values
    name = "model_engine" if is_chosen else f"{ACTOR}.strategy"
    if strategy in ("fsdp", "fsdp2", "megatron"):
        imported.set("trainer.backend", "megatron" if strategy == "megatron" else "fsdp", name)
        if strategy != "megatron":
            imported.set("trainer.fsdp.accumulate", "sharded", f"{name}: gradients are sharded in each micro-batch")
    else:
        imported.decide(f"{name}={strategy}", "set trainer.backend to fsdp or megatron")


def _apart(given: Given) -> list[str]:
    """Settings of verl's asynchronous trainers."""
    counts = [name for name in _OWN_NODES if str(given.get(name, 0)) != "0"]
    mode = "trainer.v1.trainer_mode"
    modes = [mode] * (given.get(mode, "sync") != "sync")
    return [*counts, *modes, *(name for name in given.values if name.startswith("async_training."))]


def _placement(given: Given, imported: Imported) -> None:
    name = "actor_rollout_ref.hybrid_engine"
    if apart := _apart(given):
        why = "verl samples asynchronously, on separate GPUs; set cluster.placement, rollout.num_engines"
        imported.decide(", ".join(map(given.setting, apart)), f"{why} and rollout.max_staleness")
    elif flag(given.get(name, True)):
        imported.set("cluster.placement", "colocated", "verl's hybrid engine")
    else:
        imported.decide(given.setting(name), "set cluster.placement")


def _axes(given: Given) -> tuple[str, ...]:
    if _is_megatron(given):
        return _MEGATRON_AXES
    return (_ULYSSES_OF_FSDP if whole(given.get(_ULYSSES_OF_FSDP, 1)) > 1 else _ULYSSES,)


def _context(given: Given, imported: Imported) -> None:
    """Both backends have one name for it here; verl reads that of its strategy alone."""
    name = _axes(given)[-1]
    if given.has(name):
        imported.set("trainer.parallel.context", whole(given.get(name)), name)
    for other in {_ULYSSES, _ULYSSES_OF_FSDP} - {name}:
        given.unused(imported, f"{name} counts", other)


def _sequence(given: Given, imported: Imported) -> None:
    """Megatron's, by default; without tensor parallelism there is nothing to divide."""
    name = f"{ACTOR}.megatron.sequence_parallel"
    if _is_megatron(given):
        is_on = flag(given.get(name, True)) and whole(given.get(_MEGATRON_AXES[0], 1)) > 1
        imported.set("trainer.parallel.sequence", is_on, name)


def _token_budget(given: Given, imported: Imported) -> None:
    name, switch = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"
    if not given.has(name) and not flag(given.get(switch, False)):
        imported.decide("trainer.target_tokens_per_batch", f"{switch} is off: verl counts sequences")
    else:
        context = whole(given.get(_axes(given)[-1], 1))
        origin = name + (" times context parallelism" if context > 1 else "")
        imported.set("trainer.target_tokens_per_batch", whole(given.get(name, 16384)) * context, origin)


def _gpus(given: Given) -> int:
    return whole(given.get("trainer.nnodes", 1)) * whole(given.get("trainer.n_gpus_per_node", 8))


def _divided(imported: Imported, target: str, gpus: int, parts: int, what: str) -> None:
    if gpus % parts:
        imported.decide(target, f"{gpus} GPUs are no multiple of {parts} {what}")
    else:
        imported.set(target, gpus // parts, f"GPUs over {what}")


def _data_parallel(given: Given, imported: Imported) -> None:
    ranks = 1
    for axis in _axes(given):
        ranks *= whole(given.get(axis, 1))
    _divided(imported, "trainer.parallel.data", _gpus(given), ranks, "ranks of a replica")


def _engine_size(given: Given, imported: Imported) -> None:
    if not given.has(_ENGINE_GPUS) and _is_megatron(given):
        imported.decide("rollout.tensor", f"versions of verl differ in {_ENGINE_GPUS}, which is not given")
    else:
        imported.set("rollout.tensor", whole(given.get(_ENGINE_GPUS, 2)), _ENGINE_GPUS)


def _engines(given: Given, imported: Imported) -> None:
    replicas = f"{ROLLOUT}.data_parallel_size"
    if _apart(given):
        return  # the placement has the reason
    if given.has(replicas) and whole(given.get(replicas)) != 1:
        imported.decide(given.setting(replicas), "set rollout.num_engines, the replicas of all engines")
        return
    if not given.has(_ENGINE_GPUS) and _is_megatron(given):
        imported.decide("rollout.num_engines", "GPUs over rollout.tensor")
        return
    engine = whole(given.get(_ENGINE_GPUS, 2))
    _divided(imported, "rollout.num_engines", _gpus(given), engine, "GPUs of an engine")


def _minibatches(given: Given, imported: Imported) -> None:
    name = f"{ACTOR}.ppo_mini_batch_size"
    updates = updates_of_a_step(given)
    if updates is not None:
        imported.set("algorithm.minibatches", updates, f"data.train_batch_size over {name}")
    elif given.has(name):
        imported.decide(given.setting(name), "set algorithm.minibatches, updates of a step")


def _shared_prefixes(given: Given, imported: Imported) -> None:
    if flag(given.get(f"{ACTOR}.use_prefix_grouper", False)):
        imported.set("trainer.share_prefixes", "prompts", f"{ACTOR}.use_prefix_grouper")


def _recompute(given: Given, imported: Imported) -> None:
    name = f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"
    general = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if _is_megatron(given):
        granularity = given.get(name)
        if granularity not in ("full", "selective", None):
            raise ValueError(f"{granularity} is neither full nor selective")
        imported.set("trainer.recompute", "full" if granularity == "full" else "none", name)
        given.unused(imported, f"{name} counts", general)
    else:
        imported.set("trainer.recompute", "full" if flag(given.get(general, True)) else "none", general)


ENGINE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "rollout.engine": _engine,
        **{f"rollout.engine_args, for {name}": partial(_engine_argument, name=name) for name in _ENGINE_ARGUMENTS},
        "rollout.engine_args": _own_arguments,
        "evaluation.temperature": _evaluation_temperature,
        "evaluation.temperature alone": _evaluation_support,
        "rollout.max_drops_per_step": _dropped_groups,
        "rollout.environment.name": _turns,
        "trainer.backend": _backend,
        "cluster.placement": _placement,
        "trainer.parallel.sequence": _sequence,
        "trainer.parallel.context": _context,
        "trainer.target_tokens_per_batch": _token_budget,
        "trainer.parallel.data": _data_parallel,
        "rollout.tensor": _engine_size,
        "rollout.num_engines": _engines,
        "algorithm.minibatches": _minibatches,
        "trainer.share_prefixes": _shared_prefixes,
        "trainer.recompute": _recompute,
    }
)
"""By the fields here that a rule decides."""
