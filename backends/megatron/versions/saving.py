"""Plain values and results of a save: both versions write the same files.

0.16 writes plain values (``common.pt``) with a separate strategy. 0.19 would store them as another object of the
sharded state, but reads ``common.pt`` if it exists. Written the old way, either version reads the other's checkpoints.
"""

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async

from backends.megatron.installed import IS_NEW, absent
from backends.megatron.patch import Patch, applied

SaveCommon = Callable[[dict[str, Any], "str | Path"], None]
"""Writer of plain values into a checkpoint's directory."""

ASYNC_OPTIONS: dict[str, Any] = {"async_strategy": "mcore"} if IS_NEW else {}
"""Options of ``dist_checkpointing.save``: don't use the package that 0.19 prefers."""

_COMMON = "common_state"


@contextlib.contextmanager
def saving_in_process(save_common: SaveCommon) -> Iterator[None]:
    """Inside, pass results through a queue of this process, not of a manager process that Megatron would spawn.

    ``save`` has no argument for the strategy of plain values.
    """
    with contextlib.ExitStack() as stack:
        name = "get_write_results_queue" if IS_NEW else "_get_write_results_queue"
        stack.enter_context(applied(Patch(filesystem_async, name, queue.Queue)))
        if not IS_NEW:
            stack.enter_context(_saved_by(save_common))
        yield


@contextlib.contextmanager
def _saved_by(save_common: SaveCommon) -> Iterator[None]:
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    class CommonSave(TorchCommonSaveStrategy):
        def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
            save_common(common_state_dict, checkpoint_dir)

    with applied(Patch(serialization, "get_default_save_common_strategy", lambda: CommonSave("torch", 1))):
        yield


class PlainValues:
    """Mixin of a strategy for sharded state: removes the plain values if Megatron added them to the state."""

    save_common: SaveCommon

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *strategy: Any) -> Any:
        """Run like Megatron's."""
        if IS_NEW:
            if _COMMON not in sharded_state_dict:
                raise absent(f"serialization.save's {_COMMON!r}")
            self.save_common(sharded_state_dict.pop(_COMMON).data, checkpoint_dir)
        return super().async_save(sharded_state_dict, checkpoint_dir, *strategy)  # type: ignore[misc]
