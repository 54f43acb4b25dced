"""A tiny model, its data, and the flags that make a run short; made once for the whole folder."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import uncollected as uncollected

# The server of forks imports modules that ask whether there is a device. Without this, torch would initialise CUDA to
# answer, and no fork could use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from tests.support import rejections
from tests.support.weight_buckets import session as session

# A test that forgets that it has no cluster fails, instead of starting one that stays.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Profiles of the property tests, for pytest's --hypothesis-profile. How long an example takes is the machine's affair.
settings.register_profile(
    "explore",
    settings.get_profile("default"),
    max_examples=1000,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("suite", settings.get_profile("explore"), max_examples=100, derandomize=True, database=None)
# One failing example is enough where a failure is expected; searching for the smallest would take most of the time.
settings.register_profile("mutation", settings.get_profile("suite"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("suite")


@dataclass(frozen=True)
class Tiny:
    model: Path
    data: Path

    def rl_flags(self, run_dir: Path, *more: str) -> list[str]:
        """``slime-like train`` on the quickstart's configuration, cut down to seconds."""
        return [
            "train", "configs/quickstart.yaml",
            "--run_dir", str(run_dir),
            "--model.path", str(self.model),
            "--data.train", str(self.data / "train.jsonl"),
            "--evaluation.files", str(self.data / "eval.jsonl"),
            "--evaluation.max_prompts", "16",
            "--evaluation.every", "0",
            "--steps", "2",
            "--trainer.optimizer.warmup_steps", "0",
            "--trainer.optimizer.decay", "constant",
            "--rollout.prompts_per_step", "8",
            "--rollout.samples_per_prompt", "4",
            # An untrained model never adds right; letters it does write, by chance: something to learn.
            "--reward.functions", "[{name: math_verify}, {name: format, options: {pattern: '.*[a-m].*'}}]",
            "--trainer.cpu_threads", "1",
            "--logging.progress", "plain",
            "--logging.tensorboard", "false",
            *more,
        ]  # fmt: skip

    def sft_flags(self, run_dir: Path, *more: str) -> list[str]:
        return [
            "train", "configs/quickstart_warm_start.yaml",
            "--run_dir", str(run_dir),
            "--model.path", str(self.model),
            "--data.train", str(self.data / "sft.jsonl"),
            "--steps", "20",
            "--trainer.optimizer.warmup_steps", "0",
            "--trainer.optimizer.decay", "constant",
            "--trainer.cpu_threads", "1",
            "--logging.progress", "plain",
            *more,
        ]  # fmt: skip


ROOT = Path(__file__).parent
DURATIONS = ROOT.parent / "build" / "test_durations.tsv"

LANES = {
    "hosts": "several hosts in network namespaces",
    "faults": "kills, damaged files, full disks",
    "end_to_end": "commands as a user starts them",
    "engines": "vLLM, SGLang and the transformers engine",
    "mutation": "known bugs put into the code, each caught by a test",
    "parallel": "several ranks of a trainer",
    "process": "starts processes, or takes longer than a second",
    "gpu": "needs a CUDA device",
    "unit": "one process, well below a second a test",
}
"""Marker of every test, named like its folder. The short ones come last: no file runs alone at the end."""
WAITING, COMPUTING = ("hosts", "faults", "end_to_end"), ("engines", "mutation", "parallel")


def pytest_configure(config: pytest.Config) -> None:
    for lane, description in LANES.items():
        config.addinivalue_line("markers", f"{lane}: {description}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item.path: item.path.relative_to(ROOT).parts[0] for item in items}
    places = {path: 1.0 + list(LANES).index(lane) for path, lane in files.items()}
    for lanes in (WAITING, COMPUTING):  # one beside the other: alone, either leaves cores idle or too busy
        some = sorted((path for path, lane in files.items() if lane in lanes), key=places.__getitem__)
        places |= {path: position / len(some) for position, path in enumerate(some)}
    for item in items:
        item.add_marker(files[item.path])
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """End ``tests.support.uncollected``. What is imported by now is never searched."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind prints what is not freed


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


@dataclass(eq=False)
class Durations:
    """Seconds of every test and of every file, kept as a table; the longest first."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        DURATIONS.parent.mkdir(exist_ok=True)
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        DURATIONS.write_text("".join(f"{seconds:.2f}\t{name}\n" for name, seconds in rows), encoding="utf-8")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the process that collects the reports
        session.config.pluginmanager.register(Durations())


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Three files are tested at once on two cores: threads that spin while they wait for one another only take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)


# Of the shell that starts the suite: a proxy, which servers on this machine would be reached through, and its terminal.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_SHELL_VARIABLES = (*_PROXIES, *map(str.upper, _PROXIES), "COLUMNS", "LINES")


@pytest.fixture(scope="session", autouse=True)
def _any_shell() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in _SHELL_VARIABLES:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    make_tiny_model(root / "model", family="qwen3", seed=0)
    make_arithmetic_data(root / "data", seed=0)
    return Tiny(root / "model", root / "data")


@pytest.fixture(scope="session")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory after two steps of supervised training on one rank. To look at or to copy, not to change."""
    from tests.support.processes import run  # needs Ray, which a machine that runs the tests of a GPU may lack

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    finished = run(tiny.sft_flags(run_dir, "--steps", "2", "--checkpoint.every", "1"), run_dir.parent / "log")
    assert finished.code == 0, finished.stderr
    return run_dir


@pytest.fixture
def rejects() -> rejections.Rejects:
    return rejections.Rejects()
