"""Runs with a critic, low-rank factors, 8-bit engines, or the engine's routes. The quick ones share a cluster."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_like.config.reading.load import load_config
from slime_like.data.dump import dump_path, load_trajectories
from slime_like.data.ledger import audit_run
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.verification.rehearsal import _export
from tests.conftest import Tiny
from tests.end_to_end.test_train import metrics_of, steps_of
from tests.support.acceptance import some_in_acceptance
from tests.support.processes import succeed
from tests.support.shared_cluster import train_together
from tests.unit.weights.test_quantization import defined

FSDP = ["--trainer.backend", "fsdp"]
TP2 = ["--trainer.parallel.tensor", "2"]
TWO = [*TP2, "--trainer.parallel.sequence", "true"]
PP2 = ["--trainer.parallel.pipeline", "2"]
EP2 = ["--trainer.parallel.data", "2", "--trainer.parallel.expert", "2"]
UNTESTED = ["--evaluation.files", "[]", "--algorithm.minibatches"]
AHEAD = ["--rollout.max_staleness", "1", "--algorithm.importance.correction", "truncate", "--rollout.stream", "true"]

RANK, SHOWN, EVALUATED = 6, 4, "evaluated"
LORA = ["--model.lora.rank", str(RANK), "--model.lora.alpha", "9", "--trainer.optimizer.lr", "1e-2"]
FACTORS: dict[str, list[str]] = {
    "transformers-adapter-ahead": [*AHEAD, *TWO],
    "transformers-merged": FSDP,
    "sglang-adapter": FSDP,
    "vllm-adapter": TWO,
    "vllm-adapter-tp2-ahead": [*AHEAD, *FSDP, "--rollout.tensor", "2"],
    "sglang-adapter-tp2-ahead": [*AHEAD, "--rollout.tensor", "2"],
    "vllm-merged": [*TWO, "--sync.delta", "always", "--sync.transport", "gloo"],
    "sglang-merged": TWO,
    "transformers-adapter-stages": PP2,
}
PPO = ["--algorithm.advantage", "{name: gae, lam: 0.9}", "--critic.optimizer.lr", "1e-2", *UNTESTED, "1"]
PPO += ["--rollout.engine", "transformers", "--critic.warmup_steps", "1", "--checkpoint.every", "2"]
CRITICS: dict[str, list[str]] = {
    "shared": ["--algorithm.kl_reward.coef", "0.05"],
    "separate": ["--critic.placement", "separate", "--critic.parallel.data", "2", *FSDP],
}
EIGHT_BITS = ["--rollout.engine", "transformers", "--sync.quantization", "fp8_blocks", *UNTESTED, "1"]
EIGHT_BITS += ["--algorithm.importance.correction", "truncate"]
QUANTIZED = {
    "megatron": TP2,
    "fsdp": [*FSDP, "--sync.transport", "gloo", "--sync.delta", "always"],
    "colocated": ["--cluster.placement", "colocated", *PP2],
}
ROUTED: dict[str, list[str]] = {
    "transformers-qwen3_moe-pp2": PP2,
    "sglang-qwen3_moe-ep2": EP2,
    "sglang-deepseek_v3-ep2": EP2,
    "sglang-deepseek_v3-pp2": PP2,
}


def factors(tiny: Tiny, root: Path, case: str) -> list[list[str]]:
    if case == EVALUATED:
        engine = ["--rollout.engine", "transformers", "--model.lora.sync", "adapter"]
        return [tiny.rl_flags(root / "run", *engine, *LORA)]
    engine, form = case.split("-")[:2]
    flags = ["--rollout.engine", engine, "--model.lora.sync", form, "--steps", "3", *UNTESTED, "1"]
    return [tiny.rl_flags(root / "run", *flags, "--algorithm.kl.coef", "0.01", *LORA, *FACTORS[case])]


def critic(tiny: Tiny, root: Path, case: str) -> list[list[str]]:
    flags = [*PPO, *CRITICS[case], "--checkpoint.keep", "9", "--steps", "4"]
    resume = ["--resume", str(root / "whole" / "checkpoints" / "step-000002")]
    return [tiny.rl_flags(root / "whole", *flags), tiny.rl_flags(root / "cut", *flags, *resume)]


def quantized(tiny: Tiny, root: Path, case: str) -> list[list[str]]:
    saved = ["--debug.save_rollouts", str(root / "rollouts")]
    return [
        tiny.rl_flags(root / "run", *EIGHT_BITS, *QUANTIZED[case], *saved, "--steps", steps) for steps in ("1", "2")
    ]


def routed(tiny: Tiny, root: Path, case: str) -> list[list[str]]:
    engine, family, _ = case.split("-")
    make_tiny_model(root / "model", family=family, seed=0)
    flags = ["--model.path", str(root / "model"), "--model.dtype", "float32", "--rollout.engine", engine]
    flags += ["--trainer.optimizer.lr", "1e-3", "--algorithm.routing_replay", "rollout", *UNTESTED, "2", *ROUTED[case]]
    return [tiny.rl_flags(root / "run", *flags, "--steps", steps) for steps in ("2", "4")]


Method = Callable[[Tiny, Path, str], list[list[str]]]
QUICK: dict[Method, list[str]] = {
    factors: [*list(FACTORS)[:2], EVALUATED],
    critic: ["shared"],
    quantized: ["megatron"],
    routed: ["transformers-qwen3_moe-pp2"],
}


@pytest.fixture(scope="module")
def together(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the quick runs, each in the folder of its case."""
    root = tmp_path_factory.mktemp("together")
    runs = [flags for method, cases in QUICK.items() for case in cases for flags in method(tiny, root / case, case)]
    train_together(runs, root, timeout_s=560.0)
    return root


