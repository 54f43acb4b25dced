"""Engines that no trainer works beside: there whatever a run's file says of training."""

from pathlib import Path

import pytest

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.evaluate import engines_alone
from slime_like.orchestration.cluster.bundles import bundle_sizes
from tests.unit.checks.checkpoint import sound_flags

OF_TRAINING = [
    ["--algorithm.loss", "sft"],
    ["--debug.load_rollouts", "kept"],
    ["--cluster.placement", "colocated"],
    ["--reference.placement", "workers", "--algorithm.kl_coef", "0.1"],
    ["--trainer.parallel.tensor", "4"],
    ["--rollout.samples_per_prompt", "64"],
    ["--sync.timeout_s", "1"],
]


def _config(tmp_path: Path, *flags: str) -> RunConfig:
    return load_config(None, [*sound_flags(tmp_path), "--rollout.num_engines", "2", "--rollout.tensor", "2", *flags])


@pytest.mark.parametrize("flags", OF_TRAINING, ids=" ".join)
def test_settings_of_training_do_not_reach_them(tmp_path: Path, flags: list[str]) -> None:
    alone = engines_alone(_config(tmp_path, *flags))
    assert alone == engines_alone(_config(tmp_path))
    assert bundle_sizes(alone, with_trainers=False) == [2, 2]


def test_settings_of_their_own_do(tmp_path: Path) -> None:
    config = _config(
        tmp_path, "--trainer.cpu_kernels", "off", "--trainer.start_timeout_s", "7", "--rollout.stream", "true"
    )
    alone = engines_alone(config)
    assert (alone.trainer.cpu_kernels, alone.trainer.start_timeout_s) == ("off", 7)
    assert alone.rollout == config.rollout and alone.reward == config.reward and alone.evaluation == config.evaluation
