"""SGLang only: stand-ins for its CUDA packages, and its arguments."""

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollout.sglang.arguments import engine_arguments
from rollout.sglang.engine import SglangEngine
from rollout.stand_ins import SGLANG, VLLM
from slime_like.errors import EngineError
from slime_like.system.processes import process_ids
from tests.engines.harness import run_config

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
