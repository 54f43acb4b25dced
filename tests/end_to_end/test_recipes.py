"""``slime-like plan`` of the recipes in ``configs/`` and of runs that cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.root import run
from slime_like.config import ParallelConfig, RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.planning.plan import Plan, make_plan
from slime_like.planning.planned_run import PlannedRun, plannable_backend
from slime_like.planning.search import least_bytes, search
from slime_like.system.words import memory_text, seconds_text
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import DEEPSEEK_V3, EXPERTS, write_checkpoint
from tests.unit.planning.test_arithmetic import MODELS, PUBLISHED

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
# Number of GPUs that each recipe names.
RECIPES = {
    "one_gpu": 1, "smolagents_agent": 1, "qwen2.5_0.5b": 8, "qwen2.5_7b": 8, "llama3.1_8b": 8, "qwen3_4b": 8,
    "qwen3_8b": 8, "qwen3_30b_a3b": 16, "qwen3_32b": 64, "qwen2.5_32b": 32, "one_gpu_lora": 1, "qwen3_32b_lora": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def with_fewer_layers(directory: Path, model: Path, layers: int) -> Path:
    """Write the model's ``config.json`` with fewer layers, because tracing a layer takes a tenth of a second."""
    published = json.loads((ROOT / model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**published, "num_hidden_layers": layers}))
    return directory


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a model with two layers."""
    directory = with_fewer_layers(tmp_path_factory.mktemp("model"), MODELS / "Qwen2.5-0.5B", 2)
    sizes = ["--trainer.target_tokens_per_batch", "2048", "--rollout.max_new_tokens", "512"]
    return ["--model.path", str(directory), *sizes]


@pytest.mark.acceptance
@pytest.mark.parametrize("engine", [{"vllm": (8, 2)}, {"sglang": (16, 1)}], ids=str)
def test_deepseek_v3_fits_32_nodes_of_8_h200(engine: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    """The layout that docs/support.md states: 16 engines on two nodes each, on the GPUs of 256 trainer ranks."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    ((name, (tensor, pipeline)),) = engine.items()
    flags = ["--model.path", str(tmp_path), "--rollout.engine", name]
    flags += ["--rollout.tensor", str(tensor), "--rollout.pipeline", str(pipeline), "--algorithm.minibatches", "2"]
    for axis, size in {"tensor": 8, "pipeline": 8, "data": 4, "expert": 32}.items():
        flags += [f"--trainer.parallel.{axis}", str(size)]
    flags += ["--cluster.nodes", "32", "--cluster.gpu", "h200-141gb", "--cluster.host_memory_gib", "2000"]
    plan = make_plan(PlannedRun.of(load_config(ROOT / "configs" / "qwen3_32b.yaml", flags)))
    assert plan.problems == [] and plan.fits and plan.gpus_in_use == 256
    assert plan.run.config.rollout.num_engines == 16
    assert plan.engine is not None and plan.engine.longest_sequences >= 20


# A small model on one node, and four layers of a dense one on several nodes and of one with factors.
_IN_THE_SUITE: dict[str, int | None] = {"qwen2.5_0.5b": None, "qwen3_32b": 4, "one_gpu_lora": 4}
_WHOLE = [pytest.param(name, None, marks=pytest.mark.acceptance) for name in RECIPES if name != "qwen2.5_0.5b"]


