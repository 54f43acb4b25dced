"""Names and options in messages, installed packages and engines, and the environment of a run."""

import json
import re
import sys
from pathlib import Path

import pytest

from slime_like import checks
from slime_like.checks import RANKS, engines, packages
from slime_like.checks.check import CHECKS, check
from slime_like.checks.names import reward_problems
from slime_like.checks.packages import fla_problem, logging_problems, missing_compiler
from slime_like.config import LoggingConfig, RunConfig
from slime_like.config.reading.load import load_config
from slime_like.interfaces import engine_limits
from slime_like.weights.transports.names import Libraries
from tests.unit.checks.checkpoint import sound_flags


def test_no_credential_of_options_is_printed(tmp_path: Path) -> None:
    options = {"url": "https://u:hidden@h/x?token=hidden", "headers": {"Key": "hidden"}, "no_option": 1}
    functions = json.dumps([{"name": "http", "options": options}])
    config = load_config(None, [*sound_flags(tmp_path), "--reward.functions", functions])
    (problem,) = reward_problems(config)
    assert "'url': 'https://...@h/x?...'" in problem and "hidden" not in problem


def test_the_packages_of_another_interpreter_are_read_without_starting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    for name, version in (("vllm", "0.33.1"), ("torch", "2.14.1"), ("nvidia_nccl_cu13", "2.30.7")):
        place = tmp_path / "lib" / "python3.12" / "site-packages" / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    assert engines.engine_libraries(python) == Libraries("2.14.1", "2.30.7")
    warning = "vllm 0.33.1 has not been tested with rollout.engine=vllm; tested: 0.32"
    assert engines.version_warning(python, "vllm") == warning
    assert engines.version_warning(python, "sglang") is None
    assert engines.engine_libraries(tmp_path / "none" / "bin" / "python") == Libraries("")
    for installed in ({}, {"vllm": "0.1"}):
        monkeypatch.setattr(engines, "_versions", lambda _, __, installed=installed: installed)
        monkeypatch.setattr(engines, "find_spec", lambda _: None)
        assert engines.is_installed("vllm") == bool(installed)
        assert engines.is_installed("my.module:engine")  # another check looks for its module


def test_an_engines_package_states_its_limits_without_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "own_engine").mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError\n")
    limits = (
        "from slime_like.interfaces.engine_limits import EngineLimits\nLIMITS = EngineLimits(name='own', tested='7')\n"
    )
    (package / "limits.py").write_text(limits)
    monkeypatch.syspath_prepend(tmp_path)
    places = {"own": "own_engine.engine:Own", "silent": "own_engine:Silent", "gone": "no_such.package.engine:Gone"}
    monkeypatch.setattr(engine_limits, "installed_places", lambda group: places)
    found = {name: engine_limits.engine_limits.__wrapped__(name) for name in (*places, "unknown")}
    assert {name: each.tested for name, each in found.items()} == {"own": "7", "silent": "", "gone": "", "unknown": ""}
    assert all(found[name] == engine_limits.EngineLimits(name=name) for name in ("silent", "gone", "unknown"))


def test_codes_are_unique_and_every_check_is_used() -> None:
    codes = [own.code for own in CHECKS]
    assert len(codes) == len(set(codes))
    # Each public ``*_problems`` of the package occurs outside its definition.
    (folder,) = map(Path, checks.__path__)
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    defined = re.findall(r"^def ([a-z]\w*_problems)", text, re.MULTILINE)
    assert [name for name in defined if len(re.findall(rf"\b{name}\b", text)) < 2] == []


SHOWS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("value", "gpus", "rejected"), [("1", 8, True), ("TRUE", 8, True), ("0", 8, False), ("1", 0, False)]
)
def test_devices_that_ray_shows_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, gpus: int, rejected: bool
) -> None:
    """The variable has no effect on a machine without GPUs."""
    monkeypatch.setenv(SHOWS_ALL, value)
    monkeypatch.setattr(packages, "local_gpus", lambda: gpus)
    config = RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path})
    found = [problem for problem in check(config, RANKS) if problem.code == "cluster.visible-devices"]
    assert bool(found) is rejected
    assert all(f"{SHOWS_ALL}={value}" in problem.text and "unset it" in problem.text for problem in found)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, "PYTORCH_ALLOC_CONF=max_split_"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None),  # the first counts
    ],
)
def test_expandable_segments_of_the_user(variables: dict[str, str], expected: str | None) -> None:
    found = packages.expandable_segments(variables)
    assert (found is None) == (expected is None) and (found or "").startswith(expected or "")


def test_triton_needs_a_compiler_and_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CPATH", raising=False)
    monkeypatch.setattr(packages, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    compiler, headers = missing_compiler(on_cuda=True)
    assert "no C compiler; install gcc" in compiler and f"{tmp_path}: " in headers
    assert not [*missing_compiler(on_cuda=False)]
    (tmp_path / "Python.h").touch()
    found.add("clang")
    assert not [*missing_compiler(on_cuda=True)]
    found.clear()
    monkeypatch.setenv("CC", "cc")
    assert not [*missing_compiler(on_cuda=True)]


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)  # marks a module that cannot be imported
    settings = {"tensorboard": False, tracker: True}
    config = RunConfig.model_validate({"run_dir": "run", "model": {"path": "model"}, "logging": settings})
    (problem,) = logging_problems(config)
    assert problem.startswith(f"logging.{tracker}=true needs its package")
    assert not list(logging_problems(config.model_copy(update={"logging": LoggingConfig(tensorboard=False)})))


@pytest.mark.parametrize(
    ("triton", "capability", "others", "expected"),
    [
        ("3.3.1", (9, 0), (), True),
        ("3.4.0", (9, 0), (), False),
        ("3.7.0", (9, 0), (), False),
        ("3.7.0", (9, 0), ("tilelang",), True),
        ("3.7.0", (8, 0), (), True),
        ("3.7.1", (9, 0), (), True),
    ],
)
def test_fla_is_used_where_its_kernels_are_right(
    triton: str, capability: tuple[int, int], others: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = ["fla", *others]
    monkeypatch.setattr(packages, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(packages, "version", lambda name: triton)
    assert (fla_problem(capability) is None) == expected
    installed.remove("fla")
    assert "pip install fla-core" in str(fla_problem(capability))
