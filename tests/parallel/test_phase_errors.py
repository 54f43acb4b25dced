"""What a rank says when a phase fails. No process group is needed for that."""

from pathlib import Path

import pytest

from backends.megatron.trainer import MegatronTrainer
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_ranks_are_suspected_only_where_there_are_any(tmp_path: Path, world_size: int) -> None:
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path})
    trainer = MegatronTrainer(config, RankPlacement(0, world_size, 0, "127.0.0.1", 29500))
    with pytest.raises(TrainerError) as caught, trainer._phase("accumulate"):
        raise RuntimeError("my own bug")
    message = "rank 0, accumulate: RuntimeError: my own bug"
    hint = "; if a collective failed, another rank died or hung: the message of that rank says why"
    assert str(caught.value) == (message if world_size == 1 else message + hint)
