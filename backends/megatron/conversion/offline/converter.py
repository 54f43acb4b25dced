"""Megatron's side of ``slime-like convert``."""

from __future__ import annotations

from pathlib import Path

from backends.common.hf_source import HuggingFaceSource
from backends.common.hf_writing import to_hugging_face
from backends.megatron.conversion.offline.sources import MegatronSource
from backends.megatron.conversion.offline.to_megatron import to_megatron
from slime_like.config import RunConfig
from slime_like.conversion import ConversionOptions, ConversionSummary, Report, TensorSource


class MegatronConverter:
    """See ``slime_like.conversion.Converter``."""

    def to_checkpoint(
        self, config: RunConfig, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        return to_megatron(config, output, options, report)

    def to_hugging_face(
        self, config: RunConfig, checkpoint: Path, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        return to_hugging_face(config, MegatronSource(config, checkpoint), checkpoint, output, options, report)

    def open_checkpoint(self, config: RunConfig, checkpoint: Path) -> TensorSource:
        return MegatronSource(config, checkpoint)

    def open_hugging_face(self, directory: Path) -> TensorSource:
        return HuggingFaceSource(directory)
