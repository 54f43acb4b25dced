"""Capsules of whole runs, replayed under other layouts, and with one number changed. A shorter one: test_layouts.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_like.config.reading.load import load_config
from slime_like.data.dump import dump_path, load_trajectories, save_trajectories
from slime_like.trajectory import ScoredTrajectory
from tests.conftest import Tiny
from tests.support.shared_cluster import replay_together, train_together

pytestmark = pytest.mark.acceptance

PARALLEL = "--trainer.parallel"
FSDP = ("--trainer.backend", "fsdp")
RUNS = {
    # Two steps after the checkpoint, sampled with older weights, with a reference.
    "async": "--steps 4 --checkpoint.every 2 --rollout.max_staleness 1 --algorithm.importance.correction truncate "
    "--algorithm.kl.coef 0.01 --debug.capsule [1,4]",
    "lora": "--steps 1 --model.lora.rank 4 --trainer.optimizer.lr 0.01 --debug.capsule [1]",
    "critic": "--steps 2 --checkpoint.every 1 --algorithm.advantage gae --algorithm.kl_reward.coef 0.02 "
    "--algorithm.minibatches 2 --debug.capsule [2]",
    "stream": "--steps 2 --checkpoint.every 1 --rollout.stream true --algorithm.minibatches 1 --debug.capsule [2]",
    "fsdp": "--steps 2 --checkpoint.every 1 --trainer.backend fsdp --trainer.parallel.data 2 --debug.capsule [2]",
}
SFT = "--steps 5 --checkpoint.every 3 --debug.capsule [5]"
LAYOUTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "async, same": ("async", 4, ()),
    "async, tensor": ("async", 4, (f"{PARALLEL}.tensor", "2", f"{PARALLEL}.sequence", "true")),
    "async, pipeline": ("async", 4, (f"{PARALLEL}.pipeline", "2")),
    "async, context": ("async", 4, (f"{PARALLEL}.context", "2")),
    "async, data": ("async", 4, (f"{PARALLEL}.data", "2")),
    "async, tensor and data": ("async", 4, (f"{PARALLEL}.tensor", "2", f"{PARALLEL}.data", "2")),
    "first step, fsdp": ("async", 1, (*FSDP, f"{PARALLEL}.data", "2")),
    "lora, tensor": ("lora", 1, (f"{PARALLEL}.tensor", "2")),
    "critic, data": ("critic", 2, (f"{PARALLEL}.data", "2")),
    "stream, data": ("stream", 2, (f"{PARALLEL}.data", "2")),
    "fsdp, one rank": ("fsdp", 2, (f"{PARALLEL}.data", "1")),
    "sft, pipeline": ("sft", 5, (f"{PARALLEL}.pipeline", "2")),
}


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    common = ["--rollout.engine", "transformers", "--evaluation.files", "[]", "--checkpoint.export_hf", "false"]
    commands = [tiny.rl_flags(root / name, *common, *flags.split()) for name, flags in RUNS.items()]
    train_together([*commands, tiny.sft_flags(root / "sft", *SFT.split())], root, 900)
    return root


def capsule(runs: Path, name: str, step: int) -> Path:
    return runs / name / "capsules" / f"step-{step:06d}"


def test_capsules_are_replayed_within_rounding_under_other_layouts(runs: Path, tmp_path: Path) -> None:
    replays = [
        [str(capsule(runs, run, step)), "--output", str(tmp_path / name), *layout]
        for name, (run, step, layout) in LAYOUTS.items()
    ]
    codes = dict(zip(LAYOUTS, replay_together(replays, tmp_path / "replays", 900), strict=True))
    found = {name: json.loads((tmp_path / name).read_text())["lines"] for name, code in codes.items() if code < 2}
    wrong = {name: [line for line in lines if line["wrong"]] for name, lines in found.items()}
    assert codes == dict.fromkeys(LAYOUTS, 0), {name: lines for name, lines in wrong.items() if lines}
    largest = {name: max(line["largest"] for line in lines) for name, lines in found.items()}
    assert largest["async, same"] == 0 < largest["async, tensor"] and largest["critic, data"] > 0
    kinds = {name: {line["quantity"] for line in lines} for name, lines in found.items()}
    assert {"critic weights", "critic figures", "values", "returns"} <= kinds["critic, data"]
    assert {"given advantages", "old_logprobs"}.isdisjoint(kinds["sft, pipeline"])
    assert all("after.old_logprobs" in each for each in kinds.values())


# ------------------------------------------------------------------------------------------------- one number changed
def in_rollouts(step: int, change: Callable[[ScoredTrajectory], None]) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        file = dump_path(path / "rollouts", step)
        rows = load_trajectories(file)
        change(rows[5])
        file.unlink()  # a link
        save_trajectories(file, rows)

    return changed


def in_tokens(field: str) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        tokens = torch.load(path / "tokens.pt", weights_only=True)
        row = load_trajectories(dump_path(path / "rollouts", 4))[5]
        tokens[field, row.sequence_id][1] += 0.5
        torch.save(tokens, path / "tokens.pt")

    return changed


def in_record(step: int, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        file = path / "records" / f"step-{step:06d}.json"
        content = json.loads(file.read_text())
        change(content)
        file.unlink()
        file.write_text(json.dumps(content))

    return changed


def other_id(row: ScoredTrajectory) -> None:
    row.response_tokens[1] = (row.response_tokens[1] + 7) % 250


def other_prompt(row: ScoredTrajectory) -> None:
    row.prompt_tokens[1] = (row.prompt_tokens[1] + 7) % 250


def other_advantage(row: ScoredTrajectory) -> None:
    row.advantages = row.advantages.clone()
    row.advantages[1] += 0.5


def other_reward(row: ScoredTrajectory) -> None:
    row.rewards += 0.5


def other_sampled_logprob(row: ScoredTrajectory) -> None:
    assert row.logprobs is not None
    row.logprobs[1] += 0.5


def other_mask(row: ScoredTrajectory) -> None:
    row.loss_mask[1] = False


def other_norm(record: Any) -> None:
    record["figures"]["policy"][0]["grad_norm"] *= 1.1


def other_loss(record: Any) -> None:
    record["figures"]["policy"][0]["policy_loss"] += 0.1


def other_weight(record: Any) -> None:
    """Add 0.5 to one element, whose sign is the same in all projections."""
    tensor = record["weights"]["trainer"][TENSOR]
    tensor["checksum"] += 1
    tensor["projections"] = [each + 0.5 for each in tensor["projections"]]


TENSOR = "model.layers.1.mlp.up_proj.weight"
CHANGES: dict[str, tuple[Callable[[Path], None], int, str, dict[str, Any]]] = {
    "logprob": (in_tokens("old_logprobs"), 4, "old_logprobs", {"response_token": 1}),
    "logprob after": (in_tokens("after.old_logprobs"), 4, "after.old_logprobs", {"response_token": 1}),
    "token id": (in_rollouts(4, other_id), 4, "old_logprobs", {"response_token": 1}),
    "prompt id": (in_rollouts(4, other_prompt), 4, "old_logprobs", {"response_token": 0}),
    "earlier id": (in_rollouts(3, other_id), 3, "policy figures", {"update": 1}),
    "advantage": (in_rollouts(4, other_advantage), 4, "given advantages", {"response_token": 1}),
    "reward": (in_rollouts(4, other_reward), 4, "given advantages", {"response_token": 0}),
    "engine's logprob": (in_rollouts(4, other_sampled_logprob), 4, "logprobs", {"response_token": 1}),
    "mask": (in_rollouts(4, other_mask), 4, "loss_mask", {"response_token": 1}),
    "gradient norm": (in_record(4, other_norm), 4, "policy figures", {"figure": "grad_norm", "update": 1}),
    "loss": (in_record(3, other_loss), 3, "policy figures", {"figure": "policy_loss", "update": 1}),
    "first weight": (in_record(2, other_weight), 2, "trainer weights", {"tensor": TENSOR}),
    "last weight": (in_record(4, other_weight), 4, "trainer weights", {"tensor": TENSOR}),
}


def test_a_changed_number_is_found_and_named(runs: Path, tmp_path: Path) -> None:
    """On two ranks, where rounding differs. The file of a weight and an optimizer setting are changed, too."""
    source, replays = capsule(runs, "async", 4), {}
    for name, (change, *_) in CHANGES.items():
        shutil.copytree(source, tmp_path / name / "capsule")
        change(tmp_path / name / "capsule")
        replays[name] = [str(tmp_path / name / "capsule"), f"{PARALLEL}.tensor", "2"]
    replays["setting"] = [str(source), "--trainer.optimizer.clip_grad", "0.01"]
    replays["model"] = [str(capsule(runs, "async", 1)), "--model.path", str(other_model(runs, tmp_path))]
    shutil.copytree(source, tmp_path / "damaged" / "capsule")
    file = max(
        (tmp_path / "damaged" / "capsule" / "checkpoints").rglob("*.distcp"), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    replays["damaged"] = [str(tmp_path / "damaged" / "capsule")]
    given = [[*flags, "--output", str(tmp_path / f"{name}.json")] for name, flags in replays.items()]
    codes = dict(zip(replays, replay_together(given, tmp_path / "replays", 900), strict=True))
    assert codes == dict.fromkeys(replays, 1)
    assert not (tmp_path / "damaged.json").exists()
    wrong = {
        name: [line for line in json.loads((tmp_path / f"{name}.json").read_text())["lines"] if line["wrong"]]
        for name in replays if name != "damaged"
    }  # fmt: skip
    sequence = load_trajectories(dump_path(source / "rollouts", 4))[5].sequence_id
    for name, (_, step, quantity, place) in CHANGES.items():
        first = next(line for line in wrong[name] if line["quantity"] == quantity)
        assert (first["step"], first["first"].items() >= place.items()) == (step, True), (name, wrong[name])
        assert name == "reward" or first["first"].get("sequence", sequence) == sequence, (name, wrong[name])
        assert first == wrong[name][0] or name == "mask", (name, wrong[name])
    trained = next(line for line in wrong["setting"] if line["quantity"] == "trainer weights")
    assert (trained["step"], trained["first"]["tensor"]) == (3, "model.embed_tokens.weight")
    assert (wrong["model"][0]["step"], wrong["model"][0]["first"]["tensor"]) == (0, TENSOR)


def other_model(runs: Path, directory: Path) -> Path:
    """Copy the model with one other weight."""
    source = load_config(runs / "async" / "config.yaml").model.path
    shutil.copytree(source, directory / "model")
    for file in (directory / "model").glob("*.safetensors"):
        tensors = load_file(file)
        if TENSOR in tensors:
            tensors[TENSOR][3, 3] += 1e-3
            save_file(tensors, file, {"format": "pt"})
    return directory / "model"
