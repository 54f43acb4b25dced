"""Whole runs of model families that the other tests don't run: killed, resumed, exported, and loaded again."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_like.examples.tiny_model import make_tiny_model
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.engines.test_other_models import LARGEST, MEAN
from tests.parallel.towers import KINDS, give_tower, is_language, tensors_of
from tests.support.processes import Command, succeed

FSDP = ["--trainer.backend", "fsdp", "--trainer.parallel.context", "2"]
MEGATRON = ["--trainer.parallel.tensor", "2", "--trainer.parallel.sequence", "true"]
RUNS = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "gpt_oss", "gemma3_text", "qwen3"), FSDP)
RUNS |= {
    "qwen3_next": MEGATRON,
    "gemma3_text-megatron": MEGATRON,
    "glm4_moe": [*MEGATRON, "--trainer.router_bias_rate", "1e-3"],
}
TOWERS = {"qwen3": "qwen3_vl"}
"""Families that get a tower, and the model types of the whole models."""
SERVED = ("gpt_oss", "glm4_moe")
"""Families whose trained models vLLM also loads and serves."""
STEPS = 4


@pytest.mark.acceptance
@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_killed_resumed_and_exported(run: str, tiny: Tiny, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", run.partition("-")[0], seed=1)
    if run in TOWERS:
        give_tower(tmp_path / "model", TOWERS[run])
    model = Tiny(tmp_path / "model", tiny.data)

    def flags(name: str) -> list[str]:
        common = ["--steps", str(STEPS), "--checkpoint.every", "2", "--rollout.engine", "transformers"]
        common += ["--algorithm.kl.coef", "0.01", "--trainer.optimizer.lr", "1e-3"]
        return model.rl_flags(tmp_path / name, *common, *RUNS[run])

    succeed(flags("whole"), tmp_path / "log")
    with Command(flags("killed"), tmp_path / "first") as command:
        command.wait_for("checkpoint of step 2", timeout_s=120)
        command.kill()
        assert command.finish(timeout_s=30).code == -9
    succeed(flags("killed"), tmp_path / "second")
    whole = {row["step"]: row for row in steps_of(tmp_path / "whole")}
    resumed = {row["step"]: row for row in steps_of(tmp_path / "killed")}
    assert set(whole) == set(resumed) == set(range(1, STEPS + 1))
    for step, row in resumed.items():
        assert row["weights/probe_gap"] < 1e-4 and row["train_actor_training/engine_gap_max"] < 1e-4
        for name in ("loss", "grad_norm", "entropy"):
            key = f"train_actor_training/{name}"
            assert row[key] == pytest.approx(whole[step][key], abs=1e-6)
    before, *after = (tensors_of(tmp_path / name) for name in ("model", "whole/hf", "killed/hf"))
    assert all(exported.keys() == before.keys() for exported in after)
    for name, weight in before.items():
        assert torch.equal(after[0][name], after[1][name]), name
        assert torch.equal(after[0][name], weight) != is_language(name), name
    if run not in TOWERS:
        _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "killed/hf", output_loading_info=True)
        assert not any(loading.values())
    if run in SERVED:
        model = Tiny(tmp_path / "killed/hf", tiny.data)
        succeed(["eval", *model.rl_flags(tmp_path / "eval", "--rollout.engine", "vllm")[1:]], tmp_path / "vllm")


@pytest.mark.acceptance
def test_vllm_serves_gated_delta_nets_of_a_model_with_a_tower(tiny: Tiny, tmp_path: Path) -> None:
    """On a CPU, vLLM computes them only in bfloat16. A run whose probe exceeds its bound fails."""
    make_tiny_model(tmp_path / "model", "qwen3_5_text", seed=1)
    give_tower(tmp_path / "model", "qwen3_5")
    vllm = ["--rollout.engine", "vllm", "--model.dtype", "bfloat16"]
    flags = Tiny(tmp_path / "model", tiny.data).rl_flags(tmp_path / "run", "--steps", str(STEPS), *FSDP, *vllm)
    flags += ["--checkpoint.every", "2", "--trainer.optimizer.lr", "1e-3"]
    with Command(flags, tmp_path / "first") as command:
        command.wait_for("checkpoint of step 2", timeout_s=240)
        command.kill()
        assert command.finish(timeout_s=30).code == -9
    succeed(flags, tmp_path / "second")
    rows = {row["step"]: row for row in steps_of(tmp_path / "run")}
    assert set(rows) == set(range(1, STEPS + 1))
    for row in rows.values():
        assert 0 < row["weights/probe_gap"] < LARGEST
        assert 0 < row["train_actor_training/engine_gap_mean"] < MEAN
    before, after = (tensors_of(tmp_path / name) for name in ("model", "run/hf"))
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight.to(after[name].dtype)) != is_language(name), name
    for engine in ("vllm", "transformers"):
        again = Tiny(tmp_path / "run/hf", tiny.data).rl_flags(tmp_path / engine, *vllm, "--rollout.engine", engine)
        succeed(["eval", *again[1:]], tmp_path / f"{engine}-log")


@pytest.mark.acceptance
def test_sglang_serves_a_model_with_a_tower(tiny: Tiny, tmp_path: Path) -> None:
    """It builds the tower, and computes with three positions per token."""
    make_tiny_model(tmp_path / "model", "qwen3", seed=1)
    give_tower(tmp_path / "model", "qwen3_vl")
    file, (_, _, text, vision) = tmp_path / "model" / "config.json", KINDS["qwen3_vl"]
    config = json.loads(file.read_text())
    config["vision_config"] = {**vision, "out_hidden_size": config["text_config"]["hidden_size"]}
    config["text_config"] |= text
    file.write_text(json.dumps(config))
    flags = Tiny(tmp_path / "model", tiny.data).rl_flags(tmp_path / "run", "--rollout.engine", "sglang")
    succeed([*flags, "--trainer.optimizer.lr", "1e-3"], tmp_path / "log")
    rows = {row["step"]: row for row in steps_of(tmp_path / "run")}
    assert set(rows) == {1, 2}
    for row in rows.values():
        assert row["weights/probe_gap"] < 1e-4 and row["train_actor_training/engine_gap_max"] < 1e-4
    before, after = (tensors_of(tmp_path / name) for name in ("model", "run/hf"))
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight) != is_language(name), name
