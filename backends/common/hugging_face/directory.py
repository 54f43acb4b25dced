"""Writing of a complete Hugging Face directory: files of tensors, then index, configuration and tokenizer.

A checkpoint may hold more than its trained language model: its names are then the stored ones, and the rest is copied.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save_file

from backends.common.hugging_face.files import HfCheckpoint, in_files
from backends.common.process.agreement import list_names, together
from slime_like.config import ModelConfig
from slime_like.config.lora import ADAPTER_CONFIG, ALL_LINEAR, LoraConfig
from slime_like.errors import CheckpointError
from slime_like.interfaces import Manifest, WeightBucket, WeightExport
from slime_like.models.dimensions import VALUE_HEAD
from slime_like.models.tokenization import tokenizer_files
from slime_like.models.tower import has_tower, language_settings
from slime_like.models.weight_files import INDEX, StackPart, stored_stacks
from slime_like.system.disk import refusal, replace_directory, sync
from slime_like.weights.adapter import ADAPTER_FILE, factor_parts, module_ends, with_tower, without_number

SHARD_BYTES = 1 << 30
"""Size limit of a safetensors file. A sender holds one file's tensors at a time."""

_STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""By name of an expert's matrix, the stack that PEFT has it in."""

_DRAFT_LAYERS, _QUANTISATION = "num_nextn_predict_layers", "quantization_config"


def write_hf_directory(
    buckets: Iterable[WeightBucket],
    expected: Collection[str],
    source_dir: Path,
    directory: Path,
    stage: int,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None = None,
) -> None:
    """Write all ranks' tensors as sharded safetensors with an index, and ``source_dir``'s configuration and tokenizer.

    Collective over the world; ``directory`` must be on a file system that all senders share. Everything is written to a
    temporary directory next to it and renamed at the end. An earlier checkpoint there is replaced.

    Args:
        buckets: what this rank sends, each at most as large as a file may be; ranks that only take part yield empty
            ones. Always exhausted, so that no rank waits in a gather.
        expected: names of the whole model's tensors.
        stage: index of this rank among the senders.
        lora: settings of an adapter. If given, the tensors are its factors, and the directory is PEFT's.

    Raises:
        CheckpointError: the disk rejected a write, or ``directory`` is not a checkpoint. Nothing is left behind.
    """
    directory, source_dir = Path(directory), Path(source_dir)
    # An adapter, and a value model, are of the language model alone.
    is_whole = lora is None and VALUE_HEAD not in expected
    if has_tower(source_dir) and VALUE_HEAD not in expected:
        names = stored_names(source_dir) if is_whole else {name: with_tower(name) for name in expected}
        buckets, expected = rename(buckets, names), [names[name] for name in expected]
    if lora is None:
        shapes, parts = stored_stacks(source_dir)
        buckets = restack(buckets, parts, shapes)
        expected = {parts[name].stack if name in parts else name for name in expected}
    partial = directory.parent / f".{directory.name}.partial"
    what = f"writing {directory}"
    first = dist.get_rank() == 0
    final = directory, source_dir, expected, dtype, lora
    try:
        together(lambda: _prepare(partial, directory, source_dir) if first else None, what, device)
        together(lambda: _write_files(buckets, partial, f"stage-{stage:04d}"), what, device)
        kept = kept_buckets(source_dir, SHARD_BYTES) if is_whole and first else ()
        together(lambda: _write_files(kept, partial, "stage-kept"), what, device)
        together(lambda: _finish(partial, *final) if first else None, what, device)
    except CheckpointError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def restack(
    buckets: Iterable[WeightBucket], parts: Mapping[str, StackPart], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[WeightBucket]:
    """Put the matrices ``parts`` back into stacks, which follow in the bucket of their last matrix."""
    missing = Counter(part.stack for part in parts.values())
    stacks: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        tensors = []
        for name, tensor in bucket.tensors:
            if name not in parts:
                tensors.append((name, tensor))
                continue
            stack, expert, start, rows = parts[name]
            if stack not in stacks:
                stacks[stack] = torch.empty(shapes[stack], dtype=tensor.dtype)
            stacks[stack][expert, start : start + rows].copy_(tensor)
            missing[stack] -= 1
            if not missing[stack]:
                tensors.append((stack, stacks.pop(stack)))
        yield WeightBucket(tensors)


def _prepare(partial: Path, directory: Path, source_dir: Path) -> None:
    occupied = directory.exists() and not any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    if occupied and any(directory.iterdir()):
        raise _occupied(directory, "exists and is not a Hugging Face checkpoint")
    if directory.resolve() == source_dir.resolve():
        raise _occupied(directory, "is the model that training started from")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise _refused(partial, error) from error


def _write_files(buckets: Iterable[WeightBucket], partial: Path, prefix: str) -> None:
    """Write this rank's tensors. Ranks that only provide shards write nothing.

    A failed write must not leave the others waiting for shards, so the export finishes before the error is raised.
    """
    problem: CheckpointError | None = None
    for number, bucket in enumerate(buckets):
        if not bucket.tensors or problem is not None:
            continue
        file = partial / f"{prefix}-{number:05d}.safetensors"
        try:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.tensors}
            save_file(tensors, file, metadata={"format": "pt"})
            sync(file)
        except (OSError, SafetensorError) as error:
            problem = _refused(file, error)
    if problem is not None:
        raise problem


