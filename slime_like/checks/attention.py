"""What a way to compute attention needs of the run and of this environment. Packages are looked up, not imported."""

from collections.abc import Iterator
from importlib.util import find_spec

from slime_like.config.run import RunConfig

_PACKAGES = {
    "transformer_engine": ("transformer_engine", "pip install 'transformer-engine[pytorch]' on a machine with CUDA"),
    "ring_flash_attn": ("ring_flash_attn", "pip install ring-flash-attn==0.1.8"),
}


def attention_problems(config: RunConfig) -> Iterator[str]:
    """Why ``trainer.attention`` cannot be used, each with the remedy; nothing where it can."""
    attention = config.trainer.attention
    if attention in _PACKAGES:
        package, remedy = _PACKAGES[attention]
        if find_spec(package) is None:
            yield (
                f"trainer.attention={attention} needs the package {package}, which is not installed; {remedy}, or use "
                "trainer.attention=auto, which takes the best of what is there"
            )
    if attention == "transformer_engine" and config.model.dtype == "float32":
        yield (
            "trainer.attention=transformer_engine computes in bfloat16, and model.dtype=float32; set "
            "model.dtype=bfloat16, or use another attention on a CPU"
        )
