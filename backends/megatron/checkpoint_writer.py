"""Writing a distributed checkpoint in Megatron's format: by the rank itself, at once or behind its back."""

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.data_file import refused_by_disk, save_to_stream, write_data_file
from backends.common.checkpoint.integrity import Checksums, Piece
from backends.common.checkpoint.rank_writing import RankWriting
from backends.common.process.agreement import together
from backends.megatron.verified_reading import PLAIN_FILES
from slime_like.errors import CheckpointError


class CheckpointWriter(RankWriting):
    """One checkpoint on its way to disk: planned when made, then written, then finished.

    Making and finishing are collective over the world; writing is this rank's own business.

    Args:
        directory: made here; shared by all ranks.
        state: Megatron's sharded state.
        device: where this rank's small collectives run.
        snapshot: copy every tensor to host memory now, so that the state may change before it is written.
    """

    def __init__(self, directory: Path, state: dict[str, Any], device: torch.device, snapshot: bool = False) -> None:
        super().__init__(directory, device)
        self._strategy = _InProcessSave()
        with _no_manager_process(), _common_by_stream(), _refused_by_disk(directory):
            self._request = dist_checkpointing.save(
                state, str(directory), sharded_strategy=self._strategy, async_sharded_save=True
            )
        if snapshot:
            self._strategy.take_snapshot()

    def _write(self) -> None:
        self._strategy.write()

    def finish(self, timeout_s: float = 0.0) -> None:
        together(lambda: self._join(timeout_s), f"writing {self._directory}", self._device)
        with _refused_by_disk(self._directory):
            for finalize in self._request.finalize_fns:
                finalize()
        pieces: list[dict[str, list[Piece]]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._strategy.pieces, pieces)
        together(lambda: self._write_checksums(pieces), f"writing {self._directory}", self._device)

    def _write_checksums(self, pieces: list[dict[str, list[Piece]]] | None) -> None:
        if pieces is None:
            return
        with _refused_by_disk(self._directory):
            everyones = {file: entries for part in pieces for file, entries in part.items()}
            Checksums.of_directory(self._directory, everyones, PLAIN_FILES).write()


@contextlib.contextmanager
def _refused_by_disk(path: Path) -> Iterator[None]:
    """One sentence about a disk that refuses, or about what Megatron does not like to write to."""
    try:
        with refused_by_disk(path):
            yield
    except CheckpointingException as error:
        raise CheckpointError(f"{path}: could not be written ({error}); free space there") from error


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by the rank itself instead of by processes forked and spawned for it.

    Forking a process that has threads (Ray's actors do) may hang, and spawning needs an importable main module.

    Attributes:
        pieces: of every file that this rank has written.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.pieces: dict[str, list[Piece]] = {}
        self._writer: FileSystemWriterAsync | None = None

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        self._writer = writer
        return AsyncRequest(None, (), [lambda: save_state_dict_async_finalize(*save_state_dict_ret)])

    @property
    def writer(self) -> FileSystemWriterAsync:
        assert self._writer is not None, "the save has not been planned"
        return self._writer

    def take_snapshot(self) -> None:
        """Copy every tensor that is to be written; objects are serialised already."""
        for _, _, (_, tensors) in self.writer.write_buckets or []:
            for index, (item, tensor) in enumerate(tensors):
                tensors[index] = (item, tensor.detach().to("cpu", copy=True))

    def write(self) -> None:
        """This rank's files, all of them, flushed to disk. Needs neither CUDA nor another rank.

        Raises:
            CheckpointError: the disk refused.
        """
        if not self.writer.write_buckets:
            return
        results: dict[int, list[WriteResult]] = {}
        for index, (path, key, (objects, tensors)) in enumerate(self.writer.write_buckets):
            with _refused_by_disk(Path(path)):
                pieces, results[index] = write_data_file(Path(path), key, [*objects, *tensors])
                self.pieces.setdefault(key, []).extend(pieces)
        assert self.writer.results_queue is not None
        self.writer.results_queue.put(results)


class _CommonSave(TorchCommonSaveStrategy):
    """``common.pt`` as Megatron writes it, through a stream that tells what the system refused."""

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        if dist.get_rank() == 0:
            with (Path(checkpoint_dir) / COMMON_STATE_FNAME).open("wb") as file:
                save_to_stream(common_state_dict, file)


@contextlib.contextmanager
def _common_by_stream() -> Iterator[None]:
    """Inside, Megatron writes plain values by ``_CommonSave``; ``save`` takes no strategy for them as an argument."""
    original: Callable[..., Any] = serialization.get_default_save_common_strategy
    serialization.get_default_save_common_strategy = lambda: _CommonSave("torch", 1)
    try:
        yield
    finally:
        serialization.get_default_save_common_strategy = original


@contextlib.contextmanager
def _no_manager_process() -> Iterator[None]:
    """Results of a write pass through a queue of this process, not of a manager process that Megatron would spawn."""
    original: Callable[[], Any] = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = queue.Queue
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = original
