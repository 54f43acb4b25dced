"""Training state on disk in Megatron's distributed format (torch_dist), readable under any layout."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import distributed as dist

from backends.common.checkpoint.stored import FORMAT, StoredTensors, require_schedule
from backends.common.checkpoint.writing import CheckpointWriter, Part, to_bytes
from backends.common.process.agreement import together
from backends.common.trainer.host_memory import HostCopies
from backends.common.trainer.state import is_added
from backends.megatron.optimizer import Optimizer, sharded_optimizer_state
from slime_like.plugins.options import load_option
from slime_like.system.json_collectives import all_gather_json

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory

COMMON = "common.pt"
PLAIN_FILES = (COMMON, "metadata.json")
"""Small files of Megatron's format, besides torch's index."""

_METADATA = {"chained_optim_avoid_prefix": True}
"""Setting for optimizer keys that don't depend on how parameters are spread over Megatron's optimizers."""

_EXTRA_STATE = "_extra_state"
"""Part of the keys of Transformer Engine's additional state: scales of 8-bit training, which is not done here."""

OPTIMIZER = "optimizer."


def plain_files(common: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of ``PLAIN_FILES``."""
    settings = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
    return {COMMON: to_bytes({**common, "format": FORMAT}), PLAIN_FILES[1]: settings.encode()}


def open_stored(directory: Path) -> StoredTensors:
    """Open a checkpoint. Raises ``CheckpointError`` if it is damaged."""

    def read_common(directory: Path) -> Any:
        return torch.load(directory / COMMON, map_location="cpu", weights_only=True)

    return StoredTensors(directory, PLAIN_FILES, read_common)


def parts_of(sharded: Sharded) -> Iterator[Part]:
    """Describe a parameter's place on disk. The data are views of the parameter."""
    for each in nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]:
        data = each.data.view((1,) * each.prepend_axis_num + tuple(each.data.shape))
        shape, offset = tuple(each.global_shape), tuple(each.global_offset)
        yield Part(each.key, data, shape, offset, each.allow_shape_mismatch)


def plan_checkpoint(
    directory: Path, model_chunks: Sequence[GPTModel], optimizer: Optimizer, copies: HostCopies | None = None
) -> CheckpointWriter:
    """Return a writer of model, optimizer, schedule and random state into ``directory``. Collective over the world.

    The caller handles naming and atomicity; all ranks must share the file system.

    Args:
        copies: memory for a copy of the current state, which may change before it is written.

    Raises:
        CheckpointError: the disk rejected a write; on every rank, even if only one could not write.
    """
    _fill_adam_state(optimizer)
    common = {"scheduler": optimizer.scheduler.state_dict(), "layout": _layout(), "adam_step": _adam_step(optimizer)}
    common["extra"] = {}  # earlier versions read it
    state = _sharded_state(model_chunks, optimizer)
    objects = {_random_name(): to_bytes([_random_state()])}
    return _writer(directory, model_chunks, state, objects, common, copies)


def _writer(
    directory: Path,
    model_chunks: Sequence[GPTModel],
    state: Sequence[Sharded],
    objects: Mapping[str, bytes],
    common: Mapping[str, Any],
    copies: HostCopies | None = None,
) -> CheckpointWriter:
    mine = [part for each in state if is_main_replica(each.replica_id) for part in parts_of(each)]
    device = next(model_chunks[0].parameters()).device
    return CheckpointWriter(directory, mine, objects, plain_files(common), device, copies.of if copies else None)