@pytest.fixture
def trained_by(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Callable[[Method, str], Path]:
    def directory_of(method: Method, case: str) -> Path:
        if case in QUICK[method]:
            together: Path = request.getfixturevalue("together")
            return together / case
        train_together(method(tiny, tmp_path / case, case), tmp_path)
        return tmp_path / case

    return directory_of


Trained = Callable[[Method, str], Path]


def cases(method: Method, every: Iterable[str]) -> list[object]:
    return some_in_acceptance(every, lambda case: case not in QUICK[method])


@pytest.mark.parametrize("case", cases(factors, FACTORS))
def test_engines_and_trainer_agree_about_factors(tiny: Tiny, trained_by: Trained, case: str) -> None:
    """Factors change at a high rate, so an engine with old ones would be found."""
    rows = steps_of(trained_by(factors, case) / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["weights/probe_gap"] < 1e-4
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4 or "ahead" in case
    losses = [row["train_actor_training/kl_loss"] for row in rows]
    assert losses[0] == pytest.approx(0.0, abs=1e-6) and losses[-1] > 1e-3  # the reference is the base
    base = load_file(tiny.model / "model.safetensors")
    targets = [weight.shape for name, weight in base.items() if name.endswith("_proj.weight")]
    whole = sum(weight.numel() for weight in base.values()) if "merged" in case else RANK * sum(map(sum, targets))
    assert {row["weights/sync_bytes"] for row in rows} == {4 * whole}


def test_an_evaluation_of_an_adapter(tiny: Tiny, trained_by: Trained, tmp_path: Path) -> None:
    """It samples what the run sampled after its last step, and not what it sampled from the base before the first.

    Rehearsals accept the exported adapter, but not with other targets.
    """
    run_dir = trained_by(factors, EVALUATED) / "run"
    trained = load_config(run_dir / "config.yaml", []).model
    other = trained.model_copy(update={"lora": trained.lora.model_copy(update={"targets": ("q_proj",)})})
    assert [_export(run_dir / "hf", model).is_sound for model in (trained, other)] == [True, False]
    sampled = _responses(run_dir / "tables" / "held_out_debug_table.jsonl")
    flags = tiny.rl_flags(tmp_path, "--rollout.engine", "transformers", "--model.lora.path", str(run_dir / "hf"))
    succeed(["eval", *flags[1:], "--output", str(tmp_path / "eval.jsonl")], tmp_path / "log")
    found = _responses(tmp_path / "eval.jsonl")
    assert found[:SHOWN] == sampled[SHOWN:] != sampled[:SHOWN]
    assert len(found) == 16


def _responses(file: Path) -> list[str]:
    return [json.loads(line)["Response"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("case", cases(critic, CRITICS))
def test_a_run_trains_both_models_and_resumes(trained_by: Trained, case: str) -> None:
    """The first step leaves the policy as it is. A resumed run continues bit by bit."""
    root = trained_by(critic, case)
    rows = [row for row in metrics_of(root / "whole") if "train_critic/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert "train_actor_training/loss" not in rows[0] and "train_actor_training/loss" in rows[1]
    assert all(row["train_critic/loss"] > 0 and row["train_critic/old_gap_max"] < 1e-5 for row in rows)
    assert load_file(root / "whole" / "critic_hf" / "model.safetensors")["score.weight"].any()
    assert rows[0]["train_critic/values"] == 0 and rows[3]["train_critic/values"] != 0
    if case == "shared":
        assert all("train_actor_training/kl_reward" in row for row in rows)
    resumed = [row for row in metrics_of(root / "cut") if "train_critic/loss" in row]
    for name in ("train_critic/loss", "train_critic/values", "train_actor_training/loss"):
        assert resumed[-1][name] == rows[3][name]


@pytest.mark.parametrize("case", cases(quantized, QUANTIZED))
def test_engines_sample_from_the_rounded_policy(tiny: Tiny, trained_by: Trained, case: str) -> None:
    """Importance weights correct it, and the run is resumed."""
    root = trained_by(quantized, case)
    rows = steps_of(root / "run")
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
    for each in load_trajectories(dump_path(root / "rollouts", 1)):
        tokens = torch.cat([each.prompt_tokens, each.response_tokens])[None]
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, each.prompt_len - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, each.response_tokens[:, None])[:, 0]
        torch.testing.assert_close(each.logprobs, expected, atol=1e-4, rtol=0)
    # Only engines get 8-bit weights.
    files = (root / "run" / "hf").glob("*.safetensors")
    written = {name: weight for file in files for name, weight in load_file(file).items()}
    assert written.keys() == plain.keys() and {weight.dtype for weight in written.values()} == {torch.float32}


@pytest.mark.parametrize("case", cases(routed, ROUTED))
def test_a_run_with_the_engines_routes_and_its_resumption(trained_by: Trained, case: str) -> None:
    """In float32, logprobs of trainer and engine then differ by rounding only, in every step before and after."""
    run_dir = trained_by(routed, case) / "run"
    rows = {row["step"]: row for row in steps_of(run_dir)}
    assert sorted(rows) == [1, 2, 3, 4]
    for row in rows.values():
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4
        assert 0 <= row["train_actor_training/routing_disagreement"] < 0.2
    assert not audit_run(run_dir).problems
