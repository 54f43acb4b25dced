"""Checks of packages that settings need, and of environment variables that break runs on GPUs.

Packages are looked up, not imported. Nothing imported here initializes devices.
"""

import os
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from packaging.version import Version

from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
from slime_like.config.trainer import FSDP, TrainerConfig
from slime_like.system.gpus import local_gpus

_SHOWS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's allocator. The first that is set applies."""

FLASH_ATTENTION = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""Modules of FlashAttention 3 and 4."""

_PACKAGES = {
    "transformer_engine": (
        "transformer_engine with transformer_engine_torch",
        "pip install 'transformer-engine[pytorch]' on a machine with CUDA",
    ),
    "ring_flash_attn": ("ring_flash_attn", "pip install ring-flash-attn==0.1.8"),
}


def has_transformer_engine() -> bool:
    """Return whether it is installed with its extension for torch, without which its modules cannot be imported."""
    found = find_spec("transformer_engine")
    if found is None or found.origin is None:
        return False
    package = Path(found.origin).parent
    # The extension is next to the package, or in it if both were built together.
    places = package.parent, package, package / "wheel_lib"
    return any(next(place.glob("transformer_engine_torch*.so"), None) for place in places)


def attention_problems(trainer: TrainerConfig, model: ModelConfig) -> Iterator[str]:
    """Yield why ``trainer.attention`` cannot be used, each with the remedy."""
    attention = trainer.attention
    if trainer.fp8 != "none" and attention == "auto" and not has_transformer_engine():
        yield f"trainer.fp8={trainer.fp8} needs the package {'; '.join(_PACKAGES['transformer_engine'])}, or use none"
    if attention in _PACKAGES:
        package, remedy = _PACKAGES[attention]
        if not (has_transformer_engine() if attention == "transformer_engine" else find_spec(package)):
            yield f"trainer.attention={attention} needs the package {package}; {remedy}, or use trainer.attention=auto"
    kernels = trainer.attention_kernels
    if kernels in FLASH_ATTENTION and not is_installed(FLASH_ATTENTION[kernels]):
        remedy = "install FlashAttention's package, or use trainer.attention_kernels=torch"
        yield f"trainer.attention_kernels={kernels} needs the module {FLASH_ATTENTION[kernels]}; {remedy}"
    if attention == "transformer_engine" and model.dtype == "float32":
        yield "trainer.attention=transformer_engine computes in bfloat16; set model.dtype=bfloat16, or use auto"


def is_installed(module: str) -> bool:
    """Return whether a module exists, without importing more than the package around it."""
    package = module.partition(".")[0]
    return find_spec(package) is not None and (package == module or find_spec(module) is not None)


def has_flash_attention_2() -> bool:
    """Return whether flash-attn 2 is installed. SGLang's version 4 has the same package name, but other modules."""
    return find_spec("flash_attn_2_cuda") is not None


def missing_flash_attention(trainer: TrainerConfig, on_cuda: bool) -> Iterator[str]:
    """Check on a rank's machine for flash-attn 2, which ring-flash-attn calls on CUDA."""
    if trainer.attention == "ring_flash_attn" and on_cuda and not has_flash_attention_2():
        others = "allgather" if trainer.backend == FSDP else "ring or allgather"
        remedy = f"pip install flash-attn, or use trainer.attention={others}"
        yield f"trainer.attention=ring_flash_attn needs flash-attn 2 on CUDA; {remedy}"


def variables_against_megatron(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield variables by which Transformer Engine's kernels are chosen. Megatron sets all of them to 1 for every model,
    and fails if one has another value."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        if environment.get(name, "1") != "1":
            remedy = "unset it; trainer.attention=ring or allgather uses torch's kernels instead"
            yield f"{name}={environment[name]}: Megatron needs it to be 1 or unset; {remedy}"


def fla_problem(capability: tuple[int, int]) -> str | None:
    """Return why fla's kernels cannot compute linear attention on a GPU of this compute capability, with a remedy, or
    ``None``.

    Triton 3.4 to 3.7.0 compiles the backward pass wrongly for Hopper (fla's issue 640), so fla refuses it there.
    """
    if find_spec("fla") is None:
        return "fla is not installed; pip install fla-core"
    is_wrong = Version("3.4") <= Version(version("triton")) < Version("3.7.1")
    if capability[0] == 9 and is_wrong and find_spec("tilelang") is None:
        return (
            f"Triton {version('triton')} compiles fla wrongly for this GPU; install Triton 3.7.1 or newer, or tilelang"
        )
    return None


def missing_compiler(on_cuda: bool) -> Iterator[str]:
    """Check on a rank's machine, before a model is loaded, that Triton can compile. Megatron's SwiGLU uses it."""
    if not on_cuda:
        return
    remedy = "install gcc and python3-dev"
    if not (os.environ.get("CC") or which("gcc") or which("clang")):
        yield f"Triton compiles kernels in the first step, but there is no C compiler; {remedy}, or set CC"
    include = sysconfig.get_path("include", "posix_prefix")  # Triton looks here, and its compiler in CPATH
    if not any(Path(place, "Python.h").is_file() for place in [include, *os.environ.get("CPATH", "").split(":")]):
        yield f"{include}: Triton compiles kernels with Python.h, which is missing; {remedy}"


def cpu_only_settings(model: ModelConfig) -> Iterator[str]:
    """Yield settings that only work on a CPU."""
    if model.dtype == "float32":
        yield "model.dtype=float32 does not run on CUDA, whose attention kernels are bfloat16; set bfloat16"


def logging_problems(config: RunConfig) -> Iterator[str]:
    if find_spec("torch") is None:  # most others are missing, too; the first import says how to install all of them
        return
    for package in ("wandb", "tensorboard"):
        if getattr(config.logging, package) and find_spec(package) is None:
            yield f"logging.{package}=true needs its package; pip install {package}, or set it to false"


def visible_device_problem(environment: Mapping[str, str]) -> str | None:
    """Return why processes would see other processes' devices, with the remedy, or ``None``."""
    value = environment.get(_SHOWS_ALL, "")
    if value.lower() not in ("1", "true"):
        return None
    return f"{_SHOWS_ALL}={value}: every process would see all GPUs and use the first one; unset it on every node"


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the variable and value that make torch's allocator use expandable segments, or ``None``."""
    for name in ALLOCATOR:
        if name in environment:
            settings = environment[name].replace(" ", "").lower().split(",")
            return f"{name}={environment[name]}" if "expandable_segments:true" in settings else None
    return None


def device_problems(config: RunConfig) -> Iterator[str]:
    if local_gpus() and (problem := visible_device_problem(os.environ)):
        yield problem