def load_checkpoint(
    directory: Path, model_chunks: Sequence[GPTModel], optimizer: Optimizer, any_schedule: bool = False
) -> None:
    """Read in place what a writer of ``plan_checkpoint`` wrote. Collective over the world.

    The same layout restores everything bit for bit, including random state. Another layout restores weights, optimizer
    and schedule; random states belong to the ranks of the old layout and are not restored.

    Args:
        any_schedule: continue in the configured schedule, even if it differs from the saved one.

    Raises:
        CheckpointError: no checkpoint there, damaged, of another model, or with another learning-rate schedule.
    """
    _fill_adam_state(optimizer)
    state = _sharded_state(model_chunks, optimizer)
    settings = "model.path and trainer.optimizer settings"
    stored = _read(directory, model_chunks, state, (), settings)
    _set_adam_step(optimizer, stored.common["adam_step"])
    _restore_schedule(directory, optimizer.scheduler, stored.common["scheduler"], any_schedule)
    if stored.common["layout"] == _layout():
        (random,) = stored.read_object(_random_name())
        torch.set_rng_state(random["cpu"])
        if random["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(random["tracker"])


def save_weights(directory: Path, model_chunks: Sequence[GPTModel]) -> None:
    """Write what ``load_weights`` reads. Collective over the world."""
    state = [*sharded_models(model_chunks).values()]
    _writer(directory, model_chunks, state, {}, {"layout": _layout()}).write_all()


def load_weights(directory: Path, model_chunks: Sequence[GPTModel]) -> None:
    """Read only the model's weights, in place, under any layout. Collective over the world.

    Raises:
        CheckpointError: no checkpoint there, damaged, or of another model.
    """
    _read(directory, model_chunks, [*sharded_models(model_chunks).values()], (OPTIMIZER,))


def _read(
    directory: Path,
    model_chunks: Sequence[GPTModel],
    state: Sequence[Sharded],
    ignored: tuple[str, ...],
    settings: str = "model.path",
) -> StoredTensors:
    """Fill the tensors of ``state``, on all ranks or on none of them if the checkpoint does not fit."""
    device, what = next(model_chunks[0].parameters()).device, f"reading {directory}"
    stored = together(lambda: open_stored(directory), what, device)
    parts = [part for each in state for part in parts_of(each)]
    wanted = {part.name: (part.shape, part.is_padded) for part in parts}
    everyones = {name: each for found in all_gather_json(wanted, device) for name, each in found.items()}
    together(lambda: stored.require(everyones, ignored, settings), what, device)
    together(lambda: stored.read(parts), what, device)
    return stored


def _restore_schedule(directory: Path, scheduler: Any, saved: dict[str, Any], any_schedule: bool) -> None:
    """Restore the saved position in the *configured* schedule, which must equal the saved schedule by default."""
    now = scheduler.state_dict()
    # A constant rate does not depend on the run's end, so such a run may be extended.
    free = {"num_steps", "lr_decay_steps"} if now["lr_decay_style"] == "constant" else {"num_steps"}
    require_schedule(directory, saved, now, [] if any_schedule else [key for key in now if key not in free])
    scheduler.num_steps = 0
    scheduler.step(increment=saved["num_steps"])


# ----------------------------------------------------------------------------------------------------------- the state
def _sharded_state(model_chunks: Sequence[GPTModel], optimizer: Optimizer) -> list[Sharded]:
    """Describe weights, main weights and moments. The rest of Megatron's state, such as parameter groups, follows from
    configuration and schedule."""
    models = sharded_models(model_chunks)
    if optimizer.is_distributed:
        tensors = [each for part in optimizer.parts for each in sharded_optimizer_state(part, models).values()]
    else:
        state = optimizer.megatron.sharded_state_dict(models, metadata=_METADATA)
        tensors = [each for each in nested_values(state) if isinstance(each, Sharded)]
    return [*models.values(), *tensors]


def sharded_models(model_chunks: Sequence[GPTModel]) -> dict[str, Sharded]:
    """Describe weights, or only factors if there are some."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **_METADATA}
    found: dict[str, Sharded] = {}
    for index, chunk in enumerate(model_chunks):
        state = chunk.sharded_state_dict(metadata=metadata)
        if any(is_added(name) for name, _ in chunk.named_parameters()):
            state = load_option("megatron-lora-checkpoint")(chunk, state)
        found |= {f"{index}.{key}": value for key, value in state.items() if _EXTRA_STATE not in key}
    return found


def _fill_adam_state(optimizer: Optimizer) -> None:
    """Create AdamW's state, which normally appears in its first step, so it can be saved or loaded into."""
    for part in optimizer.parts:
        if _counts_by_group(part.optimizer):
            part.init_state_fn(part.optimizer, part.config)
        elif isinstance(part.optimizer, HybridDeviceOptimizer):
            for inner in part.optimizer.sub_optimizers:
                _fill_torch_state(inner)
            part.optimizer._sync_sub_optimizers_state_to_hdo()
        else:
            _fill_torch_state(part.optimizer)


def _fill_torch_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _adam_step(optimizer: Optimizer) -> int:
    """Return the number of updates so far. torch's AdamW counts them per parameter, fused optimizers per group."""
    steps = {
        int(holder["step"])
        for part in optimizer.parts
        for holder in (*part.optimizer.state.values(), *part.optimizer.param_groups)
        if "step" in holder
    }
    return max(steps, default=0)


def _set_adam_step(optimizer: Optimizer, step: int) -> None:
    """Set every step counter. Megatron restores one shared counter, but torch's AdamW has one per parameter."""
    for part in optimizer.parts:
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step), device=state["exp_avg"].device)
        for group in part.optimizer.param_groups:
            if _counts_by_group(part.optimizer) or "step" in group:
                group["step"] = step


def _counts_by_group(optimizer: Any) -> bool:
    """Return whether it is a fused optimizer, which counts updates in its groups, and only from the first update on."""
    return not isinstance(optimizer, torch.optim.AdamW | HybridDeviceOptimizer)


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def _random_name() -> str:
    return f"random/shard_{dist.get_rank()}_{dist.get_world_size()}"


def _random_state() -> dict[str, Any]:
    """Return this rank's generators of torch, and Megatron's named ones."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
