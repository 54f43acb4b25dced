"""Engines of verl's PPO trainer, what they sample, and how its GPUs are divided."""

from collections.abc import Sequence

from slime_like.config.foreign.imported import Given, Imported, flag, number, scalar, whole
from slime_like.config.foreign.verl_objective import ACTOR

ROLLOUT = "actor_rollout_ref.rollout"


def read_engine(given: Given, imported: Imported) -> None:
    engine = given.take(f"{ROLLOUT}.name")
    _evaluation(given, imported)
    if engine not in ("vllm", "sglang"):
        shown = f"{ROLLOUT}.name" + ("" if engine is None else f"={engine}")
        imported.decide(shown, "use vllm, sglang or transformers in rollout.engine")
        return
    memory, sequences = given.take(f"{ROLLOUT}.gpu_memory_utilization"), given.take(f"{ROLLOUT}.max_num_seqs")
    eager, batched = given.take(f"{ROLLOUT}.enforce_eager"), given.take(f"{ROLLOUT}.max_num_batched_tokens")
    imported.set("rollout.engine", engine, f"{ROLLOUT}.name")
    sources = ("gpu_memory_utilization", "max_num_seqs", "enforce_eager", "max_num_batched_tokens")
    names: Sequence[str] = sources
    values = (memory, sequences, eager, batched)
    if engine == "sglang":
        names = ("mem_fraction_static", "max_running_requests", "disable_cuda_graph")
        if batched is not None:
            imported.decide(f"{ROLLOUT}.max_num_batched_tokens={batched}", "an argument of vLLM's alone")
    for name, value, source in zip(names, values, sources, strict=False):
        if value is not None:
            imported.set(f"rollout.engine_args.{name}", scalar(value), f"{ROLLOUT}.{source}")


def _evaluation(given: Given, imported: Imported) -> None:
    if flag(given.take(f"{ROLLOUT}.val_kwargs.do_sample", False)):
        imported.set(
            "evaluation.temperature",
            number(given.take(f"{ROLLOUT}.val_kwargs.temperature", 1.0)),
            f"{ROLLOUT}.val_kwargs.temperature",
        )
    given.take(f"{ROLLOUT}.val_kwargs.temperature")
    for name, whole_distribution in (("top_p", 1.0), ("top_k", -1.0)):
        value = given.take(f"{ROLLOUT}.val_kwargs.{name}")
        if value is not None and number(value) != whole_distribution:
            imported.decide(f"{ROLLOUT}.val_kwargs.{name}={value}", "evaluations draw from the whole distribution")


def read_dropped_groups(given: Given, imported: Imported) -> None:
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


def read_layout(given: Given, imported: Imported) -> None:
    """verl's trainer and engines share their GPUs; data parallelism and the number of engines follow."""
    imported.set("cluster.placement", "colocated", "verl's hybrid engine")
    strategy = given.take(f"{ACTOR}.strategy", "fsdp")
    is_megatron = strategy == "megatron" or any(name.startswith(f"{ACTOR}.megatron.") for name in given.values)
    imported.set("trainer.backend", "megatron" if is_megatron else "fsdp", f"{ACTOR}.strategy")
    names = (
        [
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.context_parallel_size",
        ]
        if is_megatron
        else ["ulysses_sequence_parallel_size"]
    )
    sizes = [whole(given.known(f"{ACTOR}.{name}", 1)) for name in names]
    ranks, context = 1, sizes[-1]
    for size in sizes:
        ranks *= size
    tokens = given.take(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if tokens is not None:
        origin = f"{ACTOR}.ppo_max_token_len_per_gpu" + (" times context parallelism" if context > 1 else "")
        imported.set("trainer.target_tokens_per_batch", whole(tokens) * context, origin)
    counts = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, **{f"{ACTOR}.{name}": 1 for name in names}}
    open_counts = [name for name in counts if name in given.unknown]
    gpus = whole(given.known("trainer.nnodes", 1)) * whole(given.known("trainer.n_gpus_per_node", 8))
    engine = whole(given.take(f"{ROLLOUT}.tensor_model_parallel_size", 2))
    imported.set("rollout.tensor", engine, f"{ROLLOUT}.tensor_model_parallel_size")
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
    batch, size = given.known("data.train_batch_size", None), given.take(f"{ACTOR}.ppo_mini_batch_size")
    if batch is None and size is not None:
        imported.decide(f"{ACTOR}.ppo_mini_batch_size={size}", "set algorithm.minibatches, updates of a step")
    if batch is not None and size is not None:
        if whole(batch) % whole(size):
            imported.decide(f"{ACTOR}.ppo_mini_batch_size={size}", f"does not divide data.train_batch_size={batch}")
        else:
            origin = f"data.train_batch_size over {ACTOR}.ppo_mini_batch_size"
            imported.set("algorithm.minibatches", whole(batch) // whole(size), origin)
    if flag(given.take(f"{ACTOR}.use_prefix_grouper", False)):
        imported.set("trainer.share_prefixes", "prompts", f"{ACTOR}.use_prefix_grouper")
    if flag(given.take("actor_rollout_ref.model.enable_gradient_checkpointing", True)):
        imported.set("trainer.recompute", "full", "actor_rollout_ref.model.enable_gradient_checkpointing")


def read_turns(given: Given, imported: Imported) -> None:
    for name in [name for name in given.values if name.startswith(f"{ROLLOUT}.multi_turn.")]:
        value = given.take(name)
        if value is not None:
            why = "conversations are rollout.environment's, with max_turns, or rollout.agent's"
            imported.decide(f"{name}={value}", why)
