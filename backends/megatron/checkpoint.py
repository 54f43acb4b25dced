"""Training state on disk through Megatron's distributed checkpointing, readable under any layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from backends.common.checkpoint.integrity import Checksums, VerifyingReader, damage_error, not_whole
from backends.common.checkpoint.reading import FORMAT, UNREADABLE, brief, cause_of, require_format, require_schedule
from backends.common.process.agreement import list_names, together
from backends.common.trainer.host_memory import HostCopies
from backends.common.trainer.state import is_added
from backends.megatron.checkpoint_writer import PLAIN_FILES, CheckpointWriter
from backends.megatron.optimizer import Optimizer, sharded_optimizer_state
from backends.megatron.versions import loading_together
from slime_like.errors import CheckpointError
from slime_like.plugins.options import load_option

_METADATA = {"chained_optim_avoid_prefix": True}
"""Setting for optimizer keys that don't depend on how parameters are spread over Megatron's optimizers."""

_EXTRA_STATE = "_extra_state"
"""Part of the keys of Transformer Engine's additional state: scales of 8-bit training, which is not done here. Local
modules neither write nor read it."""


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
    state = _sharded_state(model_chunks, optimizer, loading=False)
    state |= {"scheduler": optimizer.scheduler.state_dict(), "format": FORMAT, "layout": _layout()}
    state |= {"adam_step": _adam_step(optimizer), "random": _sharded_random_state()}
    state["extra"] = {}  # earlier versions read it
    return CheckpointWriter(directory, state, next(model_chunks[0].parameters()).device, copies)


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
    checksums, common = _read_common(directory, model_chunks)
    _fill_adam_state(optimizer)
    _set_adam_step(optimizer, common["adam_step"])
    state = _sharded_state(model_chunks, optimizer, loading=True)
    same_layout = common["layout"] == _layout()
    if same_layout:
        state["random"] = _sharded_random_state()
    loaded, unread, absent = _read(directory, state, checksums)
    differing = sorted(key for key in unread | absent if not key.startswith("random"))
    if differing:
        problem = f"was written with another model or optimizer; only one of the two has {list_names(differing[:3])}"
        raise _of_another_model(directory, problem, "model.path and trainer.optimizer settings")
    _fill_weights(directory, model_chunks, loaded)
    if not optimizer.is_distributed:  # the distributed optimizer's state was read in place
        optimizer.megatron.load_state_dict(loaded["optimizer"])
    _set_adam_step(optimizer, loaded["adam_step"])
    _restore_schedule(directory, optimizer.scheduler, loaded["scheduler"], any_schedule)
    if same_layout:
        random = loaded["random"]
        torch.set_rng_state(random["cpu"])
        if random["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(random["tracker"])


def save_weights(directory: Path, model_chunks: Sequence[GPTModel]) -> None:
    """Write what ``load_weights`` reads. Collective over the world."""
    state = {**_sharded_models(model_chunks), "format": FORMAT, "layout": _layout()}
    CheckpointWriter(directory, state, next(model_chunks[0].parameters()).device).write_all()


def load_weights(directory: Path, model_chunks: Sequence[GPTModel]) -> None:
    """Read only the model's weights, in place, under any layout. Collective over the world.

    Raises:
        CheckpointError: no checkpoint there, damaged, or of another model.
    """
    checksums, _ = _read_common(directory, model_chunks)
    loaded, unread, absent = _read(directory, _sharded_models(model_chunks), checksums)
    differing = sorted(absent | {key for key in unread if not key.startswith(("optimizer.", "random"))})
    if differing:
        raise _of_another_model(
            directory, f"belongs to another model; tensors of only one side: {list_names(differing)}"
        )
    _fill_weights(directory, model_chunks, loaded)


def _fill_weights(directory: Path, model_chunks: Sequence[GPTModel], loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(model_chunks):
        values = loaded[f"model{index}"]
        missing, unexpected = chunk.load_state_dict(values, strict=False)
        if all(map(is_added, values)):  # the base is not on disk
            missing = [key for key in missing if is_added(key)]
        differing = sorted({key for key in missing if _EXTRA_STATE not in key} | set(unexpected))
        if differing:
            raise _of_another_model(directory, f"names other parameters than the model: {differing[:3]}")


def _of_another_model(directory: Path, problem: str, settings: str = "model.path") -> CheckpointError:
    return CheckpointError(
        problem, code="checkpoint-of-another-model", who=str(directory), remedy=f"use the {settings} that wrote it"
    )


class _Reader(VerifyingReader):
    """Reader that caches the metadata, and compares every piece with its checksum."""

    _metadata: Metadata | None = None

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*arguments, **options)
        return self._metadata


def _read(directory: Path, state: dict[str, Any], checksums: Checksums) -> tuple[dict[str, Any], set[str], set[str]]:
    """Return the values for ``state``, the keys that only the checkpoint has, and the keys that it lacks."""
    try:
        with loading_together(lambda path: _Reader(path, checksums)):
            loaded, unread, absent = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RETURN_ALL)
    except (CheckpointingException, CheckpointException, *UNREADABLE) as error:
        cause = cause_of(error)
        # Differing shapes and names raise plain errors of these types.
        if not isinstance(cause, CheckpointingException | KeyError | ValueError):
            raise damage_error(directory, brief(cause)) from error
        raise _of_another_model(directory, f"does not fit this model ({brief(cause)})") from error
    # Ignore additional state that Transformer Engine's modules may have written: it holds no weights.
    return loaded, {key for key in unread if _EXTRA_STATE not in key}, absent


def _read_common(directory: Path, model_chunks: Sequence[GPTModel]) -> tuple[Checksums, dict[str, Any]]:
    """Read checksums and plain values. Collective over the world."""

    def read() -> tuple[Checksums, dict[str, Any]]:
        checksums = Checksums.read(directory)
        checksums.verify_plain_files(PLAIN_FILES)
        try:
            common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
        except CheckpointingException as error:
            raise not_whole(directory, brief(error)) from error
        except UNREADABLE as error:
            raise damage_error(directory, brief(error)) from error
        require_format(directory, common)
        return checksums, common

    return together(read, f"reading {directory}", next(model_chunks[0].parameters()).device)


def _restore_schedule(directory: Path, scheduler: Any, saved: dict[str, Any], any_schedule: bool) -> None:
    """Restore the saved position in the *configured* schedule, which must equal the saved schedule by default."""
    now = scheduler.state_dict()
    # A constant rate does not depend on the run's end, so such a run may be extended.
    free = {"num_steps", "lr_decay_steps"} if now["lr_decay_style"] == "constant" else {"num_steps"}
    require_schedule(directory, saved, now, [] if any_schedule else [key for key in now if key not in free])
    scheduler.num_steps = 0
    scheduler.step(increment=saved["num_steps"])


# ----------------------------------------------------------------------------------------------------------- the state
def _sharded_state(model_chunks: Sequence[GPTModel], optimizer: Optimizer, loading: bool) -> dict[str, Any]:
    models = _sharded_models(model_chunks)
    if optimizer.is_distributed:
        tensors = {str(index): sharded_optimizer_state(part, models) for index, part in enumerate(optimizer.parts)}
    else:
        tensors = optimizer.megatron.sharded_state_dict(models, is_loading=loading, metadata=_METADATA)
    return {**models, "optimizer": _without_settings(tensors)}


def _sharded_models(model_chunks: Sequence[GPTModel]) -> dict[str, Any]:
    """Return only weights, or factors if there are some. Outer keys are the modules' names; keys inside the values are
    common to all layer specs."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **_METADATA}
    states = [chunk.sharded_state_dict(metadata=metadata) for chunk in model_chunks]
    found = {}
    for index, (chunk, state) in enumerate(zip(model_chunks, states, strict=True)):
        if any(is_added(name) for name, _ in chunk.named_parameters()):
            found[f"model{index}"] = load_option("megatron-lora-checkpoint")(chunk, state)
        else:
            found[f"model{index}"] = {key: value for key, value in state.items() if _EXTRA_STATE not in key}
    return found


def _without_settings(value: Any) -> Any:
    """Keep only tensors for the disk. Everything else (parameter groups) follows from configuration and schedule, and
    its layout varies, for example if experts have a separate optimizer."""
    if isinstance(value, dict):
        return {key: _without_settings(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_settings(entry) for entry in value]
    return value if isinstance(value, ShardedBase | LocalNonpersistentObject) else LocalNonpersistentObject(value)


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


def _sharded_random_state() -> ShardedObject:
    """Return torch's generators and Megatron's named ones, one entry per rank."""
    state = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
