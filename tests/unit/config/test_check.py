"""Faults across fields and against files, found before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.algorithms.advantages import ESTIMATORS, compute_advantages
from slime_like.algorithms.losses.policy import POLICY_LOSSES
from slime_like.config import ParallelConfig
from slime_like.config.algorithm import ADVANTAGES, GROUP_ADVANTAGES, LOSSES
from slime_like.config.check import check
from slime_like.config.dimensions import ModelDimensions
from slime_like.config.layout import layers_per_stage, layout_problems
from slime_like.config.load import load_config
from slime_like.errors import ConfigError
from tests.unit.config.checkpoint import EXPERTS, QWEN3_8_KV_HEADS, sound_flags, write_checkpoint


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return sound_flags(tmp_path)


def test_a_sound_configuration_has_no_problem(flags: list[str]) -> None:
    assert check(load_config(None, flags)) == []
    assert check(load_config(None, [*flags, "--algorithm.loss", "sft", "--data.max_prompt_tokens", "9999"])) == []


# TMP stands for the test's directory.
FAULTS: list[tuple[list[str], str]] = [
    (["--model.path", "TMP/none"], "model.path=TMP/none is no directory; give a Hugging Face checkpoint directory"),
    (["--model.path", "TMP"], "model.path=TMP: no config.json there; give a Hugging Face checkpoint directory"),
    (["--run_dir", "TMP/train.jsonl"], "run_dir=TMP/train.jsonl is a file; give a directory"),
    (["--data.train", "none"], "data.train=[] is empty; give at least one .jsonl or .parquet file"),
    (["--data.train", "TMP/no.jsonl"], "data.train=TMP/no.jsonl does not exist; give an existing file"),
    (
        ["--evaluation.files", "TMP/a.csv"],
        "evaluation.files=TMP/a.csv is of an unknown type; give .jsonl or .parquet files",
    ),
    (
        ["--evaluation.every", "5"],
        "evaluation.every=5, but evaluation.files is empty; give held-out files, or every: 0",
    ),
    (
        ["--evaluation.samples_per_prompt", "4"],
        "evaluation.samples_per_prompt=4 at evaluation.temperature=0 samples the same",
    ),
    (["--rollout.engine", "vlm"], "rollout.engine=vlm is unknown; use one of: "),
    (["--trainer.backend", "fdsp"], "trainer.backend=fdsp is unknown; use one of: "),
    (["--algorithm.loss", "ppo"], "algorithm.loss=ppo is unknown; use one of: ppo_clip, "),
    (["--algorithm.advantage", "gae"], "algorithm.advantage=gae is unknown; use one of: grpo, "),
    (
        ["--rollout.top_p", "0.9"],
        "rollout.top_p=0.9 cuts the distribution that the loss assumes whole; use 1 for training",
    ),
    (
        ["--rollout.top_k", "50"],
        "rollout.top_k=50 cuts the distribution that the loss assumes whole; use -1 for training",
    ),
    (
        ["--rollout.samples_per_prompt", "1"],
        "rollout.samples_per_prompt=1 gives algorithm.advantage=grpo nothing to compare",
    ),
    (["--algorithm.minibatches", "65"], "algorithm.minibatches=65 is more than rollout.prompts_per_step=64"),
    (
        ["--trainer.parallel.data", "9", "--rollout.prompts_per_step", "2", "--algorithm.minibatches", "2"],
        "trainer.parallel.data=9 is more than the 8 samples of a minibatch",
    ),
    (
        ["--trainer.parallel.data", "3", "--rollout.prompts_per_step", "2", "--algorithm.loss", "sft"],
        "trainer.parallel.data=3 is more than the 2 samples of a minibatch",
    ),
    (["--trainer.optimizer.min_lr", "1"], "trainer.optimizer.min_lr=1 is above trainer.optimizer.lr=1e-06"),
    (
        ["--trainer.optimizer.warmup_steps", "100", "--trainer.optimizer.decay", "cosine"],
        "trainer.optimizer.warmup_steps=100 leaves nothing of the run's 100 optimizer steps to decay=cosine",
    ),
    (
        ["--data.max_prompt_tokens", "1800"],
        "data.max_prompt_tokens=1800 and rollout.max_new_tokens=256 make 2056 tokens, more than the model's "
        "max_position_embeddings=2048; lower them",
    ),
    (
        ["--trainer.target_tokens_per_batch", "700"],
        "data.max_prompt_tokens=512 and rollout.max_new_tokens=256 make 768 tokens, more than "
        "trainer.target_tokens_per_batch=700; lower them, or raise it",
    ),
    (
        ["--rollout.max_model_len", "700"],
        "data.max_prompt_tokens=512 and rollout.max_new_tokens=256 make 768 tokens, more than rollout.max_model_len=",
    ),
    (
        ["--rollout.max_model_len", "4096"],
        "rollout.max_model_len=4096 is more than the model's max_position_embeddings=2048",
    ),
    (
        ["--evaluation.files", "TMP/train.jsonl", "--evaluation.max_new_tokens", "300"],
        "data.max_prompt_tokens=512 and evaluation.max_new_tokens=300 make 812 tokens, more than rollout.",
    ),
    (
        ["--rollout.stop_token_ids", "2", "300"],
        "rollout.stop_token_ids=300 is no token of the model; its ids are 0 to 299",
    ),
    (["--reward.functions", "[{name: maths}]"], "reward.functions.0.name=maths is unknown; use math_verify, "),
    (["--reward.functions", "[{name: 'mine:'}]"], "reward.functions.0.name=mine: is unknown; use math_verify, "),
    (
        ["--reward.functions", "[{name: length, options: {limit: 1}}, {name: length, options: {limit: 1}}]"],
        "reward.functions.1.name=length is used twice",
    ),
    (
        ["--reward.functions", "[{name: format}]"],
        "reward.functions.0.options={} do not fit: options of reward function 'format': missing",
    ),
    (
        ["--reward.functions", "[{name: length, options: {limit: 4, max: 5}}]"],
        "reward.functions.0.options={'limit': 4, 'max': 5} do not fit",
    ),
    (["--algorithm.kl_coef", "0.1", "--reference.path", "TMP/none"], "reference.path=TMP/none is no directory"),
    (["--algorithm.kl_coef", "0.1", "--reference.path", "TMP"], "reference.path=TMP: no config.json there"),
    (
        ["--trainer.parallel.tensor", "3"],
        "trainer.parallel.tensor=3 does not divide the model's 8 KV heads; use 1, 2, 4 or 8",
    ),
]


@pytest.mark.parametrize(("more", "sentence"), FAULTS, ids=[" ".join(case[0]) for case in FAULTS])
def test_a_fault_is_named_with_field_value_and_remedy(
    tmp_path: Path, flags: list[str], more: list[str], sentence: str
) -> None:
    problems = check(load_config(None, [*flags, *(flag.replace("TMP", str(tmp_path)) for flag in more)]))
    assert len(problems) == 1, problems
    assert problems[0].startswith(sentence.replace("TMP", str(tmp_path)))


def test_all_faults_are_told_at_once(tmp_path: Path, flags: list[str]) -> None:
    more = [
        "--data.train",
        "x.jsonl",
        "--rollout.top_p",
        "0.5",
        "--trainer.parallel.pipeline",
        "13",
        "--rollout.engine",
        "x",
    ]
    assert len(check(load_config(None, [*flags, *more]))) == 4


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path, flags: list[str]) -> None:
    write_checkpoint(tmp_path / "other", vocab_size=301)
    more = ["--algorithm.kl_coef", "0.1", "--reference.path", str(tmp_path / "other")]
    problems = check(load_config(None, [*flags, *more]))
    assert len(problems) == 1
    assert "has 301 tokens and model.path 300" in problems[0]
    assert check(load_config(None, [*flags, *more, "--algorithm.kl_coef", "0"])) == []


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(12, 4, [3, 3, 3, 3]), (3, 2, [2, 1]), (61, 4, [15, 16, 15, 15]), (63, 4, [16, 16, 16, 15]), (7, 1, [7])],
)
def test_layers_spread_over_stages(layers: int, stages: int, expected: list[int]) -> None:
    assert layers_per_stage(layers, stages) == expected


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"tensor": 4, "sequence": True, "pipeline": 3, "virtual_pipeline": 2, "context": 5, "data": 7}, []),
    ({}, {"tensor": 16}, ["trainer.parallel.tensor=16 does not divide the model's 8 KV heads; use 1, 2, 4 or 8"]),
    (
        {"intermediate_size": 100},
        {"tensor": 8},
        ["trainer.parallel.tensor=8 does not divide the model's 100 FFN columns; use 1, 2 or 4"],
    ),
    ({}, {"sequence": True}, ["trainer.parallel.sequence=true needs trainer.parallel.tensor above 1"]),
    (
        {},
        {"pipeline": 13},
        ["trainer.parallel.pipeline=13 is more than the model's 12 layers; every stage needs one, so use at most 12"],
    ),
    (
        {},
        {"pipeline": 5, "virtual_pipeline": 3},
        ["trainer.parallel.pipeline=5 times virtual_pipeline=3 is more than the model's 12 layers; every stage needs"],
    ),
    (
        {},
        {"virtual_pipeline": 2},
        ["trainer.parallel.virtual_pipeline=2 needs trainer.parallel.pipeline above 1; set it to 1"],
    ),
    ({}, {"expert": 2}, ["trainer.parallel.expert=2, but the model has no experts; set it to 1"]),
    (EXPERTS, {"expert": 4, "data": 4}, []),
    (EXPERTS, {"expert": 8, "tensor": 8, "sequence": True}, []),
    (
        EXPERTS,
        {"expert": 3, "data": 3},
        ["trainer.parallel.expert=3 does not divide the model's 8 experts; use 1, 2, 4 or 8"],
    ),
    (
        EXPERTS,
        {"expert": 4, "data": 2},
        ["trainer.parallel.expert=4 does not divide tensor * context * data = 2; use 1 or 2"],
    ),
    (EXPERTS, {"tensor": 2}, ["trainer.parallel.tensor=2 on a mixture of experts needs sequence parallelism"]),
]


@pytest.mark.parametrize(("model", "layout", "sentences"), LAYOUTS, ids=[str(case[1]) for case in LAYOUTS])
def test_layouts(tmp_path: Path, model: dict[str, Any], layout: dict[str, Any], sentences: list[str]) -> None:
    dimensions = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, **model))
    problems = layout_problems(ParallelConfig(**layout), dimensions)
    assert len(problems) == len(sentences), problems
    for problem, sentence in zip(problems, sentences, strict=True):
        assert problem.startswith(sentence)


UNREADABLE = {
    "no JSON": ("{", "not valid JSON"),
    "binary": (b"\xff\xfe", "not valid JSON"),
    "list": ("[]", "no JSON object"),
    "architecture": (
        '{"architectures": ["GPT2LMHeadModel"]}',
        "architecture GPT2LMHeadModel is not supported; known: ",
    ),
    "missing": ('{"architectures": ["Qwen3ForCausalLM"]}', "is missing"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_checkpoint_is_named(tmp_path: Path, case: str) -> None:
    content, reason = UNREADABLE[case]
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        ModelDimensions.from_checkpoint(tmp_path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"rope_theta": "x"},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
    ],
    ids=str,
)
def test_a_checkpoint_that_cannot_be_computed_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelDimensions.from_checkpoint(write_checkpoint(tmp_path, **changes))


def test_dimensions_are_those_of_the_file(tmp_path: Path) -> None:
    found = ModelDimensions.from_checkpoint(write_checkpoint(tmp_path))
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (16, 8, 16)
    assert found.vocab_size == QWEN3_8_KV_HEADS["vocab_size"]
    assert found.eos_token_ids == (2,)


def test_known_names_are_those_of_the_registries() -> None:
    assert set(LOSSES) == set(POLICY_LOSSES)
    assert set(ADVANTAGES) == set(ESTIMATORS)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_estimators_are_those_that_learn_nothing_from_groups_of_one(name: str) -> None:
    advantages = compute_advantages(torch.tensor([0.0, 1.0, 3.0]), [1, 2, 3], name)
    assert bool((advantages == 0).all()) == (name in GROUP_ADVANTAGES)