def _finish(
    partial: Path,
    directory: Path,
    source_dir: Path,
    expected: Collection[str],
    dtype: torch.dtype,
    lora: LoraConfig | None,
) -> None:
    """Number the files, write the index, copy the rest, check completeness, and publish the directory."""
    try:
        weight_map, total = _number_files(partial)
        missing = sorted(set(expected) - weight_map.keys())
        if missing:
            problem = f"tensors that no rank wrote: {list_names(missing)}"
            raise CheckpointError(problem, code="tensors-not-written", who=str(directory))
        if lora is None:
            write_index(partial, weight_map, total)
            copy_companions(source_dir, partial, dtype, VALUE_HEAD in weight_map)
        else:
            _join(partial, ADAPTER_FILE)
            write_adapter_settings(partial, lora, source_dir, weight_map)
        readable = next(partial.glob("*config.json"))
        for file in partial.glob("*.safetensors"):
            shutil.copymode(readable, file)  # safetensors creates files that only their owner can read
        for file in partial.iterdir():
            sync(file)
        replace_directory(partial, directory)
    except OSError as error:
        raise _refused(partial, error) from error


def _number_files(partial: Path) -> tuple[dict[str, str], int]:
    """Rename the stages' files like transformers does; return each tensor's file, and the bytes of all tensors."""
    files = sorted(partial.glob("stage-*.safetensors"))
    weight_map: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, start=1):
        name = file_name(number, len(files))
        with safe_open(file, framework="pt") as reader:
            weight_map |= dict.fromkeys(reader.keys(), name)
        header = int.from_bytes(file.open("rb").read(8), "little")
        total += file.stat().st_size - 8 - header
        file.rename(partial / name)
    return weight_map, total


def _join(partial: Path, name: str) -> None:
    """Move the tensors of all files to one file: PEFT reads no index."""
    files = list(partial.glob("*.safetensors"))
    save_file({key: one for file in files for key, one in load_file(file).items()}, partial / name, {"format": "pt"})
    for file in files:
        file.unlink()


def _stack_experts(file: Path) -> None:
    """Replace the factors of experts by stacks."""
    factors = load(file.read_bytes())  # not load_file, which maps what is written below
    for name, part in factor_parts({name: tuple(factor.shape) for name, factor in factors.items()}).items():
        if part.stack not in factors:
            factors[part.stack] = factors[name].new_zeros(part.shape)
        factors[part.stack].view(part.blocks)[part.place].copy_(factors.pop(name))
    save_file(factors, file, {"format": "pt"})


def write_adapter_settings(directory: Path, lora: LoraConfig, base: Path, factors: Collection[str]) -> None:
    """Write PEFT's settings of an adapter for the model ``base``. Its all-linear would include routers, so modules are
    named.

    In a model with experts, PEFT takes every gate, up or down projection among the modules for the experts' stacks. So
    shared experts and dense layers are named as parameters. The modules ``experts.*`` are for us, and for SGLang.

    The experts' factors become stacks if ``base`` has stacks. PEFT stacks other factors itself if no kind is missing.
    """
    modules = set(module_ends(factors) if ALL_LINEAR in lora.targets else lora.targets)
    stacks, weights, kinds = set[str](), set[str](), set[str]()
    shapes, parts = stored_stacks(base)
    if any(".experts." in name for name in (*factors, *shapes)):
        modules = {name for name in modules if name.rpartition(".")[2] not in _STACKS}
        # A tower's blocks may have the same names without a number.
        is_numbered = has_tower(base) or any("layers." in target for target in lora.targets)
        for path in (without_number(name.rpartition(".lora_")[0]).partition("layers.") for name in factors):
            name = "".join(path[1:]) if is_numbered else path[2].partition(".")[2]
            owner, _, leaf = name.rpartition(".")
            if leaf in _STACKS and owner.endswith(".experts"):
                modules |= {f"{owner}.{one}" for one, stack in _STACKS.items() if stack == _STACKS[leaf]}
                stacks.add(f"{owner}.{_STACKS[leaf]}")
                kinds.add(leaf)
            elif leaf in _STACKS:
                weights.add(f"{name}.weight")
    named = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": str(base)}
    sizes: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    if parameters := sorted(stacks | weights):  # for which PEFT has no dropout
        joined = [name for name in parameters if name.endswith(".gate_up_proj")]
        sizes |= {"target_parameters": parameters, "lora_dropout": 0.0}
        sizes |= {"rank_pattern": dict.fromkeys(joined, 2 * (lora.rank or 0))}
        sizes |= {"alpha_pattern": dict.fromkeys(joined, 2 * lora.alpha)}
    sizes["target_modules"] = sorted(modules)
    if stacks and (parts or kinds != _STACKS.keys()):
        _stack_experts(directory / ADAPTER_FILE)
    if has_tower(base):  # whose modules may have the same names
        named["exclude_modules"] = "(?!.*language_model).*"
    (directory / ADAPTER_CONFIG).write_text(json.dumps({**named, **sizes}, indent=2) + "\n", encoding="utf-8")


