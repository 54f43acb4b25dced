"""How engines, and the division of GPUs, follow from settings of slime."""

from collections.abc import Mapping
from types import MappingProxyType

from slime_like.config.foreign.given import Given, Rule
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.slime_objective import is_supervised
from slime_like.config.foreign.values import whole


def _backend(given: Given, imported: Imported) -> None:
    backend = given.get("train-backend")
    if backend in ("fsdp", "megatron"):
        imported.set("trainer.backend", backend, "--train-backend")
    elif backend is not None:
        imported.decide(given.setting("train-backend"), "set trainer.backend")


def _axis(given: Given, axis: str) -> int:
    return whole(given.get(f"{axis}-parallel-size", "1"))


def _gpus(given: Given) -> int:
    """Of the trainer."""
    return whole(given.get("actor-num-nodes", "1")) * whole(given.get("actor-num-gpus-per-node"))


def _engine_gpus(given: Given) -> int:
    gpus = _gpus(given)
    return gpus if given.note("colocate") else whole(given.get("rollout-num-gpus", gpus))


def _data_parallel(given: Given, imported: Imported) -> None:
    if not given.has("actor-num-gpus-per-node"):
        imported.decide("trainer.parallel.data", "the script names no number of GPUs")
        return
    gpus = _gpus(given)
    ranks = _axis(given, "tensor-model") * _axis(given, "pipeline-model") * _axis(given, "context")
    if gpus % ranks:
        imported.decide("trainer.parallel.data", f"{gpus} GPUs are no multiple of {ranks} ranks of one replica")
    else:
        imported.set("trainer.parallel.data", gpus // ranks, "GPUs of --actor-num-nodes over the other axes")


def _engine(given: Given, imported: Imported) -> None:
    if not is_supervised(given):
        imported.set("rollout.engine", "sglang", "slime's engine")


def _engine_size(given: Given, imported: Imported) -> None:
    if is_supervised(given):
        return
    per_engine = whole(given.get("rollout-num-gpus-per-engine", "1"))
    imported.set("rollout.tensor", per_engine, "--rollout-num-gpus-per-engine")


def _engines(given: Given, imported: Imported) -> None:
    if is_supervised(given):
        return
    if not given.has("actor-num-gpus-per-node"):
        imported.decide("rollout.num_engines", "the script names no number of GPUs")
        return
    engine_gpus = _engine_gpus(given)
    if given.note("colocate"):
        given.unused(imported, "--colocate: engines have the trainer's GPUs", "rollout-num-gpus")
    per_engine = whole(given.get("rollout-num-gpus-per-engine", "1"))
    imported.set("rollout.num_engines", max(1, engine_gpus // per_engine), "GPUs of the engines")


def _of_a_node(given: Given) -> str:
    """Return the option that gives the GPUs of a node. With separate engines, a node may have more than the trainer."""
    is_shared = given.note("colocate") or is_supervised(given)
    return "actor-num-gpus-per-node" if is_shared else "num-gpus-per-node"


def _gpus_per_node(given: Given, imported: Imported) -> None:
    name = _of_a_node(given)
    if given.has(name):
        imported.set("cluster.gpus_per_node", whole(given.get(name)), f"--{name}")


def _nodes(given: Given, imported: Imported) -> None:
    if not given.has("actor-num-gpus-per-node"):
        return
    name = _of_a_node(given)
    total = _gpus(given) + (0 if name.startswith("actor") else _engine_gpus(given))
    if given.has(name):
        imported.set("cluster.nodes", max(1, -(-total // whole(given.get(name)))), "all GPUs over those of a node")
    else:
        imported.decide("cluster.nodes, cluster.gpus_per_node", f"{total} GPUs in all; --{name} is not given")


def _token_budget(given: Given, imported: Imported) -> None:
    tokens = given.get("max-tokens-per-gpu")
    if tokens is not None:
        context = _axis(given, "context")
        origin = "--max-tokens-per-gpu" + (" times --context-parallel-size" if context > 1 else "")
        imported.set("trainer.target_tokens_per_batch", whole(tokens) * context, origin)


_RECOMPUTE = {"full": "full", "selective": "none"}  # flash attention recomputes by itself


def _recompute(given: Given, imported: Imported) -> None:
    name = "gradient-checkpointing" if given.note("gradient-checkpointing") else "recompute-granularity"
    granularity = "full" if name == "gradient-checkpointing" else given.get(name)
    if granularity in _RECOMPUTE:
        imported.set("trainer.recompute", _RECOMPUTE[granularity], f"--{name}")
    elif granularity is not None:
        imported.decide(given.setting("recompute-granularity"), "use full or none in trainer.recompute")


ENGINE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "trainer.backend": _backend,
        "trainer.parallel.data": _data_parallel,
        "rollout.engine": _engine,
        "rollout.tensor": _engine_size,
        "rollout.num_engines": _engines,
        "cluster.gpus_per_node": _gpus_per_node,
        "cluster.nodes": _nodes,
        "trainer.target_tokens_per_batch": _token_budget,
        "trainer.recompute": _recompute,
    }
)
"""By the fields here that a rule decides."""
