"""``slime-like verify engine``: a sound engine satisfies every claim, and claims detect faulty engines."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.transformers import weights
from rollout.transformers.engine import TransformersEngine
from rollout.transformers.samples import Sample
from slime_like.commands.main import main
from slime_like.examples.look_alike import make_look_alike
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Generation, GenerationRequest, PromptInput, Supports
from slime_like.models.dimensions import ModelDimensions
from slime_like.verification.engine import claims
from slime_like.verification.engine.claims import _others as others
from slime_like.verification.engine.claims import _prompts as prompts
from slime_like.verification.engine.claims import every_tensor, truncated_sampling, verify_engine
from slime_like.verification.engine.subject import ClaimFailed, DrivenEngine, ReferenceModel, Subject, start_engine
from tests.engines.harness import run_config

ROOT = Path(__file__).parents[2]


ON_CUDA = torch.cuda.is_available()
FLOAT32 = pytest.param("float32", marks=pytest.mark.skipif(ON_CUDA, reason="engines support only bfloat16 there"))
BFLOAT16 = pytest.param("bfloat16", marks=[] if ON_CUDA else pytest.mark.acceptance)
CLOSE = {"float32": 2e-5, "bfloat16": 0.055}
"""Upper bound on the gaps of a sound engine in these tests."""


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_sound_engine_satisfies_every_claim(dtype: Any, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    config = run_config(tmp_path / "model", tmp_path / "run", engine="transformers", dtype=dtype)
    verdicts = list(verify_engine(config))
    assert [verdict for verdict in verdicts if verdict.problem is not None] == []
    assert len(verdicts) == len(claims.CLAIMS) and len({verdict.claim for verdict in verdicts}) == len(verdicts)
    assert max(verdict.gap or 0.0 for verdict in verdicts) < CLOSE[dtype]


@pytest.mark.acceptance
@pytest.mark.parametrize("model", ["Qwen3-1.7B", "Qwen2.5-0.5B", "Llama-3.1-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_installed_engines_satisfy_every_claim(engine: str, model: str) -> None:
    command = [sys.executable, "-m", "slime_like.commands.main", "verify", "engine", "--rollout.engine", engine]
    command += ["--model", str(ROOT / "configs" / "models" / model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    if engine == "vllm" and "A3B" in model:  # on a CPU, it cannot update experts
        assert ended.returncode == 1 and "[model-not-served]" in ended.stderr
        return
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("\nholds ") + ended.stdout.startswith("holds ") == len(claims.CLAIMS)


@pytest.fixture(scope="module", params=[FLOAT32, BFLOAT16])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    root = tmp_path_factory.mktemp("subject")
    make_tiny_model(root, num_hidden_layers=1, num_key_value_heads=4)
    engine = TransformersEngine(run_config(root, root / "run", dtype=request.param), 0)
    with start_engine(engine) as loop:
        driven = DrivenEngine(engine, loop)
        try:
            reference = ReferenceModel(root, request.param)
            yield Subject(driven, reference, others(reference.weights), prompts(root)[:4])
        finally:
            driven.close()


def test_ignored_tensors_are_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the tensors, then the other half, arrive and are hashed, but are written elsewhere. Each is changed by
    itself, so the others do not affect its result."""
    usual, names = weights.destination, list(subject.reference.weights)
    assert len(names) == 14
    for ignored in (names[::2], names[1::2]):

        def elsewhere(name: str, tensors: dict[str, torch.Tensor], ignored: list[str] = ignored) -> torch.Tensor:
            found = usual(name, tensors)
            return found.clone() if name in ignored else found

        monkeypatch.setattr(weights, "destination", elsewhere)
        with pytest.raises(ClaimFailed, match="updates of 7 of 14 tensors have no effect: ") as caught:
            every_tensor(subject)
        assert [name for name in names if f"{name} (" in str(caught.value)] == ignored
    monkeypatch.undo()
    assert every_tensor(subject) < CLOSE[subject.reference.dtype]


