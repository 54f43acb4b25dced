"""Engines of other families and types, and of two ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rollout.transformers.engine import TransformersEngine
from rollout.vllm.engine import VllmEngine
from slime_like.errors import WeightSyncError
from slime_like.interfaces import load_engine
from slime_like.system.processes import mapped_files, process_ids
from slime_like.weights.transports.names import SHARED_MEMORY
from tests.engines.conftest import ENGINES
from tests.engines.harness import (
    EngineUnderTest,
    ReferenceModel,
    check_gaps,
    check_logprobs,
    run_config,
    started,
    tiny_pair,
)
from tests.parallel.tiny import edited_weights
from tests.parallel.towers import save_tower
from tests.support.acceptance import some_in_acceptance

LARGEST, MEAN = 0.25, 0.03
"""Nats per token in bfloat16, twice the values measured at temperature 0.7. Another model differs by 1.3 on average."""


def gaps(engine: EngineUnderTest, judge: ReferenceModel, prompts: list[list[int]], temperature: float) -> np.ndarray:
    """Return |engine - judge| of every sampled token's logprob, with all prompts in one batch."""
    requests = [
        engine.request(p, temperature=temperature, max_new_tokens=24, num_samples=2, seed=i, ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    answered = zip(prompts, engine.generate_all(requests), strict=True)
    sampled = [(prompt, generation) for prompt, generations in answered for generation in generations]
    return np.concatenate([np.abs(g.logprobs - judge.logprobs(p, g.token_ids, temperature)) for p, g in sampled])


def test_bfloat16(models: list[Path], prompts: list[list[int]], tmp_path: Path) -> None:
    """Logprobs are close to float32 with the same weights, and updates are exact.

    The judge rounds only weights. The engine also rounds activations.
    """
    judges = [ReferenceModel(model, "bfloat16") for model in models]
    config = run_config(models[0], tmp_path, dtype="bfloat16")
    with started(TransformersEngine(config, 0), judges) as engine:
        for which in (0, 1):
            if which:
                receipt, sent = engine.run(engine.load(which))
                assert receipt.checksums == sent
            held = engine.engine._destinations  # type: ignore[attr-defined]
            for name, tensor in judges[which].weights.items():
                assert held[name].dtype == torch.bfloat16
                assert torch.equal(held[name].view(torch.int16), tensor.view(torch.int16)), name
            for temperature in (1.0, 0.7):
                found = gaps(engine, judges[which], prompts, temperature)
                assert found.max() < LARGEST and found.mean() < MEAN
            assert gaps(engine, judges[1 - which], prompts, 1.0).mean() > 10 * MEAN  # the bound detects another model


TOWERS = ("qwen2_5_vl", "qwen3_vl")
MORE_TOWERS = ("gemma3", "mistral3", "glm4v_moe")
FAMILIES = ("qwen2", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "gemma3_text")
UPDATED: list[Any] = [*product(["transformers"], (*FAMILIES, *TOWERS))]
UPDATED += [pytest.param(kind, "glm4_moe", marks=pytest.mark.acceptance) for kind in ("transformers", "sglang")]
NO_TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's towers import torchvision")
UPDATED += [pytest.param("sglang", each, marks=pytest.mark.acceptance) for each in (TOWERS[0], *MORE_TOWERS)]
UPDATED += [pytest.param("vllm", each, marks=[pytest.mark.acceptance, NO_TORCHVISION]) for each in TOWERS]


def check_served(engine: EngineUnderTest, prompt: list[int], which: int) -> None:
    """Require that the engine serves the weights of reference ``which``, after an update if it has others."""
    if which != engine.current:
        receipt, sent = engine.run(engine.load(which))
        assert receipt.checksums == sent
    (generation,) = engine.generate(prompt, max_new_tokens=12, prompt_logprobs=True, ignore_eos=True)
    assert generation.prompt_logprobs is not None
    expected = engine.reference.logprobs(prompt[:1], np.asarray(prompt[1:]), 1.0)
    check_gaps(engine.reference, generation.prompt_logprobs, expected)
    check_logprobs(engine.reference, prompt, generation)


def _with_tower(kind: str, directory: Path, seed: int) -> Path:
    """Save a tower. SGLang reads Gemma 3's only as published: under other names, and without a head."""
    save_tower(kind, directory, seed=seed)
    if kind == "gemma3":
        with edited_weights(directory) as tensors:
            for name in [each for each in tensors if each.startswith("vision_tower.")]:
                tensor = tensors.pop(name)
                if not name.startswith("vision_tower.head."):
                    tensors[name.replace(".", ".vision_model.", 1)] = tensor
    return directory


@pytest.mark.parametrize(("kind", "family"), UPDATED)
def test_an_update_reaches_every_kind_of_tensor(kind: str, family: str, tmp_path: Path) -> None:
    """Qwen2 has a tied head and biases (``test_tensor_parallel.py`` tests it with vLLM and SGLang).

    DeepSeek-V3 has fused experts, and router biases, which are buffers. The prompt is longer than the windows of
    gpt-oss, which has sinks and biases of experts, and of Gemma 3. The others have gated delta nets, or a tower that
    is not served.
    """
    if family in {*TOWERS, *MORE_TOWERS}:
        references = [ReferenceModel(_with_tower(family, tmp_path / str(seed), seed)) for seed in (0, 1)]
    else:
        references = tiny_pair(family, tmp_path)
    has_head = any(name.endswith("lm_head.weight") for name in references[0].weights)
    assert has_head == (family not in ("qwen2", "gemma3", "gemma3_text"))
    prompt = [7 + 3 * i % 140 for i in range(40)]
    config = run_config(references[0].directory, tmp_path / "run", max_new_tokens=64)
    with started(ENGINES[kind](config, 0), references) as engine:
        for which in (0, 1, 0):
            check_served(engine, prompt, which)


@pytest.mark.acceptance
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "glm4_moe"])
def test_vllm_serves_other_attention(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts with experts on a CPU, but cannot update them, so only Gemma 3 is updated."""
    monkeypatch.setattr(VllmEngine, "refusal", lambda *_, **__: None)
    references = tiny_pair(family, tmp_path)
    prompt = [7 + 3 * i % 240 for i in range(40)]
    config = run_config(references[0].directory, tmp_path / "run")
    with started(VllmEngine(config, 0), references) as engine:
        for which in (0, 1) if family == "gemma3_text" else (0,):
            check_served(engine, prompt, which)


PROMPTS = [[*range(3, 13)], [*range(200, 245)], [7]]


def own(kind: str, root: Path) -> None:
    """Start the engine, print its processes, and wait to be killed."""
    references = tiny_pair("qwen2", root)
    assert "lm_head.weight" not in references[0].weights
    assert "model.layers.0.self_attn.q_proj.bias" in references[0].weights
    config = run_config(references[0].directory, root / "run", tensor=2)
    engine = load_engine(kind)(config, 0)
    before = process_ids()
    with started(engine, references) as two_ranks:
        pids = two_ranks.run(engine.health()).process_ids
        assert len(pids) == 3  # the engine's process, and one per rank
        assert set(pids) <= process_ids() - before
        assert files_of_sglang(pids) == set()
        sample_update_and_find_damage(two_ranks)
        sockets = [socket for pid in pids for socket in psutil.Process(pid).net_connections(kind="tcp")]
        assert {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        two_ranks.sender.close()  # the trainer's socket
        print("pids", *pids, flush=True)
        time.sleep(300)


def sample_update_and_find_damage(two_ranks: EngineUnderTest) -> None:
    def sample() -> None:
        for prompt in PROMPTS:
            for generation in two_ranks.generate(prompt, max_new_tokens=16, num_samples=2, ignore_eos=True):
                check_logprobs(two_ranks.reference, prompt, generation)

    async def damaged() -> None:
        await two_ranks.engine.begin_update(two_ranks.version + 1, two_ranks.manifest)
        await two_ranks.send(list(two_ranks.reference.weights.items()), tamper=two_ranks.flip_a_bit)

    sample()
    receipt, sent = two_ranks.run(two_ranks.load(1))
    assert receipt.checksums == sent
    sample()
    with pytest.raises(WeightSyncError, match="arrived damaged"):
        two_ranks.run(damaged())
    if core := getattr(two_ranks.engine, "_core", None):  # for vLLM, as if only one worker had received damage
        two_ranks.run(core.workers("vllm.worker:begin_update"))
    two_ranks.run(two_ranks.load(0))
    sample()


def files_of_sglang(process_ids: Iterable[int]) -> set[Path]:
    """Return files outside the run directory, which a killed process could not remove."""
    shared = set(mapped_files(process_ids, "/dev/shm/sglang_"))
    commands = [psutil.Process(pid).cmdline() for pid in process_ids]
    scratch = {Path(command[-1]) for command in commands if "rollout.sglang.main" in command}
    return {path for path in shared | scratch if path.exists()}


@pytest.mark.parametrize("kind", some_in_acceptance(["sglang", "vllm"], lambda kind: kind == "sglang"))
def test_two_ranks_serve_and_end_with_their_owner(kind: str, tmp_path: Path) -> None:
    """The owner is killed with its children and process group, as Ray does, so it cannot clean up."""
    log = tmp_path / "owner.log"
    script = f"from tests.engines.test_other_models import Path, own; own({kind!r}, Path({str(tmp_path)!r}))"
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("w") as errors:
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, process_group=0)
    try:
        assert owner.stdout is not None
        line = next((line for line in owner.stdout if line.startswith("pids")), "")
        pids = [int(word) for word in line.split()[1:]]
        assert pids, log.read_text()
        assert files_of_sglang(pids) == set()
        shared = set(mapped_files([owner.pid, *pids], f"{SHARED_MEMORY}/")) & set(SHARED_MEMORY.iterdir())
        assert shared or kind == "sglang"  # SGLang never leaves files
    finally:
        children = psutil.Process(owner.pid).children()
        os.killpg(owner.pid, signal.SIGKILL)
        for child in children:
            child.kill()
        owner.wait()
    deadline = time.monotonic() + 60
    while (any(map(psutil.pid_exists, pids)) or any(file.exists() for file in shared)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
    assert [file for file in shared if file.exists()] == []
