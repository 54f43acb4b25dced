"""``slime-like convert to-megatron | to-hf | from-gguf | check``."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from slime_like.checks import CONVERSION
from slime_like.checks.run_files import checkpoint_problem, directory_problem
from slime_like.commands.command import (
    Command,
    at_least_one,
    find_weights,
    has_flag,
    option,
    parse_path,
    temporary_run_dir,
)
from slime_like.config import LoggingConfig, ModelConfig, RunConfig, TrainerConfig
from slime_like.config.lora import ADAPTER_CONFIG
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.models.converted import DESCRIPTION as CONVERTED
from slime_like.system.words import pluralize

if TYPE_CHECKING:
    from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorSource

_DIFFERS = 1
_SHOWN = 50
_SMALLEST = 10_000

DESCRIPTION = (
    "Convert checkpoints from disk to disk, or compare two. This needs neither Ray nor a GPU, and memory for "
    "a few tensors only. Training can also start from a Hugging Face directory, without a conversion."
)


def size_in_bytes(text: str) -> int:
    """Parse "500MB", "1.5GiB" or plain bytes."""
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(ge=_SMALLEST)]).validate_python(text))
    except ValidationError as error:
        problem = f"{text!r} is not a size of at least {_SMALLEST} bytes; give one such as 500MB, 5GB or 2GiB"
        raise ArgumentTypeError(problem) from error


def _to_megatron(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if has_flag(flags, "model.path"):
        problem = f"--model.path: HF_DIR={options.hf_dir} is the model already; remove the flag"
        raise ConfigError(problem, code="flag-excluded")
    _require_output(options.hf_dir, options.out, options.force)
    config = _checked(["--model.path", str(options.hf_dir)], flags)
    from slime_like.conversion.convert import converter_of

    converter = converter_of(config.model, config.trainer)
    return _converted(partial(converter.to_checkpoint, options.out), config.logging, options)


def _to_hf(options: argparse.Namespace, flags: Sequence[str]) -> int:
    model, weights = find_weights(options.checkpoint, flags)
    if weights is None:
        problem = f"CHECKPOINT={options.checkpoint} is a Hugging Face directory already; copy it"
        raise ConfigError(problem, code="wrong-checkpoint")
    _require_output(options.checkpoint, options.out, options.force)
    config = _checked(model, flags)
    if differs := checkpoint_problem(weights.parent, config.model, config.trainer.backend, "CHECKPOINT"):
        raise ConfigError(differs, code="wrong-checkpoint")
    if options.merge and not config.model.lora.is_set:
        raise ConfigError("--merge: the checkpoint has no factors (model.lora); remove it", code="no-factors")
    from slime_like.conversion.convert import converter_of

    converter = converter_of(config.model, config.trainer)
    return _converted(partial(converter.to_hugging_face, weights, options.out), config.logging, options)


def _check(options: argparse.Namespace, flags: Sequence[str]) -> int:
    from slime_like.conversion.convert import compare_sources, progress_reporter

    config = load_config(None, ["--model.path", str(options.a), *flags], temporary_run_dir("convert"))
    a, b = (_open(config.model, config.trainer, path, flags) for path in (options.a, options.b))
    with progress_reporter(config.logging, "MiB compared") as report:
        differences = compare_sources(a, b, options.workers, report)
    shown = differences if options.all else differences[:_SHOWN]
    for difference in shown:
        print(f"{difference.name}: {difference.how}")
    if len(shown) < len(differences):
        print(f"... and {len(differences) - len(shown)} more; --all lists them")
    if differences:
        print(f"different: {len(differences)} of {pluralize(len(a.tensors.keys() | b.tensors.keys()), 'tensor')}")
        return _DIFFERS
    print(f"the same: {pluralize(len(a.tensors), 'tensor')}, bit for bit")
    return 0


def _open(model: ModelConfig, trainer: TrainerConfig, path: Path, flags: Sequence[str]) -> TensorSource:
    from slime_like.conversion.convert import converter_of

    if any(path.glob("*.safetensors")):
        return converter_of(model, trainer).open_hugging_face(path)
    found, weights = find_weights(path, flags)
    if weights is None:
        raise ConfigError(f"{path} has no *.safetensors file; give a directory with weights", code="no-weights")
    config = _checked(found, flags)
    return converter_of(config.model, config.trainer).open_checkpoint(weights)


def _from_gguf(options: argparse.Namespace, _: Sequence[str]) -> int:
    _require_output(options.file, options.out, options.force)
    from slime_like.conversion.convert import gguf_to_hugging_face

    print(f"converted: {pluralize(gguf_to_hugging_face(options.file, options.out, options.dtype), 'tensor')}")
    print(f"output: {options.out}")
    return 0


def _checked(arguments: Sequence[str], flags: Sequence[str]) -> RunConfig:
    """Read and check the configuration. The user's flags come last, so they override ``arguments``."""
    from slime_like.checks.check import require_valid

    if has_flag(flags, "model.dtype"):
        problem = "--model.dtype is the precision of a run; give the type to write as --dtype"
        raise ConfigError(problem, code="flag-excluded")
    config = load_config(None, [*arguments, *flags], temporary_run_dir("convert"))
    require_valid(config, CONVERSION)
    return config


