"""An FSDP rank holds exactly the bytes of parameters and moments that ``slime-like plan`` predicts.

Not compared: memory for messages, which can be measured only on GPUs.
"""

from pathlib import Path
from typing import Any

import pytest

from backends.fsdp.parallel import shard_of
from backends.fsdp.planning import estimate, rank_kinds
from slime_like.config import LoraConfig, RunConfig
from slime_like.interfaces import RankPlacement
from tests.parallel.held import storage_bytes
from tests.parallel.ranks import run_each
from tests.parallel.steps import running
from tests.parallel.tiny import save_checkpoint, tiny_config
from tests.support.acceptance import some_in_acceptance


def _held(placement: RankPlacement, config: RunConfig) -> tuple[int, int]:
    with running(placement, config) as trainer:
        shards = [shard_of(parameter) for parameter in trainer.model.parameters()]
        moments = [value for state in trainer.optimizer.moments.values() for value in state.values()]
        return storage_bytes(shards), sum(value.nbytes for value in moments)


FIRST, OTHERS = ["qwen2", "qwen3_moe"], ["deepseek_v3", "qwen3_next"]


@pytest.mark.parametrize("families", some_in_acceptance([FIRST, OTHERS], lambda families: families is OTHERS), ids=str)
def test_weights_and_moments_are_as_planned(families: list[str], tmp_path: Path) -> None:
    """Three ranks divide nothing evenly: neither a vocabulary of 151 nor experts nor norms of 64."""
    sections: dict[str, Any] = {"data": {"max_prompt_tokens": 32}, "rollout": {"max_new_tokens": 32}}
    sections["trainer"] = {"backend": "fsdp", "target_tokens_per_batch": 96}
    models = [save_checkpoint(family, tmp_path / family, layers=2) for family in families]
    # Three context ranks cannot share four heads of linear attention.
    layouts = [{"data" if family == "qwen3_next" else "context": 3} for family in families]
    pairs = zip(models, layouts, strict=True)
    configs = [tiny_config(model, tmp_path, layout, "bfloat16", **sections) for model, layout in pairs]
    if families is FIRST:
        lora = configs[1].model.model_copy(update={"lora": LoraConfig(rank=4)})
        configs.append(configs[1].model_copy(update={"model": lora}))
    held = run_each(_held, 3, tmp_path / "ranks", [(config,) for config in configs])
    for config, found in zip(configs, held, strict=True):
        (kind,) = rank_kinds(config.trainer)
        context = config.trainer.parallel.context
        assert sorted(kind.ranks) == [0, 1, 2] and kind.ranks[0] == context - 1
        planned = [estimate(config, rank) for rank in range(3)]
        for memory, real in zip((each.memory for each in planned), found, strict=True):
            assert (memory.parameter_bytes, memory.optimizer_bytes) == real, config.model.path
            assert memory.activation_bytes > 0 and memory.saved_bytes > 0
        training = planned[0].training
        axes = {"context", "data"} if context > 1 else {"data"}
        assert {traffic.axis for traffic in training.traffic} == axes and training.matmul_flops > 0
