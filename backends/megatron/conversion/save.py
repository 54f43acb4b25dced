"""Writing a complete Hugging Face checkpoint from all ranks, visible only once it is whole."""

from collections.abc import Sequence
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from backends.common.hugging_face.directory import SHARD_BYTES, write_hf_directory
from backends.megatron.conversion.export import export_buckets
from backends.megatron.conversion.families import family_of
from slime_like.models.dimensions import ModelDimensions


def save_hf(
    model_chunks: Sequence[GPTModel],
    dimensions: ModelDimensions,
    source_dir: Path,
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights as sharded safetensors with an index; configuration and tokenizer come from ``source_dir``.

    Collective over the world; ``directory`` must be on a file system that all pipeline stages share.
    """
    parameter = next(model_chunks[0].parameters())
    write_hf_directory(
        export_buckets(model_chunks, dimensions, shard_bytes),
        family_of(dimensions).hf_shapes(dimensions).keys(),
        source_dir,
        directory,
        parallel_state.get_pipeline_model_parallel_rank(),
        parameter.dtype,
        parameter.device,
    )
