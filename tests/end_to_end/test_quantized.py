"""Runs that sample with 8-bit weights: from the rounded policy, corrected by importance weights, and resumed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_like.data.dump import dump_path, load_trajectories
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.acceptance import some_in_acceptance
from tests.support.shared_cluster import train_together
from tests.unit.weights.test_quantization import defined

FLAGS = ["--rollout.engine", "transformers", "--sync.quantization", "fp8_blocks"]
FLAGS += ["--algorithm.importance.correction", "truncate", "--algorithm.minibatches", "1", "--evaluation.files", "[]"]
CASES = {
    "megatron": ["--trainer.parallel.tensor", "2"],
    "fsdp": ["--trainer.backend", "fsdp", "--sync.transport", "gloo", "--sync.delta", "always"],
    "colocated": ["--cluster.placement", "colocated", "--trainer.parallel.pipeline", "2"],
}


@pytest.mark.parametrize("case", some_in_acceptance(CASES, lambda case: case != "megatron"))
def test_a_run_and_its_resumption(tiny: Tiny, tmp_path: Path, case: str) -> None:
    run_dir, rollouts = tmp_path / "run", tmp_path / "rollouts"
    flags = tiny.rl_flags(run_dir, *FLAGS, *CASES[case], "--debug.save_rollouts", str(rollouts))
    train_together([[*flags, "--steps", "1"], [*flags, "--steps", "2"]], tmp_path)
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    plain = load_file(tiny.model / "model.safetensors")
    rounded = {name: weight for name, weight in plain.items() if name.endswith("_proj.weight")}
    sent = {name: defined(weight.numpy()) for name, weight in rounded.items()}
    others = sum(weight.nbytes for name, weight in plain.items() if name not in rounded)
    for row in rows:
        assert row["weights/sync_bytes"] == others + sum(part.nbytes for found in sent.values() for part in found[:2])
        assert 1e-3 < row["weights/probe_gap"] < 1
        assert 1e-3 < row["train_actor_training/engine_gap_mean"] < row["train_actor_training/engine_gap_max"] < 1
        assert 0 < abs(row["train_actor_training/importance_weight"] - 1) < 0.1
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    for name, found in sent.items():
        model.get_parameter(name).data.copy_(torch.from_numpy(found[2]))
    for each in load_trajectories(dump_path(rollouts, 1)):
        tokens = torch.cat([each.prompt_tokens, each.response_tokens])[None]
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, each.prompt_len - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, each.response_tokens[:, None])[:, 0]
        torch.testing.assert_close(each.logprobs, expected, atol=1e-4, rtol=0)
    # Only engines get 8-bit weights.
    files = (run_dir / "hf").glob("*.safetensors")
    written = {name: weight for file in files for name, weight in load_file(file).items()}
    assert written.keys() == plain.keys() and {weight.dtype for weight in written.values()} == {torch.float32}