def _require_output(source: Path, output: Path, force: bool) -> None:
    code, problem = "output-unusable", directory_problem(output)
    if problem is None and (source.resolve() == output.resolve() or output.resolve() in source.resolve().parents):
        problem = "contains the source; give another directory"
    elif problem is None and output.is_dir() and any(output.iterdir()):
        if not force:
            code = "output-not-empty"
            problem = "is not empty; give another directory, or --force to replace it"
        elif not any((output / name).is_file() for name in (CONVERTED, "config.json", ADAPTER_CONFIG)):
            problem = "is neither a converted checkpoint nor a model; give another directory"
    if problem:
        raise ConfigError(f"OUT={output} {problem}", code=code)


def _converted(
    convert: Callable[[ConversionOptions, Report], ConversionSummary],
    logging: LoggingConfig,
    options: argparse.Namespace,
) -> int:
    from slime_like.conversion.convert import progress_reporter
    from slime_like.interfaces.conversion import ConversionOptions

    merge = getattr(options, "merge", False)
    given = ConversionOptions(options.dtype, options.max_shard_size, options.workers, options.allow_nan, merge)
    with progress_reporter(logging, "MiB converted") as report:
        summary = convert(given, report)
    tensors, files = pluralize(summary.tensors, "tensor"), pluralize(summary.files, "file")
    print(f"converted: {tensors}, {summary.nbytes / 1e6:.2f} MB, {files}")
    print(f"output: {options.out}")
    return 0


_DTYPES = ("bfloat16", "float16", "float32")
_WORKERS = option(
    "--workers",
    type=at_least_one,
    default=min(4, len(os.sched_getaffinity(0))),
    metavar="N",
    help="threads; each holds one parameter in memory (default here: %(default)s)",
)
_FORCE = option("--force", action="store_true", help="replace a conversion or model in OUT by the complete new one")
_WRITING = (
    option("--dtype", choices=["auto", *_DTYPES], default="auto", help="type to write; auto: each tensor's own"),
    option("--max_shard_size", type=size_in_bytes, default="1GB", metavar="SIZE", help="largest file (%(default)s)"),
    option("--allow_nan", action="store_true", help="also convert tensors with NaN or infinity"),
    _FORCE,
    _WORKERS,
)

COMMANDS = (
    Command(
        "convert to-megatron",
        "convert a Hugging Face directory to a Megatron checkpoint",
        _to_megatron,
        "Write a Megatron checkpoint, split by the given layout; every other layout can read it. OUT gets\n"
        "trainer/ (Megatron's files), model/ (configuration and tokenizer) and conversion.json. OUT appears\n"
        "when it is complete.",
        _WRITING,
        "[options] [--trainer.parallel.tensor N ...]",
        {"HF_DIR": "Hugging Face directory with safetensors", "OUT": "directory to write"},
        epilog="Layout: --trainer.parallel.tensor, .pipeline, .virtual_pipeline, .expert (with .data), .sequence;\n"
        "see `slime-like train --help`. To train from OUT: --model.weights OUT. To score with it:\n"
        "`slime-like score OUT ...`.",
    ),
    Command(
        "convert to-hf",
        "convert a Megatron checkpoint to a Hugging Face directory",
        _to_hf,
        "Write safetensors files with an index, configuration, generation configuration and tokenizer,\n"
        "which transformers and vLLM load. CHECKPOINT may have been written under any layout.\n"
        "OUT appears when it is complete. A checkpoint of factors (model.lora) becomes a PEFT adapter, or with\n"
        "--merge a whole model.",
        (*_WRITING, option("--merge", action="store_true", help="write the model with its factors merged")),
        "[options] [--model.path HF_DIR]",
        {
            "CHECKPOINT": "a run's checkpoints/step-N, or output of `convert to-megatron`. Configuration and "
            "tokenizer come from --model.path (default: the run's model.path)",
            "OUT": "directory to write",
        },
    ),
    Command(
        "convert from-gguf",
        "convert a GGUF file to a Hugging Face directory",
        _from_gguf,
        "Write weights, configuration, tokenizer and chat template of a GGUF file. Quantized weights are\n"
        "dequantized, with the precision that quantization left.",
        (
            option("file", type=parse_path, metavar="FILE", help="of an architecture that transformers reads"),
            option("out", type=parse_path, metavar="OUT", help="directory to write"),
            option("--dtype", choices=_DTYPES, default="bfloat16", help="type to write (%(default)s)"),
            _FORCE,
        ),
        takes_flags=False,
    ),
    Command(
        "convert check",
        "compare two checkpoints bit for bit",
        _check,
        "Compare names, shapes, types and every bit of two checkpoints, each a Hugging Face directory or\n"
        "a Megatron checkpoint. Exit code 0: equal. 1: different, with a list of the differences.",
        (option("--all", action="store_true", help=f"list every difference (default: the first {_SHOWN})"), _WORKERS),
        "[options] [--model.path HF_DIR]",
        dict.fromkeys(("A", "B"), "a checkpoint of either kind"),
    ),
)
