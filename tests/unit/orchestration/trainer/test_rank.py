"""Calls of a trainer rank reach its parts by the class that a method is of."""

from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

from slime_like.config import RunConfig
from slime_like.interfaces import RankCoordinates, TrainerBackend
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.orchestration.trainer.rank_training import RankTraining
from tests.support.rejections import Rejects


def test_a_call_reaches_the_part_that_has_the_method(tmp_path: Path, rejects: Rejects) -> None:
    rank = TrainerRank(RunConfig(run_dir=tmp_path, model=cast(Any, {"path": tmp_path})), 3)
    for method in (TrainerBackend.save, RankTraining.load_batch, RankExport.next_bucket):
        with rejects(RuntimeError):
            rank.call(method.__qualname__, tmp_path)
    assert rank.call(TrainerRank.peak_memory_bytes.__qualname__) > 0
    backend = Mock(TrainerBackend)
    rank._parts[TrainerBackend.__name__] = backend
    rank._open_parts(backend, RankCoordinates(0, 0, 0, 0, 0, 1))
    rank.call(TrainerBackend.save.__qualname__, tmp_path)
    backend.save.assert_called_once_with(tmp_path)
    rank.call(RankTraining.load_batch.__qualname__, [])
    with rejects(RuntimeError):
        rank.call(RankExport.next_bucket.__qualname__)
    rank.call(TrainerRank.shutdown.__qualname__)
    backend.shutdown.assert_called_once_with()
