"""Formats of published data sets, the files that contain them, and rows of tokens."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from slime_like.config import DataConfig, TrainerConfig
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.data.rows import held_out_settings
from slime_like.data.token_rows import TokenRows
from slime_like.errors import DataError
from slime_like.system.words import extract_boxed
from tests.support import templates
from tests.support.rejections import Rejects
from tests.support.templates import tokenizer_of
from tests.unit.checks.checkpoint import write_checkpoint
from tests.unit.data.test_prompts import write_rows

# As published, with shortened texts and fewer columns.
GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
MATH = {
    "problem": "Evaluate $i^5+i^{-25}+i^{45}$.",
    "level": "Level 5",
    "type": "Algebra",
    "solution": "We have $i^5 = i$ ... So adding these three results gives $\\boxed{\\frac{3}{1}i}$ in all.",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve the following math problem. ...\n\nIn triangle $ABC$ ...", "role": "user"}],
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
OPENR1 = {
    "problem": "## Task B-1.3.\n\nA ship traveling along a river has covered $24 \\mathrm{~km}$ upstream ...",
    "solution": "## Solution.\n\nLet $t$ be the time required ...",
    "answer": "v_{R}=4\\mathrm{~}/\\mathrm{},v_{B}=10\\mathrm{~}/\\mathrm{}",
    "is_reasoning_complete": [True, True],
    "generations": ["<think>\n...", "<think>\n..."],
    "correctness_llama": None,
    "messages": [{"content": "## Task B-1.3.\n\n...", "role": "user"}, {"content": "<think>...", "role": "assistant"}],
}
PUBLISHED = [
    ("gsm8k", GSM8K, GSM8K["question"], "72"),
    ("gsm8k", GSM8K | {"answer": "so\n#### 1,104"}, GSM8K["question"], "1104"),
    ("math", MATH, MATH["problem"], "\\frac{3}{1}i"),
    ("math", MATH | {"answer": ""}, MATH["problem"], "\\frac{3}{1}i"),
    ("dapo", DAPO, DAPO["prompt"][0]["content"], "34"),  # type: ignore[index]
    ("openr1", OPENR1, OPENR1["problem"], OPENR1["answer"]),
]
TOKENIZER = tokenizer_of(templates.SOUND)


def prompts(path: Path, **data: Any) -> list[Prompt]:
    config = DataConfig(max_prompt_tokens=2000, shuffle=False, **data)
    source = PromptSource([path], TOKENIZER, config, seed=0, keep_messages=True, need_answer=True)
    return source.next(source.num_rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("name", "row", "question", "answer"), PUBLISHED)
def test_published_rows_are_read(
    tmp_path: Path, name: str, row: dict[str, Any], question: str, answer: str, suffix: str
) -> None:
    path = write_rows(tmp_path / f"train{suffix}", [row])
    (plain,) = prompts(path, format=name)
    assert plain.answer == answer and plain.messages == [{"role": "user", "content": question}]
    (led,) = prompts(path, format=name, system_prompt="Be brief.")
    assert led.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    text = TOKENIZER.apply_chat_template(led.messages, tokenize=False, add_generation_prompt=True)
    assert list(led.input.token_ids) == TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "row", "code"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "not-in-format"),
        ("gsm8k", {"question": "1+1?", "answer": "2\n####"}, "not-in-format"),
        ("gsm8k", MATH, "not-in-format"),
        ("math", {"problem": "1+1?", "solution": "It is 2."}, "not-in-format"),
        ("math", {"problem": "1+1?", "solution": "It is \\boxed{\\frac{2}{1}."}, "not-in-format"),
        ("dapo", GSM8K, "not-in-format"),
        ("math", {"problem": "1+1?", "solution": "It is \\boxed{}."}, "not-in-format"),
        ("math", {"problem": "1+1?", "solution": "It is 2.", "answer": ""}, "not-in-format"),
        ("dapo", {"prompt": "1+1?", "reward_model": {"ground_truth": " "}}, "not-in-format"),
        ("keys", {"prompt": [{"role": "assistant", "content": "Hi."}], "answer": "2"}, "bad-prompt"),
        ("openr1", {"problem": "1+1?", "answer": []}, "bad-answer"),
        ("openr1", OPENR1 | {"answer": ""}, "not-in-format"),
        ("openr1", OPENR1 | {"answer": " \n"}, "not-in-format"),
        ("keys", {"prompt": [{"role": "system", "content": "Be long."}], "answer": "2"}, "two-system-prompts"),
    ],
)
def test_rows_of_another_format_are_named(tmp_path: Path, name: str, row: dict[str, Any], code: str) -> None:
    with pytest.raises(DataError) as caught:
        prompts(write_rows(tmp_path / "a.jsonl", [row]), format=name, system_prompt="Be brief.")
    assert (caught.value.code, caught.value.who) == (code, f"{tmp_path / 'a.jsonl'}:1")


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        (GSM8K, "no-prompt", "data.format to gsm8k,"),
        (MATH, "no-prompt", "data.format to math,"),
        ({"a": 1}, "no-prompt", "'a'"),
        (DAPO, "bad-answer", "data.format to dapo"),
        ({"prompt": "1+1?", "label": "2"}, "bad-answer", "'prompt', 'label'"),
    ],
)
def test_a_row_without_prompt_or_answer_leads_to_its_format(
    tmp_path: Path, row: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        prompts(write_rows(tmp_path / "a.jsonl", [row]))
    assert caught.value.code == code and words in str(caught.value)


PLAIN, TOKENS = {"prompt": "1+1?", "answer": "2"}, {"input_token_ids": [5, 6], "answer": "2"}


@pytest.mark.parametrize(
    ("settings", "row", "read_as"),
    [
        ({"format": "gsm8k"}, GSM8K, "gsm8k"),
        ({"format": "gsm8k"}, MATH, "math"),
        ({"format": "gsm8k"}, PLAIN, "keys"),
        ({"format": "gsm8k"}, TOKENS, "keys"),
        ({"format": "math"}, OPENR1, "math"),  # which the training data's format reads
        ({"format": "openr1"}, MATH, "math"),
        ({}, TOKENS, "keys"),
        ({}, DAPO, "dapo"),
        ({"prompt_key": "question"}, GSM8K, "keys"),  # the solution is the answer: so are the training data read
        ({"prompt_key": "question"}, OPENR1, "openr1"),
        ({"prompt_key": "question"}, PLAIN, "keys"),  # rejected below, by its keys
        ({"mixture": True}, MATH, "math"),
        ({"mixture": True}, PLAIN, "keys"),
    ],
)
def test_held_out_rows_that_the_training_settings_do_not_fit_are_read_in_their_own_format(
    tmp_path: Path, settings: dict[str, Any], row: dict[str, Any], read_as: str
) -> None:
    if "mixture" in settings:
        sources = (("a", "gsm8k", GSM8K), ("b", "dapo", DAPO))
        files = {name: [write_rows(tmp_path / f"{name}.jsonl", [each])] for name, _, each in sources}
        settings = {"mixture": [{"name": name, "files": files[name], "format": form} for name, form, _ in sources]}
    config, path = DataConfig(**settings), write_rows(tmp_path / "held.jsonl", ["no object", row])
    found = held_out_settings(config, path)
    assert found.format == read_as
    assert (found.prompt_key, found.mixture) == (config.prompt_key, ())
    assert (found is config) == (read_as == config.format and not config.mixture)


@pytest.mark.parametrize("settings", [{"format": "gsm8k"}, {"mixture": [{"name": "a", "files": ["a.jsonl"]}]}])
def test_held_out_rows_of_no_format_are_rejected(tmp_path: Path, rejects: Rejects, settings: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "held.jsonl", [{"text": "1+1?", "answer": "2"}])
    with rejects(DataError, code="no-source"):
        held_out_settings(DataConfig(**settings), path)
    keys = DataConfig()
    assert held_out_settings(keys, path) is keys
    with rejects(DataError, code="no-prompt"):
        prompts(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{2}", "2"), ("\\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), ("\\boxed{ x^{2} }", "x^{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"), ("\\boxed{2", None), ("boxed{2}", None), ("\\boxed {2}", "2"),
        ("so $x = \\boxed 9$ is it, as $y$ is", "9"), ("so $\\boxed{1}$, or $\\boxed \\frac{1}{2}.$", "\\frac{1}{2}"),
        ("it is \\(\\boxed 12\\).", "12"), ("it is \\boxed 0.5.", "0.5"), ("it is \\boxed 7\nas said", "7"),
        ("\\boxed9", "9"), ("\\boxed", None), ("\\boxedness{2}", None), ("are $\\fbox{3}$", "3"),
        ("\\boxed{4}, not \\fbox{3}", "4"), ("\\fbox{3", None),
    ],
)  # fmt: skip
def test_the_last_box_is_read_with_its_braces(text: str, expected: str | None) -> None:
    assert extract_boxed(text) == expected


def test_directories_and_patterns_name_their_files(tmp_path: Path, rejects: Rejects) -> None:
    """A split saved by ``datasets``, the shards of a hub's snapshot, and a pattern."""
    rows = [{"prompt": f"{number}+0", "answer": number} for number in range(6)]
    saved, shards = tmp_path / "saved" / "train", tmp_path / "shards"
    saved.mkdir(parents=True)
    shards.mkdir()
    for part in range(2):
        table = pyarrow.Table.from_pylist(rows[3 * part : 3 * part + 3])
        with pyarrow.ipc.new_stream(str(saved / f"data-0000{part}-of-00002.arrow"), table.schema) as stream:
            stream.write_table(table)
        pyarrow.parquet.write_table(table, shards / f"train-0000{part}-of-00002.parquet")
    names = [{"filename": f"data-0000{part}-of-00002.arrow"} for part in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": names, "_split": "train"}))
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for path in (saved, shards, shards / "train-*.parquet", saved.parent / "trai*"):
        assert [prompt.answer for prompt in prompts(path)] == ["0", "1", "2", "3", "4", "5"], path
    (shards / "test-00000-of-00001.parquet").touch()
    (tmp_path / "none").mkdir()
    for path, code in (
        (tmp_path / "saved", "several-splits"),
        (shards, "several-splits"),
        (shards / "dev-*.parquet", "no-data-files"),
        (tmp_path / "none", "no-data-files"),
    ):
        with rejects(DataError, code):
            prompts(path)


SOUND: dict[str, Any] = {"id": "a", "prompt_tokens": [1, 2], "response_tokens": [3, 0, 7]}


def rows_of(directory: Path, *rows: Any, context: int = 1, budget: int = 16) -> TokenRows:
    write_checkpoint(directory / "model", vocab_size=8, max_position_embeddings=64)
    (directory / "rows.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    trainer = TrainerConfig(target_tokens_per_batch=budget, parallel={"context": context})  # type: ignore[arg-type]
    return TokenRows(directory / "rows.jsonl", directory / "model", trainer)


def test_rows_are_read(tmp_path: Path) -> None:
    """Ids may be numbers, the default temperature is 1, unknown keys are ignored, and rows can be read again."""
    rows = rows_of(tmp_path, SOUND, "", {**SOUND, "id": 5, "temperature": 0.7, "note": "x"})
    assert rows.count() == 2
    for _ in range(2):
        (name, first), (other, second) = rows
        assert (name, other) == ("a", 5)
        assert first.prompt_tokens.tolist() == [1, 2]
        assert first.response_tokens.tolist() == [3, 0, 7]
        assert (first.prompt_len, first.response_len) == (2, 3)
        assert (first.temperature, second.temperature) == (1.0, 0.7)
        assert second.sequence_id.endswith("rows.jsonl:3")
        assert torch.equal(first.loss_mask, torch.ones(3, dtype=torch.bool))


BAD: list[tuple[Any, str]] = [
    ({**SOUND, "id": None}, "bad-id"),
    ({**SOUND, "id": True}, "bad-id"),
    ({"id": 1, "response_tokens": [1]}, "bad-token-ids"),
    ({**SOUND, "prompt_tokens": []}, "empty-tokens"),
    ({**SOUND, "response_tokens": []}, "empty-tokens"),
    ({**SOUND, "response_tokens": [1.0]}, "bad-token-ids"),
    ({**SOUND, "response_tokens": [True]}, "bad-token-ids"),
    ({**SOUND, "response_tokens": "12"}, "bad-token-ids"),
    ({**SOUND, "response_tokens": [7, 8]}, "unknown-token-id"),
    ({**SOUND, "prompt_tokens": [-1]}, "unknown-token-id"),
    ({**SOUND, "temperature": 0}, "bad-temperature"),
    ({**SOUND, "temperature": "1"}, "bad-temperature"),
    ('{"id": 1, "prompt_tokens": [1], "response_tokens": [1], "temperature": 1e999}', "bad-temperature"),
    ({**SOUND, "response_tokens": [1] * 15}, "over-token-budget"),
    ({**SOUND, "response_tokens": [1] * 70}, "too-long"),
]


@pytest.mark.parametrize(("row", "code"), BAD, ids=[code for _, code in BAD])
def test_a_bad_row_is_named(tmp_path: Path, rejects: Rejects, row: Any, code: str) -> None:
    with rejects(DataError, code):
        rows_of(tmp_path, SOUND, row).count()


def test_padding_for_context_parallelism_counts(tmp_path: Path, rejects: Rejects) -> None:
    """Five tokens become sixteen on eight context ranks; seventeen become thirty-two."""
    assert rows_of(tmp_path, SOUND, context=8).count() == 1
    with rejects(DataError, "over-token-budget"):
        rows_of(tmp_path, {**SOUND, "response_tokens": [1] * 15}, context=8, budget=17).count()


def test_a_row_has_no_placeholders_of_images(tmp_path: Path, rejects: Rejects) -> None:
    """Without a tower, the same ids are ordinary tokens."""
    assert rows_of(tmp_path, SOUND).count() == 1
    config = tmp_path / "model" / "config.json"
    language = json.loads(config.read_text()) | {"model_type": "qwen3_vl_text"}
    tower = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": language}
    config.write_text(json.dumps(tower | {"image_token_id": 7}))
    with rejects(DataError, "not-text"):
        TokenRows(tmp_path / "rows.jsonl", tmp_path / "model", TrainerConfig(target_tokens_per_batch=16)).count()
