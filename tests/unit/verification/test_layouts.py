"""Names of layouts and their effect on a configuration."""

from pathlib import Path

import pytest

from slime_like.config import ParallelConfig, RunConfig
from slime_like.errors import ConfigError
from slime_like.verification.layouts import DEFAULT_LAYOUTS, ONE_RANK, parse_layout
from tests.support.rejections import Rejects


def test_a_name_sets_every_axis(tmp_path: Path) -> None:
    layout = parse_layout("tp2-sp-pp4-vpp3-cp8-dp5-ep10-distributed-overlap-allgather")
    axes = {"tensor": 2, "pipeline": 4, "virtual_pipeline": 3, "context": 8, "data": 5, "expert": 10}
    assert layout.parallel == ParallelConfig(**axes, sequence=True)
    config = RunConfig(
        run_dir=tmp_path, model={"path": tmp_path}, trainer={"optimizer": {"lr": 0.5}, "head_chunk_tokens": 7}
    )
    applied = layout.applied_to(config)
    assert applied.trainer.parallel == layout.parallel
    assert applied.trainer.optimizer.distributed and applied.trainer.optimizer.overlap
    assert applied.trainer.attention == "allgather"
    assert (applied.trainer.optimizer.lr, applied.trainer.head_chunk_tokens) == (0.5, 7)
    assert config.trainer.parallel == ParallelConfig()


def test_fsdp_always_shards_optimizer_state(tmp_path: Path) -> None:
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"backend": "fsdp"})
    for name in (ONE_RANK, "dp2"):
        assert parse_layout(name).applied_to(config).trainer.optimizer.distributed


def test_one_rank_keeps_the_attention(tmp_path: Path) -> None:
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer={"attention": "allgather"})
    applied = parse_layout(ONE_RANK).applied_to(config)
    assert applied.trainer.parallel.world_size == 1 and not applied.trainer.optimizer.distributed
    assert applied.trainer.attention == "allgather"


@pytest.mark.parametrize("name", ["", "tp", "tp0", "tp2-", "tp2-tp2", "tp2-tensor", "TP2", "single-tp2", "sp-sp"])
def test_other_names_are_rejected(rejects: Rejects, name: str) -> None:
    with rejects(ConfigError, "config"):
        parse_layout(name)


def test_default_layouts_are_distinct_and_cover_every_axis() -> None:
    layouts = [parse_layout(name) for name in DEFAULT_LAYOUTS]
    assert len({(each.parallel, each.distributed, each.attention) for each in layouts}) == len(layouts)
    for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "sequence"):
        assert any(getattr(each.parallel, axis) > 1 or getattr(each.parallel, axis) is True for each in layouts), axis
    assert max(each.parallel.world_size for each in layouts) == 8
