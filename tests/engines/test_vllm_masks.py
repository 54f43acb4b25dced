"""What is special to one engine: vLLM's masks, SGLang's arguments and stand-ins, and starts that are rejected."""

import asyncio
import dataclasses
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.sglang.arguments import engine_arguments
from rollout.sglang.engine import SglangEngine
from rollout.stand_ins import SGLANG, VLLM
from rollout.transformers.engine import TransformersEngine
from rollout.vllm.engine import VllmEngine
from rollout.vllm.limits import LIMITS
from slime_like.errors import CheckpointError, ConfigError, EngineError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import GenerationRequest, PromptInput, RolloutEngine, SamplingParams
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.processes import process_ids
from tests.engines.harness import run_config
from tests.support.rejections import Rejects

VOCABULARY = 264
TOKENS = [7, 3, 99]
SUPPORTS = [[3, 7, 11], [3], list(range(0, 200, 3))]
"""One support per token. The last one is wider than the compact rows below, as with ties."""
DRAWN = SamplingParams(top_k=50, max_new_tokens=8)


def completion(supports: list[list[int]] | None, tokens: list[int] = TOKENS, **fields: Any) -> Any:
    """Build an output like vLLM's output processor: per step, this request's slice of a batch of two."""
    from vllm.outputs import CompletionOutput, SamplingMask
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    from rollout.vllm.sampling import CompactLogprobs

    chunks: list[list[int]] = []
    for kept in supports or ():
        batch = [[5], kept]
        ids, bits = torch.zeros(2, 50, dtype=torch.int32), np.zeros((2, VOCABULARY), np.uint8)
        for row, those in enumerate(batch):
            ids[row, : len(those[:50])] = torch.tensor(those[:50], dtype=torch.int32)
            bits[row, those] = 1
        packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
        counts = torch.tensor([len(those) for those in batch], dtype=torch.int32)
        lists = SamplingMaskTensors(ids, packed, counts, VOCABULARY).tolists()
        chunks += lists.slice_request(1, 1).to_nested_list()
    logprobs = CompactLogprobs()
    for token in tokens:
        logprobs.append_fast([token], [-0.5], iter((1,)), (None,))
    mask = None if supports is None else SamplingMask(chunks)
    own: dict[str, Any] = {"cumulative_logprob": None, "finish_reason": "length", "sampling_mask": mask} | fields
    return CompletionOutput(index=0, text="", token_ids=tokens, logprobs=logprobs, **own)


def generation(sample: Any, sampling: SamplingParams) -> Any:
    from vllm.outputs import RequestOutput

    from rollout.vllm.sampling import generations

    output = RequestOutput("a", None, [1], None, [sample], finished=True)
    dimensions: Any = SimpleNamespace(expert_layers=range(1, 3))
    (found,) = generations(GenerationRequest("a", PromptInput([1]), sampling), output, 4, dimensions, masks=True)
    return found


def test_masks_become_supports() -> None:
    found = generation(completion(SUPPORTS), DRAWN)
    assert [ids.tolist() for ids in found.supports] == SUPPORTS
    assert found.logprobs.tolist() == [-0.5] * 3 and found.weight_versions.tolist() == [4] * 3


@pytest.mark.parametrize("training", [True, False])
def test_routes_of_layers_with_experts(training: bool) -> None:
    rows = np.arange(3 * 3 * 2, dtype=np.uint8).reshape(3, 3, 2)
    found = generation(completion(SUPPORTS, routed_experts=rows), replace(DRAWN, training=training)).fields
    assert {name: (routes.dtype, routes.tolist()) for name, routes in found.items()} == (
        {"routes": (np.int16, rows[:, 1:].tolist())} if training else {}
    )


def test_responses_without_tokens_or_logprobs() -> None:
    found = generation(completion(None, [], finish_reason="abort"), DRAWN)
    assert len(found.token_ids) == 0 and len(found.supports) == 0 and found.finish_reason == "abort"
    found = generation(completion([[7], [3], [99]]), SamplingParams(temperature=0.0, training=False))
    assert found.supports is None and np.isnan(found.logprobs).all()


@pytest.mark.parametrize("supports", [None, SUPPORTS[:2], SUPPORTS[1:] + SUPPORTS[:1], [[7], [], [99]]])
def test_wrong_masks(supports: list[list[int]] | None, rejects: Rejects) -> None:
    with rejects(EngineError, "engine-version"):
        generation(completion(supports), DRAWN)


@pytest.mark.parametrize(
    ("sampling", "temperature", "top_k"),
    [
        (DRAWN, 1.0, 50),
        (SamplingParams(temperature=0.0, training=False), 1.0, 1),
        (SamplingParams(temperature=0.7, training=False), 0.7, VOCABULARY),
    ],
)
def test_requests_with_masks(tmp_path: Any, sampling: SamplingParams, temperature: float, top_k: int) -> None:
    """With masks, vLLM requires a temperature and a ``top_k`` above 0."""
    from rollout.vllm.sampling import sampling_params

    make_tiny_model(tmp_path)
    dimensions = ModelDimensions.from_checkpoint(tmp_path)
    found = sampling_params(GenerationRequest("a", PromptInput([1]), sampling, num_samples=3), dimensions, masks=True)
    assert (found.temperature, found.top_k, found.logprobs) == (temperature, top_k, 0)
    assert found.n == (3 if sampling.temperature else 1)
    unmasked = sampling_params(GenerationRequest("a", PromptInput([1]), sampling), dimensions)
    assert unmasked.logprobs == (66 if sampling.training else 0)
    assert unmasked.temperature == sampling.temperature


