"""Evaluation over several files: names, figures per file and overall, unique groups.

The last tests cover engines without trainers, which ignore training settings.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.checks.names import first_row
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.evaluate import engines_alone
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.interfaces.user_code import Task
from slime_like.observability.progress import Progress
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.rollout.evaluation import Evaluator, dataset_names, held_out
from slime_like.sandbox.rewards.pool import RewardOutcome
from slime_like.trajectory import GroupedUnscoredTrajectories
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import sound_flags, write_checkpoint

SAMPLES = 4
SILENT = Progress("off", total_steps=0)


class Engines:
    """Engines whose sample i of every request has i + 1 tokens. The last sample is cut off."""

    def generate_all(
        self, requests: list[GenerationRequest], answered: Callable[[int], None]
    ) -> list[list[Generation]]:
        assert len({request.request_id for request in requests}) == len(requests)
        assert len({request.seed for request in requests}) == len(requests)
        return [
            [_generation(i + 1, "length" if i == SAMPLES - 1 else "stop") for i in range(SAMPLES)] for _ in requests
        ]


def _generation(length: int, reason: Any) -> Generation:
    return Generation(np.full(length, 5), np.zeros(length, np.float32), np.zeros(length, np.int64), reason)


class Scorer:
    """Scorer: in file "b", one sample of four is right. In file "a", none is, and one has no result."""

    def outcomes(self, groups: list[GroupedUnscoredTrajectories]) -> list[RewardOutcome]:
        return [
            RewardOutcome(
                (1.0,),
                (float(t.answer == "b" and t.sequence_id.endswith("-2")),),
                {"reason": "timeout"} if t.answer == "a" and t.sequence_id.endswith("-1") else {},
            )
            for group in groups
            for t in group.trajectories
        ]


def write(path: Path, rows: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": path.stem}) + "\n" for i in range(rows)))
    return path


def evaluator(files: list[Path]) -> Evaluator:
    model = write_checkpoint(files[0].parent / "model")
    config = RunConfig(
        run_dir=model / "run", model={"path": model}, data={"train": files},
        evaluation={"files": files, "samples_per_prompt": SAMPLES, "temperature": 1.0, "max_prompts": 6},
    )  # fmt: skip
    datasets = held_out(config, byte_tokenizer())
    return Evaluator(config, Engines(), Scorer(), datasets)  # type: ignore[arg-type]


def test_each_file_and_all_of_them(tmp_path: Path) -> None:
    stream = io.StringIO()
    files = [write(tmp_path / "a.jsonl", 2), write(tmp_path / "b.jsonl", 9)]
    result = evaluator(files).run(3, Progress("plain", 9, stream))
    a, b, overall = result.datasets["a"], result.datasets["b"], result.overall
    assert (a["num_responses"], b["num_responses"], overall["num_responses"]) == (2 * 4, 6 * 4, 8 * 4)
    assert (a["accuracy"], b["accuracy"]) == (0.0, 0.25)
    assert (a["scoring_failures"], b["scoring_failures"], overall["scoring_failures"]) == (2, 0, 2)
    assert "scoring failed for 2 of 32 responses (2 by timeout)" in stream.getvalue()
    assert overall["accuracy"] == pytest.approx(6 / 30)
    assert (b["pass@2"], b["pass@4"], a["pass@2"]) == (0.5, 1.0, 0.0) and "pass@4" not in a  # no prompt has four scored
    assert (overall["pass@4"], overall["response_length_mean"], overall["truncated_fraction"]) == (1.0, 2.5, 0.25)
    assert evaluator([tmp_path / "a.jsonl"]).run(0, SILENT).datasets == {}  # one file needs no name
    assert [sample.prompt_id for sample in result.samples] == [0, 1, 2, 3]
    every = evaluator(files).run(3, SILENT, keep_all=True).samples
    assert len(every) == 32 and [sample.success for sample in every].count(True) == 6
    assert [sample.success for sample in every].count(None) == 2  # neither right nor wrong
    assert [sample.dataset for sample in every] == ["a"] * 8 + ["b"] * 24
    assert all(sample.dataset == sample.answer for sample in every)  # the answer is the name of the file


def test_a_file_of_another_data_set_than_the_training_data(tmp_path: Path) -> None:
    """Training uses rows of GSM8K, evaluation rows of MATH and plain rows."""
    rows = {
        "train": {"question": "1+1?", "answer": "It is 2.\n#### 2"},
        "math": {"problem": "1+2?", "solution": "It is $\\boxed{3}$."},
        "plain": {"prompt": "1+3?", "answer": "4"},
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text(json.dumps(rows[name]))
    config = RunConfig.model_validate(
        {
            "run_dir": tmp_path / "run", "model": {"path": write_checkpoint(tmp_path / "model")},
            "data": {"train": [files["train"]], "format": "gsm8k"}, "evaluation": {"files": list(files.values())},
        }
    )  # fmt: skip
    datasets = held_out(config, byte_tokenizer())
    assert {name: [prompt.answer for prompt in found] for name, found in datasets.items()} == {
        "train": ["2"], "math": ["3"], "plain": ["4"],
    }  # fmt: skip
    assert (first_row(config) or [None])[0] == Task("1+1?", "2")


def test_tools_of_rows_need_a_form_that_reads_calls(tmp_path: Path, rejects: Rejects) -> None:
    file, tokenizer = tmp_path / "a.jsonl", byte_tokenizer()
    model = {"path": write_checkpoint(tmp_path / "model")}
    config = RunConfig.model_validate({"run_dir": tmp_path, "model": model, "evaluation": {"files": [file]}})
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    tokenizer.chat_template = "{{ tools }}{{ messages }}"
    file.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    assert len(held_out(config, tokenizer)["a"]) == 1
    file.write_text(json.dumps({"prompt": "1+1?", "answer": "2", "tools": [tool]}))
    with rejects(ConfigError, "no-call-form"):
        held_out(config, tokenizer)


def test_names_of_files_are_unique() -> None:
    assert dataset_names([Path("x/math.jsonl"), Path("aime.parquet")]) == ["math", "aime"]
    assert dataset_names([Path("x/test.jsonl"), Path("y/test.jsonl")]) == ["x/test", "y/test"]
    assert dataset_names([Path("x/t.jsonl"), Path("x/t.jsonl")]) == ["t-0", "t-1"]


# ------------------------------------------------------------------------------------------------- engines alone
OF_TRAINING = [
    ["--algorithm.loss", "sft"],
    ["--debug.load_rollouts", "kept"],
    ["--cluster.placement", "colocated"],
    ["--reference.placement", "workers", "--algorithm.kl.coef", "0.1"],
    ["--trainer.parallel.tensor", "4"],
    ["--rollout.samples_per_prompt", "64"],
    ["--sync.timeout_s", "1"],
]


def _config(tmp_path: Path, *flags: str) -> RunConfig:
    return load_config(None, [*sound_flags(tmp_path), "--rollout.num_engines", "2", "--rollout.tensor", "2", *flags])


@pytest.mark.parametrize("flags", OF_TRAINING, ids=" ".join)
def test_engines_alone_ignore_training_settings(tmp_path: Path, flags: list[str]) -> None:
    alone = engines_alone(_config(tmp_path, *flags))
    assert alone == engines_alone(_config(tmp_path))
    assert pieces_of(alone, with_trainers=False).bundles == [2, 2]


def test_engines_alone_keep_their_settings(tmp_path: Path) -> None:
    config = _config(tmp_path, "--trainer.start_timeout_s", "7", "--rollout.stream", "true")
    alone = engines_alone(config)
    assert alone.trainer.start_timeout_s == 7
    assert alone.rollout == config.rollout and alone.reward == config.reward and alone.evaluation == config.evaluation
