"""Writing a distributed checkpoint in torch's format: by the rank itself, at once or behind its back."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.data_file import refused_by_disk, write_data_file
from backends.common.checkpoint.rank_writing import RankWriting
from backends.common.process.agreement import gathered, together

COMMON = "common.json"
PLAIN_FILES = (".metadata", COMMON)
"""What is written beside the data files; every rank reads them as a whole."""


class CheckpointWriter(RankWriting):
    """One checkpoint on its way to disk: planned when made, then written, then finished.

    Args:
        state: tensors by name; sharded ones are written once, each rank its part.
        common: plain values, the same on every rank.
        snapshot: copy every tensor to host memory now, so that the state may change before it is written.
    """

    plain_files = PLAIN_FILES

    def __init__(
        self,
        directory: Path,
        state: dict[str, Tensor],
        common: dict[str, Any],
        device: torch.device,
        snapshot: bool = False,
    ) -> None:
        super().__init__(directory, device)
        self._common = common
        self._results: list[WriteResult] = []
        self._metadata: Metadata | None = None
        planner, plan = self._plan(state)
        self._entries = [(item, planner.resolve_data(item)) for item in plan.items]
        if snapshot:
            self._entries = [(item, _host_copy(data)) for item, data in self._entries]

    def _plan(self, state: dict[str, Tensor]) -> tuple[DefaultSavePlanner, SavePlan]:
        """Plan this rank's files. Rank 0 merges all plans, and keeps the index."""
        planner, first = DefaultSavePlanner(), dist.get_rank() == 0
        planner.set_up_planner(state, is_coordinator=first)
        local_plan = planner.create_local_plan()
        settled: list[Any] = [None]
        everyones: list[Any] | None = None
        if (plans := gathered(local_plan)) is not None:
            everyones, self._metadata = planner.create_global_plan(plans)
        dist.scatter_object_list(settled, everyones)
        return planner, planner.finish_plan(settled[0])

    def _write(self) -> None:
        if not self._entries:
            return
        name = f"__{dist.get_rank()}_0.distcp"
        with refused_by_disk(self._directory / name):
            self._pieces[name], self._results = write_data_file(self._directory / name, name, self._entries)
        self._entries = []

    def _write_index(self) -> None:
        results = gathered(self._results)
        together(lambda: self._write_plain_files(results), f"writing {self._directory}", self._device)

    def _write_plain_files(self, results: list[list[WriteResult]] | None) -> None:
        if results is None or self._metadata is None:
            return
        with refused_by_disk(self._directory):
            FileSystemWriter(self._directory).finish(self._metadata, results)
            with (self._directory / COMMON).open("w", encoding="utf-8") as file:
                json.dump(self._common, file, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())


def _host_copy(data: Any) -> Any:
    return data.detach().to("cpu", copy=True) if isinstance(data, Tensor) else data