def test_swapped_tensors_are_detected(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, names = weights.destination, {"k_proj": "v_proj", "v_proj": "k_proj"}

    def swapped(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        module = name.split(".")[-2]
        return usual(name.replace(module, names.get(module, module)), tensors)

    base = dict(subject.reference.weights)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "destination", swapped)
        with pytest.raises(ClaimFailed) as caught:
            every_tensor(subject)
        assert all(f".{name}.weight (" in str(caught.value) for name in names)
    subject.load(base)


@pytest.mark.parametrize("claim", [claims.idle_update, claims.update_amid_requests])
def test_old_weights_are_detected(claim: claims.Claim, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights arrive and are hashed, but not used."""
    usual, base = weights.destination, dict(subject.reference.weights)
    subject.others = others(base)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "destination", lambda name, tensors: usual(name, tensors).clone())
        with pytest.raises(ClaimFailed, match=r"logprobs (after|around) an update differ"):
            claim(subject)
    subject.others = others(base)
    subject.load(base)
    claim(subject)
    subject.load(base)


@pytest.mark.parametrize(
    ("claim", "fault"),
    [
        (claims.sampled_logprobs, {"temperature": 1.0}),
        (claims.greedy, {"temperature": 1.0}),
        (claims.seeds, {"seed": 5}),
        (claims.seeds, {"seed": None}),
        (claims.stop_tokens, {"stop_token_ids": (263,)}),
        (claims.unknown_fields, {"prompt": PromptInput([3, 4])}),
    ],
)
def test_ignored_settings_are_detected(
    claim: claims.Claim, fault: dict[str, Any], subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(subject)
    usual = TransformersEngine.generate

    async def ignoring(engine: TransformersEngine, request: GenerationRequest) -> list[Generation]:
        changed = (
            fault if fault.keys() & {"seed", "prompt"} else {"sampling": dataclasses.replace(request.sampling, **fault)}
        )
        return await usual(engine, dataclasses.replace(request, **changed))

    monkeypatch.setattr(TransformersEngine, "generate", ignoring)
    with pytest.raises(ClaimFailed):
        claim(subject)


def test_wrong_supports_are_detected(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (truncated_sampling(subject) or 0.0) < CLOSE[subject.reference.dtype]
    usual = Sample.to_generation
    for change in (lambda each: [*each[1:], each[0]], lambda each: [ids[1:] for ids in each]):

        def wrong(sample: Sample, change: Any = change) -> Generation:
            found = usual(sample)
            if found.supports is None:  # for evaluation
                return found
            return dataclasses.replace(found, supports=Supports.of(change(list(found.supports))))

        monkeypatch.setattr(Sample, "to_generation", wrong)
        with pytest.raises(ClaimFailed):
            truncated_sampling(subject)


def test_a_tensor_without_effect_refutes_the_claim(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(claims._MOVES, subject.reference.dtype, 1e9)
    with pytest.raises(ClaimFailed, match="14 tensors could not be tested"):
        every_tensor(subject)


@pytest.mark.parametrize("with_vocabulary", [True, False])
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs" / "models").iterdir()))
def test_a_look_alike_keeps_its_family_s_features(name: str, with_vocabulary: bool, tmp_path: Path) -> None:
    model = shutil.copytree(ROOT / "configs" / "models" / name, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    if with_vocabulary and config["vocab_size"] * (2 - config["tie_word_embeddings"]) > 200_000:
        config["vocab_size"] = 20_000 + config["vocab_size"] % 512  # a test has a second
        config |= {"eos_token_id": 3, "bos_token_id": 4}
        (model / "config.json").write_text(json.dumps(config))
        (model / "generation_config.json").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text("{}")
    make_look_alike(model, tmp_path / "small", with_vocabulary=with_vocabulary)
    real, small = ModelDimensions.from_checkpoint(model), ModelDimensions.from_checkpoint(tmp_path / "small")
    same = "family tied_embeddings qkv_bias qk_norm rope_theta rope_scaling norm_eps moe_norm_topk_prob"
    for field in same.split():
        assert getattr(small, field) == getattr(real, field), field
    assert small.num_layers == 2 and (small.num_heads > small.num_kv_heads) == (real.num_heads > real.num_kv_heads)
    assert (small.num_experts > 0) == (real.num_experts > 0)
    assert small.vocab_size % 512 == real.vocab_size % 512
    assert (small.vocab_size == real.vocab_size) == with_vocabulary
    assert (tmp_path / "small" / "tokenizer_config.json").exists() == with_vocabulary
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in tensors.values())


def test_a_look_alike_keeps_groups_of_experts_and_both_kinds_of_layers(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "deepseek_v3")
    make_look_alike(tmp_path / "model", tmp_path / "small", with_vocabulary=False)
    small = ModelDimensions.from_checkpoint(tmp_path / "small")
    assert (small.family, small.moe_groups, small.moe_top_groups, small.moe_top_k) == ("deepseek_v3", 4, 2, 4)
    assert small.moe_sigmoid and list(small.expert_layers) == [1, 2]
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    make_tiny_model(tmp_path / "model", "qwen3_5_text", num_hidden_layers=4, layer_types=kinds)
    make_look_alike(tmp_path / "model", tmp_path / "small", with_vocabulary=False)
    small = ModelDimensions.from_checkpoint(tmp_path / "small")
    assert small.attention.linear is not None and small.attention.linear.layers == (0,) and small.num_layers == 2


def test_settings_of_other_components_are_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for flags in (["--trainer.parallel.tensor", "2"], ["--rollout.python", sys.executable], ["--model", str(tmp_path)]):
        assert main(["verify", "engine", "--rollout.engine", "transformers", *flags]) == 2
    assert capsys.readouterr().err.count("flag-excluded") == 2
