"""What is SGLang's alone: names that stand in for its CUDA packages, and the arguments it is started with."""

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollout.sglang.arguments import engine_arguments
from rollout.sglang.engine import SglangEngine
from rollout.sglang.stand_ins import PACKAGES
from slime_like.errors import EngineError
from slime_like.examples.tiny_model import make_tiny_model
from tests.engines.harness import run_config

_SCRIPT = """
import importlib.util, sys
from rollout.sglang import stand_ins
stand_ins.install()
stand_ins.install()
from sgl_kernel.flash_attn import flash_attn_varlen_func
from torchvision.transforms import InterpolationMode
import torchvision, transformers
assert InterpolationMode.BICUBIC is not None and issubclass(torchvision.transforms.Compose, object)
assert not hasattr(torchvision, "__version__") and not transformers.utils.is_torchvision_available()
try:
    flash_attn_varlen_func(1, causal=True)
except NotImplementedError as error:
    print(error)
import safetensors  # what is installed is found as ever
assert len(stand_ins.PACKAGES) == 3 and importlib.util.find_spec("no_such_package") is None
"""

_BURSTS = """
from rollout.sglang import stand_ins
stand_ins.install()
from types import SimpleNamespace
from sglang.srt.managers.scheduler import Scheduler
from rollout.sglang import scheduler

def ingest(self, stop_at_pause=False):
    received = polls.pop(0)
    self.waiting_queue += received
    return received

def ingested(queue, running, paused, arrivals, last=None):
    polls[:] = arrivals
    own = object.__new__(scheduler.EngineScheduler)
    own.waiting_queue, own._engine_paused = list(queue), paused
    own.last_batch = last
    own.running_batch = SimpleNamespace(is_empty=lambda: not running)
    return own.ingest_requests(), len(arrivals) - len(polls)

polls = []
Scheduler.ingest_requests = ingest
scheduler._BURST_GAP_S = 0.0
print(ingested([], False, False, [["a"], ["b", "c"], [], ["d"]]))  # together; what comes after a gap waits
print(ingested([], False, False, [[], ["a"]]))                     # nothing to wait for
print(ingested([], True, False, [["a"], ["b"]]))                   # running requests are not delayed
print(ingested([], False, False, [["a"], ["b"]], last=object()))
print(ingested(["z"], False, False, [["a"], ["b"]]))
print(ingested([], False, True, [["a"], ["b"]]))
print(ingested([], False, False, [[str(i)] for i in range(100)])[1])  # never for ever
"""


def output_of(script: str) -> str:
    root = Path(__file__).parents[2]
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_requests_that_begin_together_are_prefilled_together() -> None:
    assert output_of(_BURSTS).splitlines() == ["(['a', 'b', 'c'], 3)", "([], 1)", *["(['a'], 1)"] * 4, "11"]


def test_stand_ins_can_be_imported_and_not_called() -> None:
    missing = "sgl_kernel.flash_attn.flash_attn_varlen_func was called, but sgl_kernel is not installed"
    assert missing in output_of(_SCRIPT)
    assert [package for package in PACKAGES if find_spec(package)] == []  # this process has none of them


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


def test_latent_attention_is_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.sglang.engine.on_cpu", lambda: True)
    make_tiny_model(tmp_path / "model", "deepseek_v3")
    engine = SglangEngine(run_config(tmp_path / "model", tmp_path / "run"), 0)
    with pytest.raises(EngineError, match=r"latent attention .*; use rollout.engine=transformers there"):
        asyncio.run(engine.start())
