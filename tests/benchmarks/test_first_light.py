"""The first run on a GPU: choice of its parts, limits, counts and report. Not covered: a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.first_light.machine import Machine
from benchmarks.first_light.parts import Part, parts
from benchmarks.first_light.report import render
from benchmarks.first_light.running import run_part
from slime_like.config.reading.load import load_config
from tests.process.conftest import wait_until

PLAIN = {"torch": "2.11.0", "megatron-core": "0.16.1"}
FULL = {**PLAIN, "ray": "2.60.0", "vllm": "0.32.0", "transformer-engine": "2.11.0", "flash-attn": "2.8.3"}
MINUTES_OF_STAGE_1 = 9

_TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="no such device")
def test_skipped(): pass
"""


def machine(gpus: int, packages: dict[str, str] = FULL) -> Machine:
    return Machine(gpus, packages, "a device")


@pytest.mark.parametrize(
    ("gpus", "packages", "expected"),
    [
        (0, PLAIN, ["GPU tests", "Trainer benchmark"]),
        (1, PLAIN, ["GPU tests", "Trainer benchmark", "CUDA IPC"]),
        (1, PLAIN | {"flash-attn-4": "4.0.0"}, ["GPU tests", "Trainer benchmark", "CUDA IPC"]),
        (1, PLAIN | {"ray": "2.60.0"}, ["GPU tests", "Trainer benchmark", "CUDA IPC", "Layouts"]),
        (2, FULL, [part.name for part in parts(machine(2), Path("out"))]),
    ],
)
def test_parts_run_where_their_packages_and_devices_are(
    gpus: int, packages: dict[str, str], expected: list[str]
) -> None:
    here = machine(gpus, packages)
    assert [part.name for part in parts(here, Path("out")) if part.obstacle(here) is None] == expected


def test_commands_name_files_and_settings_that_exist(tmp_path: Path) -> None:
    chosen = parts(machine(1), tmp_path)
    assert sum(part.limit_s for part in chosen if part.stage == 1) < 60 * MINUTES_OF_STAGE_1
    words = [word for part in chosen for command in part.commands for word in command]
    named = [word for word in words if word.startswith(("tests/", "configs/"))]
    assert len(named) >= 8 and all(Path(word).exists() for word in named)
    (quickstart,) = (part for part in chosen if part.name == "Quickstart")
    _, _, learn = quickstart.commands
    file = learn.index("configs/quickstart.yaml")
    config = load_config(Path(learn[file]), list(learn[file + 1 :]))
    assert config.model.dtype == "bfloat16" and config.cluster.placement == "colocated"
    assert config.model.path == tmp_path / "quickstart/warm_start/hf"


_ABSENT = ("ray", "vllm", "sglang", "flash_attn", "ring_flash_attn", "transformer_engine", "math_verify", "pyarrow")
_COLLECT = f"""
import json, sys, pytest
sys.modules.update(dict.fromkeys({_ABSENT}))
sys.exit(max(pytest.main(["--collect-only", *words]) for words in json.loads(sys.argv[1])))
"""


def test_tests_of_stage_1_need_only_what_a_plain_image_has(tmp_path: Path) -> None:
    chosen = [part.commands[0] for part in parts(machine(1), tmp_path) if part.stage == 1 and part.tests is not None]
    assert len(chosen) == 2
    files = [[word for word in command if word.startswith("tests/")] for command in chosen]
    words = [[*command[3 : command.index("--junitxml")], *named] for command, named in zip(chosen, files, strict=True)]
    collect = [sys.executable, "-c", _COLLECT, json.dumps(words)]
    done = subprocess.run(collect, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and all(named[0] in done.stdout for named in files), done.stdout


def test_results_of_tests_are_counted_and_reported(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(_TESTS)
    results = tmp_path / "three.xml"
    options = ("-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), "--junitxml", str(results))
    command = (sys.executable, "-m", "pytest", *options, str(tmp_path / "test_three.py"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    table = tmp_path / "table.md"
    table.write_text("| of | it |\n")
    part = Part("Three tests", 1, 60, (command,), gpus=0, tests=results, table=table)
    result = run_part(part, machine(0), tmp_path)
    assert result.outcome == "failed" and result.counts is not None
    assert (result.counts.passed, result.counts.failed) == (1, 1) and result.counts.skipped == {"no such device": 1}
    assert "1 failed, 1 passed, 1 skipped" in (tmp_path / "three-tests.log").read_text()
    lacking = run_part(Part("Pair", 2, 60, (command,), gpus=2), machine(1), tmp_path)
    report = render(machine(1), [result, lacking], "first_light.sh").splitlines()
    assert f"| 1 | Three tests | failed | 1 | 1 | 1 | {result.seconds:.0f} |" in report
    assert "| 2 | Pair | skipped |  |  |  | 0 |" in report
    assert "- **Three tests**: 1 skipped: no such device" in report and "| of | it |" in report
    assert "- **Pair**: needs 2 CUDA devices, torch sees 1" in report


def test_a_part_that_only_skipped_is_skipped(tmp_path: Path) -> None:
    results = tmp_path / "r.xml"
    xml = "<testsuites><testsuite><testcase><skipped message='no GPU'/></testcase></testsuite></testsuites>"
    write = f"import pathlib; pathlib.Path({str(results)!r}).write_text({xml!r})"
    part = Part("Skipped", 1, 60, ((sys.executable, "-c", write),), gpus=0, tests=results)
    result = run_part(part, machine(0), tmp_path)
    assert (result.outcome, result.reason, result.bad) == ("skipped", "no GPU", False)


def test_a_part_ends_at_its_limit_and_leaves_no_process(tmp_path: Path) -> None:
    start = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True)"
    never = tmp_path / "never"
    commands = ((sys.executable, "-c", f"{start}; child.wait()"), ("touch", str(never)))
    result = run_part(Part("Long", 1, 1, commands, gpus=0), machine(0), tmp_path)
    assert result.outcome == "stopped after 1 s" and result.bad and result.seconds < 30
    child = int((tmp_path / "long.log").read_text().split()[0])
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert not never.exists()