def file_name(number: int, count: int) -> str:
    """Return transformers' name for file ``number`` (from 1) of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def write_index(directory: Path, weight_map: Mapping[str, str], total: int) -> None:
    """Write each tensor's file and the total bytes, if there are several files."""
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_companions(source_dir: Path, partial: Path, dtype: torch.dtype, values: bool = False) -> None:
    """Copy configuration and tokenizer. The copied configuration names the weights' type, but neither quantization nor
    layers for multi-token prediction that are not stored.

    Weights converted back to 16 bits often come with a ``config.json`` that still names 8.
    """
    patterns = ("config.json", "generation_config.json", "*processor_config.json", "*.py")
    named = (file for pattern in patterns for file in source_dir.glob(pattern))
    for file in {*filter(Path.is_file, named), *tokenizer_files(source_dir)}:
        if file.suffix == ".json":
            _require_whole(file)
        copied = partial / file.relative_to(source_dir)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)
    path = partial / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = (values and language_settings(config)) or config
    inner = config.get("text_config")
    for settings in (config, inner) if isinstance(inner, dict) else (config,):
        if settings is config or settings.keys() & {"dtype", "torch_dtype"}:
            settings["dtype" if "dtype" in settings else "torch_dtype"] = str(dtype).removeprefix("torch.")
    config.pop(_QUANTISATION, None)
    if _DRAFT_LAYERS in config and (values or not kept_names(source_dir)):
        config[_DRAFT_LAYERS] = 0
    if values:
        family = re.sub("For[A-Z][A-Za-z]*$|LMHeadModel$", "", config["architectures"][0])
        config |= {"architectures": [f"{family}ForSequenceClassification"], "tie_word_embeddings": False}
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _require_whole(file: Path) -> None:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not valid JSON ({error})", code="file-damaged", who=str(file), remedy="copy or download it again"
        ) from error


def _occupied(directory: Path, problem: str) -> CheckpointError:
    return CheckpointError(problem, code="directory-occupied", who=str(directory), remedy="choose another directory")


def _refused(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(refusal(path, str(error)), code="write-refused")


def stored_names(directory: Path) -> dict[str, str]:
    """Map the language model's names to those in the checkpoint's files, which engines load, too."""
    with HfCheckpoint(directory) as checkpoint:
        return checkpoint.stored


def rename(buckets: Iterable[WeightBucket], names: Mapping[str, str]) -> Iterator[WeightBucket]:
    return (WeightBucket([(names[name], tensor) for name, tensor in bucket.tensors]) for bucket in buckets)


def to_checkpoint_layout(export: WeightExport, model: ModelConfig) -> WeightExport:
    """Return an export of the language model, but not of its factors, under the stored names of its checkpoint."""
    if model.lora.sends_factors or not has_tower(model.path):
        return export
    names, manifest = stored_names(model.path), export.manifest
    if manifest is not None:
        manifest = Manifest({names[name]: info for name, info in manifest.tensors.items()}, manifest.updates)
    return WeightExport(manifest, rename(export.buckets, names))


def kept_names(directory: Path) -> list[str]:
    """Return the names of stored tensors that are not the language model's; none without weights."""
    if not _has_weights(directory):
        return []
    with HfCheckpoint(directory) as checkpoint:
        return sorted(checkpoint.kept)


def kept_buckets(directory: Path, max_bytes: int) -> Iterator[WeightBucket]:
    """Yield these tensors, bit for bit, at most ``max_bytes`` at a time."""
    if not _has_weights(directory):
        return
    with HfCheckpoint(directory) as checkpoint:
        for names in in_files(sorted(checkpoint.kept), checkpoint.kept_nbytes, max_bytes):
            yield WeightBucket([(name, checkpoint.kept[name][...]) for name in names])


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))
