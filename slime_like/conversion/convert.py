"""Conversion and comparison of checkpoints from disk to disk. Starts neither Ray nor ranks nor engines."""

import contextlib
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slime_like.config import LoggingConfig, ModelConfig, TrainerConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import load_backend
from slime_like.interfaces.conversion import Converter, Report, TensorSource
from slime_like.observability.names import CONVERSION_SPEED
from slime_like.observability.progress import Progress
from slime_like.system.disk import replace_directory
from slime_like.system.threads import Tracker, run_jobs
from slime_like.weights.checksums import as_bytes

_UNIT = 2**20
_ROTARY = ("rope_freqs", "rope_factors")
_AT_ONCE = 1 << 22
"""Number of elements subtracted at a time."""


def converter_of(model: ModelConfig, trainer: TrainerConfig) -> Converter:
    """Return the converter of ``trainer.backend``. Raises ``ConfigError`` if the backend has no converter."""
    # Megatron warns about every package that would make training faster, but nothing is trained here.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    backend = load_backend(trainer.backend)
    if not hasattr(backend, "converter"):
        raise ConfigError(f"trainer.backend={trainer.backend} does not convert checkpoints; use megatron")
    converter: Converter = backend.converter(model, trainer)
    return converter


@contextlib.contextmanager
def progress_reporter(logging: LoggingConfig, unit: str) -> Iterator[Report]:
    """Show a progress bar, which begins with the first report, because that has the total."""
    with contextlib.ExitStack() as stack:
        bar: Progress | None = None
        before, started = 0, 0.0

        def report(done: int, total: int) -> None:
            """Show bytes as whole units. The speed does not count what an earlier start has done."""
            nonlocal bar, before, started
            units = max(1, total // _UNIT)
            if bar is None:
                bar = stack.enter_context(Progress(logging.progress, units, unit=unit))
                before, started = done, time.monotonic()
            speed = (done - before) / 1e9 / max(time.monotonic() - started, 1e-9)
            bar.update(units if done == total else done // _UNIT, {CONVERSION_SPEED: speed})

        yield report


class Difference(NamedTuple):
    """One differing tensor."""

    name: str
    how: str


def compare_sources(
    a: TensorSource, b: TensorSource, workers: int, report: Callable[[int, int], None]
) -> list[Difference]:
    """List the differences by name. Values are compared if type and shape agree.

    Each worker holds one parameter of both sides in memory. ``report`` receives the bytes done and the bytes to do.
    Raises ``CheckpointError`` if a checkpoint is damaged.
    """
    differences = [Difference(name, "only in A") for name in a.tensors.keys() - b.tensors.keys()]
    differences += [Difference(name, "only in B") for name in b.tensors.keys() - a.tensors.keys()]
    alike = set()
    for name in a.tensors.keys() & b.tensors.keys():
        one, other = a.tensors[name], b.tensors[name]
        if one.shape != other.shape:
            differences.append(Difference(name, f"shape {list(one.shape)} in A, {list(other.shape)} in B"))
        elif one.dtype != other.dtype:
            differences.append(Difference(name, f"type {one.dtype} in A, {other.dtype} in B"))
        else:
            alike.add(name)
    # Tensors that one side reads together are compared together.
    groups = a.groups if max(map(len, a.groups), default=0) > 1 else b.groups
    jobs = [job for group in groups if (job := [name for name in group if name in alike])]
    total = sum(prod(a.tensors[name].shape) * getattr(torch, a.tensors[name].dtype).itemsize for name in alike)

    def compare(names: list[str], tracker: Tracker) -> list[Difference]:
        ours, theirs = a.read(names), b.read(names)
        found = [Difference(name, how) for name in names if (how := _values_differ(ours[name], theirs[name]))]
        tracker.advance(sum(ours[name].nbytes for name in names))
        return found

    run_jobs(jobs, compare, workers, differences.extend, lambda done: report(done, total))
    return sorted(differences)


def _values_differ(ours: Tensor, theirs: Tensor) -> str | None:
    if torch.equal(as_bytes(ours), as_bytes(theirs)):
        return None
    count, largest = 0, 0.0
    for one, other in zip(ours.flatten().split(_AT_ONCE), theirs.flatten().split(_AT_ONCE), strict=True):
        count += int((as_bytes(one).view(len(one), -1) != as_bytes(other).view(len(other), -1)).any(dim=1).sum())
        largest = max(largest, float((one.double() - other.double()).abs().nan_to_num(nan=torch.inf).max()))
    return f"values: {count} of {ours.numel()} differ, by at most {largest:.3g}"


def gguf_to_hugging_face(file: Path, out: Path, dtype: str) -> int:
    """Write dequantized weights, configuration, tokenizer and chat template. Return the number of tensors.

    Raises ``ConfigError`` if the file is not GGUF, transformers does not read its architecture, or tensors are missing.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        reader = GGUFReader(file)
        scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith(_ROTARY)]
        if scaled := scaled + [name for name in reader.fields if ".rope.scaling." in name]:  # transformers ignores it
            problem = f"scales its rotary embedding ({scaled[0]}), which this conversion does not support"
            raise ConfigError(f"FILE={file} {problem}; use the model's safetensors files", code="gguf-rotary")
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # `from_pretrained` would need accelerate for this.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"FILE={file} cannot be read as GGUF ({error})", code="no-gguf") from error
    found = model.load_state_dict(tensors, strict=False)
    missing = [name for name in found.missing_keys if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or found.unexpected_keys:
        differing = ", ".join([*missing, *found.unexpected_keys][:3])
        raise ConfigError(f"FILE={file} has other tensors than its architecture ({differing}, ...)", code="no-gguf")
    model.tie_weights()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for file in partial.glob("*.safetensors"):  # transformers writes only these without the umask's permissions
        file.chmod((partial / "config.json").stat().st_mode)
    replace_directory(partial, out)
    return len(tensors)