@pytest.mark.parametrize(("name", "layers"), [*_IN_THE_SUITE.items(), *_WHOLE])
def test_recipe_fits_the_gpus_it_names(name: str, layers: int | None, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml", [])
    if layers:
        model = config.model.model_copy(update={"path": with_fewer_layers(tmp_path, config.model.path, layers)})
        config = config.model_copy(update={"model": model})
    planned = PlannedRun.of(config)
    plan = make_plan(planned)
    assert plan.problems == [] and plan.fits
    assert plan.gpus_in_use == plan.nodes * planned.hardware.gpus_per_node == RECIPES[name]
    assert plan.step is not None and plan.step.total > 0
    first = plan.kinds[0].estimate.memory  # what the search need not follow to know that it is too large
    _, kept, inputs = least_bytes(planned)
    recomputed = config.trainer.recomputed_layers(planned.dimensions.num_layers) / planned.dimensions.num_layers
    least = recomputed * inputs + (1 - recomputed) * kept
    assert 0.4 < least / (first.saved_bytes * first.in_flight) < 1
    if config.trainer.parallel.expert == 1:  # the first and the last stage hold a tied embedding
        layout = config.trainer.parallel
        held = sum(kind.estimate.memory.parameters * layout.tensor for kind in plan.kinds)
        assert held == pytest.approx(planned.dimensions.num_parameters + planned.factors, rel=0.01)
    if name == "qwen3_32b":
        _matches_a_manual_calculation(plan, config.trainer.parallel)
    if config.model.lora.is_set:
        _counts_factors_by_hand(plan, config.trainer.parallel)


def _matches_a_manual_calculation(plan: Plan, layout: ParallelConfig) -> None:
    """Compare with Qwen3-32B's published sizes. A weight takes 2 bytes, its gradient 4, and its main weight and both
    moments 12, divided by the ranks that share them (Megatron's rule: 6 + 12 / d)."""
    tensor, pipeline, sharing = layout.tensor, layout.pipeline, layout.data * layout.context
    layers = plan.run.dimensions.num_layers
    attention = 5120 * (64 + 8 + 8) * 128 + 64 * 128 * 5120
    layer, norms = attention + 3 * 5120 * 25_600, 2 * 5120 + 2 * 128
    vocabulary = -(-151_936 // (128 * tensor)) * 128 * tensor * 5120  # padded to a multiple of 128 on each rank
    assert pipeline == 1
    expected = (2 * vocabulary + layers * layer) // tensor + layers * norms + 5120  # embedding, head, and the last norm
    for kind in plan.kinds:
        memory = kind.estimate.memory
        assert (memory.parameters, memory.parameter_bytes) == (expected, 2 * expected)
        assert memory.gradient_bytes == pytest.approx(4 * expected, rel=1e-5)
        assert memory.optimizer_bytes == pytest.approx(12 / sharing * expected, rel=1e-5)
    engine = plan.engine
    assert engine is not None and engine.kv_bytes_per_token * engine.gpus == layers * 2 * 8 * 128 * 2


def _counts_factors_by_hand(plan: Plan, layout: ParallelConfig) -> None:
    """Compare with Qwen3's published sizes. A factor's element takes 2 bytes, its gradient 4, and its main weight and
    both moments 12 / d. A rank holds a whole A if rows are split, and a whole B if columns are split."""
    hidden, ffn, queries, keys = {1: (4096, 12_288, 4096, 1024), 4: (5120, 25_600, 8192, 1024)}[layout.tensor]
    layers = plan.run.dimensions.num_layers
    by_rows, by_columns = (
        [(hidden, queries), *[(hidden, keys)] * 2, *[(hidden, ffn)] * 2],
        [(queries, hidden), (ffn, hidden)],
    )
    here = sum(into + out / layout.tensor for into, out in by_rows)
    here += sum(into / layout.tensor + out for into, out in by_columns)
    expected = 32 * layers * here
    assert plan.run.factors == 32 * layers * sum(into + out for into, out in by_rows + by_columns)
    for kind in plan.kinds:
        memory = kind.estimate.memory
        assert memory.trained_bytes == 2 * expected
        assert memory.gradient_bytes == pytest.approx(4 * expected, rel=1e-5)
        assert memory.optimizer_bytes == pytest.approx(12 / layout.data * expected, rel=1e-5)
        assert memory.parameter_bytes == 2 * memory.parameters


def test_command_writes_what_it_prints(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "plan.json"
    assert run(["plan", "configs/qwen2.5_0.5b.yaml", "--output", str(output), "--mean-response", "500"]) == 0
    printed, written = capsys.readouterr().out, json.loads(output.read_text())
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.startswith("fits. Least free GPU memory: ") and written["verdict"] == "fits"
    words = " ".join(printed.split())
    needed = sum(written["host"]["items"].values())
    assert written["host"]["total"] == needed and "fits" not in written["host"]
    assert f"NOT checked: {memory_text(needed)} per node needed; give --cluster.host_memory_gib" in words
    (kind,) = written["kinds"]
    training = next(phase for phase in kind["phases"] if phase["phase"] == "training")
    assert training["total"] == sum(training["items"].values())
    assert written["workload"]["mean_response"] == 500
    step = written["step"]
    assert all(seconds_text(step[name]) in words for name in ("generation", "training", "sync", "total"))


def test_the_verdict_includes_host_memory(small: list[str], tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "plan.json"
    flags = [*small, "--cluster.host_memory_gib", "100", "--output", str(output)]
    assert run(["plan", "configs/qwen2.5_0.5b.yaml", *flags]) == 0
    words, host = " ".join(capsys.readouterr().out.split()), json.loads(output.read_text())["host"]
    assert "NOT checked" not in words and host["fits"] is True
    assert f"{memory_text(host['capacity'] - host['total'])} are left for processes" in words


def test_code_on_other_machines_is_only_noted(small: list[str], capsys: Capture) -> None:
    named = ["--reward.functions", "[{name: elsewhere/mine.py:f}]", "--rollout.environment.name", "elsewhere:Game"]
    assert run(["plan", "configs/qwen2.5_0.5b.yaml", *small, *named]) == 0
    notes = " ".join(capsys.readouterr().out.split())
    assert "not on this machine: reward.functions.0.name=" in notes
    assert "not on this machine: rollout.environment.name=elsewhere:Game" in notes
    assert run(["plan", "configs/qwen2.5_0.5b.yaml", *small, *named, "--preflight"]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster.gpu_memory_gib", "5"], ["training", "more than the GPU's 5.00 GiB"]),
        (["--cluster.nodes", "1", "--trainer.parallel.data", "16"], ["use 2 nodes"]),
        (["--rollout.max_new_tokens", "32000"], ["max_position_embeddings", "target_tokens_per_batch"]),
        (["--cluster.host_memory_gib", "0.25"], ["cluster.host_memory_gib=0.25: a node needs", "is checkpoint save"]),
        (["--preflight"], ["data.train=", "no *.safetensors file"]),
    ],
)
def test_all_problems_are_listed(small: list[str], flags: list[str], words: list[str], capsys: Capture) -> None:
    assert run(["plan", "configs/qwen2.5_0.5b.yaml", *small, *flags]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(("does not fit: ", "cannot start: "))
    for word in words:
        assert word in printed[printed.index("problem: ") :]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--mean-prompt 1025", "options-conflict"),
        ("--mean-response 9999", "options-conflict"),
        ("--search --preflight", "options-conflict"),
        ("--trainer.parallel.tensor 3 --cluster.nodes 1", "plan-rejected"),
        ("--model.lora.rank 8 --model.lora.targets v_prj", "model.lora"),  # the model has no weight files here
    ],
)
def test_contradicting_options_are_rejected(small: list[str], flags: str, code: str, rejects: Rejects) -> None:
    with rejects(ConfigError, code):
        run(["plan", "configs/qwen2.5_0.5b.yaml", *small, *flags.split()])


def test_search_lists_what_fits_fastest_first(small: list[str]) -> None:
    flags = ["--cluster.gpus_per_node", "4", "--cluster.nodes", "2", "--cluster.placement", "separate"]
    flags += ["--rollout.num_engines", "4"]
    found = search(PlannedRun.of(_config([*small, *flags])), wanted=2)
    assert len(found) == 2
    times = [candidate.step.total for candidate in found]
    assert times == sorted(times)
    assert make_plan(PlannedRun.of(_config([*small, *flags, *found[0].flags.split()]))).problems == []
    for candidate in found:
        assert candidate.trainer.parallel.world_size == 4
        assert candidate.tightest.fits
        written = json.loads(json.dumps(candidate.to_json()))
        assert written["parallel"]["data"] == candidate.trainer.parallel.data
        assert written["total"] == candidate.step.total


def test_search_omits_layouts_above_a_node_s_memory(small: list[str], tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "layouts.json"
    flags = ["--search", "--cluster.gpus_per_node", "2", "--cluster.nodes", "1", "--rollout.num_engines", "1"]
    flags += ["--trainer.parallel.data", "1", "--checkpoint.async_save", "true", "--cluster.gpu_memory_gib", "141"]
    arguments = ["plan", "configs/qwen2.5_0.5b.yaml", *small, *flags, "--top", "1"]
    assert run(arguments) == 0
    assert "NOT checked: give --cluster.host_memory_gib" in " ".join(capsys.readouterr().out.split())
    assert run([*arguments, "--cluster.host_memory_gib", "64"]) == 0
    assert "NOT checked" not in capsys.readouterr().out
    assert run([*arguments, "--cluster.host_memory_gib", "2", "--output", str(output)]) == 1
    assert "no layout of these GPUs fits" in capsys.readouterr().out
    assert json.loads(output.read_text()) == {"layouts": []}


def test_search_reports_problems_of_every_layout(small: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        search(PlannedRun.of(_config([*small, "--rollout.tensor", "3", "--cluster.nodes", "8"])), wanted=1)
    fields = [str(problem).partition(" does not divide ")[0] for problem in refused.value.problems]
    assert fields == ["rollout.tensor=3"] * 2


def _config(flags: list[str]) -> Any:
    return load_config(ROOT / "configs" / "qwen2.5_0.5b.yaml", flags)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2, "sequence": True},  # experts are split, too
        {"tensor": 2, "sequence": True, "expert": 2},
        {"context": 2},
        {"data": 2, "expert": 2},
    ],
    ids=str,
)
def test_experts_are_planned_on_every_axis(parallel: dict[str, Any], tmp_path: Path) -> None:
    """With even routing, the ranks of a replica together compute as much as one rank; only routers may be repeated."""
    model = write_checkpoint(tmp_path / "model", **EXPERTS, num_hidden_layers=2, vocab_size=512)
    flops = []
    for layout in ({}, parallel):
        sections = {"trainer": {"parallel": layout, "target_tokens_per_batch": 2048}, "model": {"path": model}}
        config = RunConfig.model_validate({"run_dir": tmp_path / "run", **sections})
        backend = plannable_backend(config.trainer.backend)
        (kind,) = backend.planner().rank_kinds(config.trainer)
        shared = config.trainer.parallel.tensor * config.trainer.parallel.context
        flops.append(backend.planner().estimate(config, kind.ranks[0]).training.matmul_flops * shared)
    assert flops[1] == pytest.approx(flops[0], rel=0.02)


def planned_references(small: list[str], *flags: str) -> Plan:
    workers = ["--algorithm.kl.coef", "0.1", "--reference.placement", "workers", "--cluster.nodes", "2"]
    return make_plan(PlannedRun.of(_config([*small, *workers, *flags])))


def test_a_larger_reference_is_planned_with_its_own_sizes(small: list[str], tmp_path: Path) -> None:
    """Its GPUs hold its own weights: Qwen3-4B's without 32 of its layers."""
    layer = 2560 * (32 + 8 + 8) * 128 + 32 * 128 * 2560 + 3 * 2560 * 9728
    reference = with_fewer_layers(tmp_path, MODELS / "Qwen3-4B", 36 - 32)
    flags = ["--reference.path", str(reference), "--reference.parallel.tensor", "4"]
    plan = planned_references(small, *flags, "--algorithm.minibatches", "1")
    assert plan.problems == [] and plan.gpus_in_use == 16  # the policy fills the GPUs that references leave
    (kind,) = plan.references
    assert kind.estimate.memory.parameters * 4 == pytest.approx(PUBLISHED["Qwen3-4B"] - 32 * layer, rel=0.01)
    assert kind.phases[0] in plan.phases and kind.phases[0].items["parameters"] == 2 * kind.estimate.memory.parameters
    assert plan.step is not None and plan.step.references > 0 and plan.step.scoring == 0


REJECTED = ("--trainer.parallel.tensor", "3")  # nothing is traced then, which would take seconds


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*REJECTED, "--reference.parallel.tensor", "3"], ["reference.parallel.tensor=3 does not divide the model's"]),
        ([*REJECTED, "--reference.path", "/nowhere"], ["reference.path=/nowhere does not exist"]),
        (
            ["--cluster.gpu_memory_gib", "5", "--reference.path", "EIGHT_LAYERS"],
            ["has 152064 tokens and model.path 151936", "GPU memory, reference scoring: "],
        ),
    ],
)
def test_problems_of_references(small: list[str], flags: list[str], words: list[str], tmp_path: Path) -> None:
    """This machine does not belong to the cluster, so only settings are problems."""
    larger = str(with_fewer_layers(tmp_path, MODELS / "Qwen2.5-7B", 8))
    plan = planned_references(small, *(flag.replace("EIGHT_LAYERS", larger) for flag in flags))
    for word in words:
        assert [problem for problem in plan.problems if word in problem], plan.problems
        assert not [note for note in plan.notes if word in note]
