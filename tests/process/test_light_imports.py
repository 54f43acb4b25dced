"""New interpreters: light imports, how much a run imports, interrupts, and memory."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import slime_like
from slime_like.plugins.options import OPTIONS
from tests.process.conftest import python

LOGS = ("torch", "ray", "tensorboard", "wandb")
STAGES = f"""
import sys

def require_absent(*names):
    assert not (found := sorted({{*names}} & sys.modules.keys())), found

import slime_like.observability.timing, slime_like.observability.names
import slime_like.observability.metrics, slime_like.observability.progress
require_absent(*{LOGS!r}, "rich")
import slime_like.config, slime_like.config.reading.load, slime_like.checks.check, slime_like.commands.main
import slime_like.commands.report, slime_like.observability.report.report
from slime_like.commands.reference import fields_help
assert "`algorithm.loss`" in fields_help() and "cispo" in fields_help()
require_absent(*{LOGS!r}, "transformers", "math_verify", "vllm", "sglang")
import slime_like.orchestration.cluster.orphan_reaper, slime_like.orchestration.cluster.ray_node
require_absent("torch")
"""


def test_heavy_packages_are_not_imported_and_help_imports_none_of_the_parts_that_it_names() -> None:
    python(STAGES)


MOST_LINES, MOST_FILES = 34_000, 240
"""What a reader of a run on Megatron and vLLM has to know, as README.md says. What only some runs use is an option."""


def test_a_run_on_megatron_and_vllm_imports_no_more_than_can_be_read() -> None:
    code = """
import sys
import slime_like.train, backends.megatron.trainer, rollout.vllm.engine
names = [name for name in sys.modules if name.split(".")[0] in ("slime_like", "backends", "rollout")]
files = {file for name in names if (file := getattr(sys.modules[name], "__file__", None))}
print(sum(len(open(file, encoding="utf-8").readlines()) for file in files), len(files), *names)
"""
    lines, files, *modules = python(code).split()
    assert int(lines) <= MOST_LINES
    assert int(files) <= MOST_FILES
    assert not set(modules) & {path.partition(":")[0] for path in OPTIONS.values()}


BLOCKED = ("pydantic", "pydantic_core", "yaml", "ray", "transformers", "megatron", "backends", "rollout")

PROGRAM = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r} or name.startswith("slime_like.config"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from types import SimpleNamespace
import torch
from slime_like.algorithms import *

assert partition_by_tokens([7, 7, 7], 14, 1) == [[[0, 1], [2]]]
assert compute_advantages(torch.tensor([1.0, 0.0]), [0, 0], "dr_grpo").tolist() == [0.5, -0.5]
logprobs = selective_log_softmax(torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64))
loss, kl = SimpleNamespace(name="sft", options={{}}), SimpleNamespace(coef=0.0)
importance, rejection = SimpleNamespace(correction="none"), SimpleNamespace(estimator="none")
parts = {{"loss": loss, "kl": kl, "importance": importance, "rejection": rejection}}
config = SimpleNamespace(**parts, entropy_coef=0.0, off_policy_mask=None)
output = build_loss(config)(LossInputs(logprobs, torch.ones(8).bool(), torch.ones(8)))
assert abs(float(output.loss) - 8 * torch.tensor(5.0).log()) < 1e-5
assert not {{name.partition(".")[0] for name in sys.modules}} & set({BLOCKED!r})
"""


def test_algorithms_are_imported_and_used_with_everything_else_blocked() -> None:
    python(PROGRAM, cwd=Path(slime_like.__file__).parents[1])


@pytest.mark.parametrize("disguise", [False, True])
def test_ctrl_c_during_an_import(disguise: bool) -> None:
    """The signal arrives in an import that every command makes. The module may turn it into another error."""
    code = f"""
import os, signal, sys
from slime_like.commands.main import main

class Interrupted:
    def find_spec(self, name, *rest):
        if name != "pydantic":
            return
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not {disguise}:
                raise
        raise ValueError("KeyboardInterrupt, says a library")

sys.meta_path.insert(0, Interrupted())
sys.exit(main(["--version"]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "slime-like: interrupted\n")


_FAULTS = """
import resource, sys
from slime_like.system.processes import exempt_from_gc, keep_freed_memory

class Kept:
    def __init__(self): self.itself = self
    def __del__(self): print("freed")

if sys.argv[1] == "kept":
    assert keep_freed_memory()
    with exempt_from_gc():
        Kept()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del_me = [bytearray(48 * 2**20) for _ in range(2)]
    del del_me
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_blocks_cause_no_more_page_faults_and_permanent_objects_are_freed_at_the_end() -> None:
    """Packages that count their objects, like nanobind in Triton, would print a page of warnings."""
    (again,), (kept, freed) = (python(_FAULTS, mode).split() for mode in ("returned", "kept"))
    assert int(again) > 100  # not more: pages may be huge
    assert int(kept) < int(again) / 10
    assert freed == "freed"