_PROCESS = """
import importlib.util, sys
from pathlib import Path
from functools import partial
from rollout import stand_ins
from rollout.sglang import main

def show(*values):
    with Path(__file__).with_name("shown").open("a") as file:
        print(*values, file=file)

stand_ins.install(stand_ins.SGLANG)
stand_ins.install(stand_ins.SGLANG)
from sgl_kernel.flash_attn import flash_attn_varlen_func
from torchvision.transforms import InterpolationMode
import torchvision, transformers
assert InterpolationMode.BICUBIC is not None and issubclass(torchvision.transforms.Compose, object)
assert not hasattr(torchvision, "__version__") and not transformers.utils.is_torchvision_available()
try:
    flash_attn_varlen_func(1, causal=True)
except NotImplementedError as error:
    show(error)
import safetensors  # installed packages are found
assert len(stand_ins.SGLANG) == 3 and importlib.util.find_spec("no_such_package") is None

sys.modules["vllm"] = None  # as main does

def launch(arguments, *others):
    config, index = arguments.args
    unknown = config.rollout.model_copy(update={"engine_args": {"no_such_argument": 1}})
    try:
        usual(partial(arguments.func, config.model_copy(update={"rollout": unknown}), index), *others)
    except main.EngineError as error:
        show(error)
    return usual(arguments, *others)

usual, main._launch = main._launch, launch
main.main(int(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def shown(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run everything that imports SGLang in one process that fails to start; return its lines and the error."""
    root, before = tmp_path_factory.mktemp("process"), process_ids()
    (root / "own_process.py").write_text(_PROCESS)
    engine = SglangEngine(run_config(models[0], root / "run", engine_args={"max_total_tokens": 1}), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}:{Path(__file__).parents[2]}")
        patch.setattr("rollout.sglang.engine._MODULE", "own_process")
        with pytest.raises(EngineError) as raised:
            asyncio.run(engine.start())
    assert process_ids() <= before
    return [*(root / "shown").read_text().splitlines(), str(raised.value)]


@pytest.mark.acceptance
def test_failed_starts(shown: list[str]) -> None:
    assert "no_such_argument: SGLang has no such argument" in shown[1]
    assert re.search("did not start: AssertionError: .*is zero", shown[2]) and len(shown) == 3


@pytest.mark.acceptance
def test_stand_ins(shown: list[str]) -> None:
    missing = "sgl_kernel.flash_attn.flash_attn_varlen_func: the engine needs sgl_kernel on this machine"
    assert missing in shown[0]
    only_sglang = set(SGLANG) - set(VLLM)  # an engine of another test may have installed vLLM's in this process
    assert [package for package in only_sglang if find_spec(package)] == []


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({}, {"context_length": 808, "max_running_requests": 512, "dtype": "float32", "weight_version": "0"}),
        ({"max_concurrent_requests": 3}, {"max_running_requests": 12, "max_total_tokens": 12 * 808}),
        ({"max_concurrent_requests": 1, "samples_per_prompt": 1}, {"max_total_tokens": 2 * 808}),
        ({"engine_args": {"attention_backend": "triton"}}, {"attention_backend": "triton", "log_level": "error"}),
        ({"tensor": 2}, {"tp_size": 2, "max_total_tokens": 512 * 808}),
    ],
)
def test_arguments(models: list[Path], tmp_path: Path, rollout: dict[str, Any], expected: dict[str, Any]) -> None:
    arguments = engine_arguments(run_config(models[0], tmp_path, **rollout), 0, {"attention_backend"})
    assert {name: arguments[name] for name in expected} == expected


LONG = SamplingParams(max_new_tokens=700, temperature=0.05, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "rollout", "message"),
    [
        (VllmEngine, {"engine_args": {"no_such_argument": 1}}, "no_such_argument is not an argument of vllm"),
        (VllmEngine, {"start_timeout_s": 0.5}, r"rollout.start_timeout_s=0.5 s"),
        (VllmEngine, {"max_model_len": 4000}, r"did not start: ValidationError: (?!.*pydantic\.dev).*max_model_len"),
        (SglangEngine, {"start_timeout_s": 0.5}, r"rollout.start_timeout_s=0.5 s"),
        (TransformersEngine, {"tensor": 2}, "rollout.tensor=2"),
    ],
)
def test_rejected_starts(
    models: list[Path], tmp_path: Path, kind: type[RolloutEngine], rollout: dict[str, Any], message: str
) -> None:
    before = process_ids()
    with pytest.raises(EngineError, match=message):
        asyncio.run(kind(run_config(models[0], tmp_path, **rollout), 0).start())
    assert process_ids() <= before


def test_missing_checkpoint(tmp_path: Path, models: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        TransformersEngine(run_config(tmp_path, tmp_path), 0)
    (tmp_path / "config.json").write_text((models[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        TransformersEngine(run_config(tmp_path, tmp_path), 0)


def test_vllms_arguments_are_read_from_its_source() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert LIMITS.known_arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
