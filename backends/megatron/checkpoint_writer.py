"""Writing of a distributed checkpoint in Megatron's format, by the rank itself, immediately or in the background."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.integrity import ByteRange
from backends.common.checkpoint.writing import RankWriting, save_to_stream, translate_disk_errors, write_data_file
from backends.common.trainer.host_memory import HostCopies
from backends.megatron.versions import ASYNC_OPTIONS, PlainValues, saving_in_process

PLAIN_FILES = (".metadata", "common.pt", "metadata.json")
"""Files that Megatron and torch write next to the data files. Every rank reads them whole."""


class CheckpointWriter(RankWriting):
    """A checkpoint being written: planned on creation, then written, then finished.

    Args:
        state: Megatron's sharded state.
        copies: memory for an immediate copy of every tensor, so that the state may change before it is written.
    """

    plain_files = PLAIN_FILES

    def __init__(
        self, directory: Path, state: dict[str, Any], device: torch.device, copies: HostCopies | None = None
    ) -> None:
        super().__init__(directory, device)
        self._strategy = _InProcessSave("torch_dist", 1, thread_count=1)
        with saving_in_process(_save_common), translate_disk_errors(directory, CheckpointingException):
            self._request = dist_checkpointing.save(
                state, str(directory), sharded_strategy=self._strategy, async_sharded_save=True, **ASYNC_OPTIONS
            )
        if copies is not None:
            self._strategy.take_snapshot(copies)

    def _write(self) -> None:
        self._pieces = self._strategy.write()

    def _write_index(self) -> None:
        with translate_disk_errors(self._directory, CheckpointingException):
            for finalize in self._request.finalize_fns:
                finalize()


def _save_common(common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
    """Write ``common.pt`` like Megatron, through a stream that keeps the system's error."""
    if dist.get_rank() == 0:
        with (Path(checkpoint_dir) / COMMON_STATE_FNAME).open("wb") as file:
            save_to_stream(common_state_dict, file)


class _InProcessSave(PlainValues, TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by the rank itself instead of by forked and spawned processes.

    Forking a process with threads (such as a Ray actor) may hang, and spawning needs an importable main module.
    """

    writer: FileSystemWriterAsync
    """Writer of the planned save."""

    save_common = staticmethod(_save_common)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any, *unused: Any
    ) -> AsyncRequest:
        self.writer = writer
        return AsyncRequest(None, (), [lambda: save_state_dict_async_finalize(*save_state_dict_ret)])

    def take_snapshot(self, copies: HostCopies) -> None:
        """Copy every tensor to be written. Objects are already serialized."""
        files = [tensors for _, _, (_, tensors) in self.writer.write_buckets or []]
        made = iter(copies.of(tensor for tensors in files for _, tensor in tensors))
        for tensors in files:
            tensors[:] = [(item, next(made)) for item, _ in tensors]

    def write(self) -> dict[str, list[ByteRange]]:
        """Write this rank's files, flushed to disk; return their pieces. Needs neither CUDA nor another rank."""
        written: dict[str, list[ByteRange]] = {}
        results: dict[int, list[WriteResult]] = {}
        for index, (path, key, (objects, tensors)) in enumerate(self.writer.write_buckets or []):
            with translate_disk_errors(Path(path)):
                pieces, results[index] = write_data_file(Path(path), key, [*objects, *tensors])
                written.setdefault(key, []).extend(pieces)
        if results:
            assert self.writer.results_queue is not None
            self.writer.results_queue.put(results)
        return written
