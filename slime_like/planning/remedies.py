"""What is too large in a plan, each with the settings that make it smaller."""

from slime_like.checks.fsdp import BACKEND as FSDP
from slime_like.config import RunConfig
from slime_like.planning.engines import share_setting
from slime_like.planning.memory import OPTIMIZER_STEP, REFERENCE_SCORING, PhaseMemory
from slime_like.planning.result import Plan
from slime_like.planning.units import memory_text


def misfits(plan: Plan, config: RunConfig) -> dict[str, str]:
    """What is too large, each with the settings that make it smaller."""
    problems = dict(_misfit(phase, config) for phase in plan.phases if not phase.fits)
    if plan.engine is not None and plan.engine.longest_sequences < 1:
        problem = (
            f"the KV cache of an engine holds {plan.engine.kv_tokens:,} tokens, less than one sequence of "
            f"{config.max_model_len:,}"
        )
        problems[problem] = (
            f"raise {'' if _has_one_gpu(config) else 'rollout.tensor or '}{share_setting(config)}, or lower "
            "rollout.max_model_len"
        )
    if plan.host is not None and not plan.host.fits and plan.host.capacity is not None:
        largest = max(plan.host.items, key=lambda item: item.nbytes)
        problem = (
            f"host memory: a node needs {memory_text(plan.host.total)}, more than cluster.host_memory_gib="
            f"{plan.host.capacity / 2**30:g}; most of it is {largest.name}, {memory_text(largest.nbytes)}"
        )
        problems[problem] = host_remedy(largest.name)
    return problems


def _misfit(phase: PhaseMemory, config: RunConfig) -> tuple[str, str]:
    largest = max(phase.items, key=lambda item: item.nbytes)
    cure = remedy(largest.name, config)
    if phase.phase == REFERENCE_SCORING:
        cure = cure.replace("trainer.parallel", "reference.parallel")
    problem = (
        f"GPU memory, {phase.place}: {memory_text(phase.total)} are needed, {memory_text(-phase.margin)} more than the "
        f"GPU's {memory_text(phase.capacity)}; most of it is {largest.name}, {memory_text(largest.nbytes)}"
    )
    return problem, cure


def remedy(item: str, config: RunConfig) -> str:
    """Settings that make an item of the memory table smaller."""
    if _has_one_gpu(config):
        return _remedy_on_one_gpu(item, config)
    fsdp = config.trainer.backend == FSDP
    layout = "more trainer.parallel.data" if fsdp else "a larger trainer.parallel.tensor or pipeline"
    if item == "activations":
        less = [] if config.trainer.recompute == "full" else ["trainer.recompute: full"]
        return "use " + ", ".join([*less, "a smaller trainer.target_tokens_per_batch", "more trainer.parallel.context"])
    if item == "gradients" and fsdp and config.trainer.fsdp.accumulate != "sharded":
        return "use trainer.fsdp.accumulate: sharded"
    if item in ("optimizer state", OPTIMIZER_STEP) and not fsdp:
        return f"use {layout}, more trainer.parallel.data with optimizer.distributed, or trainer.optimizer.offload"
    if item.endswith("(assumed)"):
        return "it does not depend on the run: use GPUs with more memory (cluster.gpu, cluster.gpu_memory_gib)"
    remedies = {
        "head": "lower trainer.head_chunk_tokens" + ("" if fsdp else ", or raise trainer.parallel.tensor"),
        "KV cache": f"lower {share_setting(config)}",
        "engine weights": "raise rollout.tensor",
        "sync buffers": "lower sync.bucket_mb, which cannot be less than one embedding, or use GPUs with more memory",
    }
    return remedies.get(item, f"use {layout}")


def _has_one_gpu(config: RunConfig) -> bool:
    """There is nothing to split over."""
    return (config.cluster.nodes or 1) * config.cluster.gpus_per_node == 1


def _remedy_on_one_gpu(item: str, config: RunConfig) -> str:
    larger = "a smaller model, or a GPU with more memory (cluster.gpu, cluster.gpu_memory_gib)"
    if item == "activations":
        less = "" if config.trainer.recompute == "full" else "trainer.recompute: full, "
        return f"use {less}a smaller trainer.target_tokens_per_batch"
    if item in ("optimizer state", OPTIMIZER_STEP) and not config.trainer.optimizer.offload:
        return f"use trainer.optimizer.offload, {larger}"
    remedies = {"head": "lower trainer.head_chunk_tokens", "KV cache": f"lower {share_setting(config)}"}
    return remedies.get(item, f"use {larger}")


_HOST_REMEDIES = {
    "sync.delta": "use sync.delta: never",
    "trainers, while": "use cluster.placement: separate, or more trainer.parallel.pipeline",
    "engine weights": "use cluster.placement: separate, or more trainer.parallel.pipeline",
    "activations, offloaded": "use trainer.recompute: full instead of trainer.activation_offload",
    "checkpoint save, asynchronous": "use checkpoint.async_save: false",
    "weight buckets": "lower sync.bucket_mb",
    "Ray's object store": "lower cluster.object_store_mb",
}


def host_remedy(item: str) -> str:
    """Settings that make an item of a node's host memory smaller."""
    found = (remedy for begin, remedy in _HOST_REMEDIES.items() if item.startswith(begin))
    return next(found, "offload less, or raise trainer.parallel.pipeline")
