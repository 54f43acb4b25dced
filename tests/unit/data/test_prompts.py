"""Prompts: reading, order, resuming, and rejection of bad rows."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from backends.common.hugging_face.directory import copy_companions
from slime_like.config import DataConfig
from slime_like.data.encoding import RowEncoder
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.data.rows import Row
from slime_like.errors import FAILED, ConfigError, DataError, SlimeLikeError, exit_code
from slime_like.examples.tiny_model import SPECIAL_TOKENS, byte_tokenizer, make_tiny_model
from slime_like.interfaces.samples import PromptInput
from slime_like.models.tokenization import load_tokenizer
from tests.support.properties import examples
from tests.support.rejections import Rejects

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
CONFIG = DataConfig(max_prompt_tokens=16)
SUMS: list[dict[str, Any]] = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "response": str(2 * i)} for i in range(10)]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(path: Path, rows: list[dict[str, Any]], seed: int = 0, **changes: Any) -> PromptSource:
    return PromptSource([write_rows(path, rows)], TOKENIZER, CONFIG.model_copy(update=changes), seed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sums.jsonl", SUMS)


def text(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens))


MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
# row, configuration, prompt as text, answer
READ: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"prompt": "1+1=", "answer": "2"}, {}, "<user>1+1=<assistant>", "2"),
    ({"prompt": "1+1=", "answer": "2"}, {"apply_chat_template": False}, "1+1=", "2"),
    ({"prompt": MESSAGES, "answer": "2"}, {}, "<system>Add.<user>1+1=<assistant>", "2"),
    ({"prompt": "1+1=", "answer": 2}, {}, "<user>1+1=<assistant>", "2"),
    ({"prompt": "1+1=", "answer": 0.5}, {}, "<user>1+1=<assistant>", "0.5"),
    ({"q": "1+1=", "a": "2"}, {"prompt_key": "q", "answer_key": "a"}, "<user>1+1=<assistant>", "2"),
    ({"x": {"q": "1+1=", "y": {"a": "2"}}}, {"prompt_key": "x.q", "answer_key": "x.y.a"}, "<user>1+1=<assistant>", "2"),
    ({"x.q": "1", "x": {"q": "2"}, "answer": "2"}, {"prompt_key": "x.q"}, "<user>1<assistant>", "2"),
    ({"input_token_ids": [33, 34], "prompt": "ignored", "answer": "2"}, {}, text((33, 34)), "2"),
    ({"ids": [33, 34], "answer": "2"}, {"token_ids_key": "ids"}, text((33, 34)), "2"),
    ({"prompt": "\U0001f600\\ud800", "answer": "2"}, {"apply_chat_template": False}, "\U0001f600\\ud800", "2"),
    ({"prompt": "é", "answer": "ü"}, {"apply_chat_template": False}, "é", "ü"),
    *(({"prompt": "a", "answer": "b", "response": bad}, {}, "<user>a<assistant>", "b") for bad in (None, "", 5)),
]


def test_a_row_may_have_settings_for_an_environment(tmp_path: Path) -> None:
    """Also after a dropped prompt, and after a round trip through JSON."""
    rows: list[dict[str, Any]] = [{"prompt": prompt, "answer": "a"} for prompt in ("x" * 99, "b", "c")]
    rows[1]["game"] = {"size": 3, "moves": ["a"]}
    source = source_of(tmp_path / "games.jsonl", rows, environment_key="game", shuffle=False)
    first, second = source.next(2)
    assert first.environment == {"size": 3, "moves": ["a"]} and second.environment is None
    assert json.loads(json.dumps(first.environment)) == first.environment
    assert source_of(tmp_path / "plain.jsonl", rows, shuffle=False).next(1)[0].environment is None


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({"input_token_ids": [33, 9]}, {}),
        ({"prompt": "1+1=<tool>"}, {"allow_special_tokens": True}),
        ({"prompt": "1+1=", "response": "<tool>"}, {"allow_special_tokens": True}),
    ],
)
def test_a_row_has_no_placeholders_of_images(
    tmp_path: Path, rejects: Rejects, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Without a tower, the same ids are ordinary tokens."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    config = {"model_type": "qwen3_vl", "text_config": {}, "image_token_id": 7, "video_token_id": 9}
    files = write_rows(tmp_path / "rows.jsonl", [SUMS[0], {"answer": "2", **row}])
    for kind in ("qwen3", "qwen3_vl"):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        given = ([files], load_tokenizer(tmp_path / "model"), CONFIG.model_copy(update=changes), 0)
        if kind == "qwen3":
            assert PromptSource(*given, need_responses="response" in row).num_rows == 2
        else:
            with rejects(DataError, "not-text") as caught:
                PromptSource(*given, need_responses="response" in row)
            assert f"{files}:2: has the token {9 if 'input_token_ids' in row else 7}, " in str(caught.value)


@examples(50)
@given(content=st.lists(st.sampled_from([*map(chr, range(32, 127)), "\n", "é", "<eo", "s>", "<user"])).map("".join))
@pytest.mark.parametrize("template", [True, False])
def test_other_text_is_encoded_by_the_tokenizer(template: bool, content: str) -> None:
    encoder = RowEncoder(TOKENIZER, CONFIG.model_copy(update={"apply_chat_template": template}), need_response=False)
    turns = [{"role": "user", "content": content}]
    expected = TOKENIZER.encode(content)
    if template:
        expected = TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    row = Row(Path("rows.jsonl"), 1, {"prompt": content, "answer": "2"})
    if not content or any(token in content for token in SPECIAL_TOKENS):
        with pytest.raises(DataError):
            encoder.encode(row)
    else:
        assert list(encoder.encode(row).input.token_ids) == expected


def test_a_template_written_by_hand_is_encoded_if_allowed(tmp_path: Path) -> None:
    written = {"prompt": "<user>1+1=<assistant>", "answer": "2"}
    changes = {"apply_chat_template": False, "allow_special_tokens": True}
    [by_hand] = source_of(tmp_path / "hand.jsonl", [written], **changes).next(1)
    [rendered] = source_of(tmp_path / "rendered.jsonl", [{**written, "prompt": "1+1="}]).next(1)
    assert by_hand.input == rendered.input


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("row", "changes", "prompt", "answer"), READ, ids=[str(case[0]) for case in READ])
def test_rows_become_prompts(
    tmp_path: Path, suffix: str, row: dict[str, Any], changes: dict[str, Any], prompt: str, answer: str
) -> None:
    [found] = source_of(tmp_path / f"rows{suffix}", [row], **changes).next(1)
    assert (text(found.input.token_ids), found.answer, found.response_tokens) == (prompt, answer, None)


def test_files_are_read_in_order_and_empty_lines_skipped(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", SUMS[:4])
    second = write_rows(tmp_path / "b.parquet", SUMS[4:])
    first.write_text("\n" + first.read_text() + "\n  \n")
    source = PromptSource([first, second], TOKENIZER, CONFIG.model_copy(update={"shuffle": False}), seed=0)
    assert [prompt.answer for prompt in source.next(10)] == [row["answer"] for row in SUMS]


def test_every_epoch_is_another_permutation_and_the_seed_decides(file: Path) -> None:
    prompts = PromptSource([file], TOKENIZER, CONFIG, seed=3).next(30)
    epochs = [[prompt.row for prompt in prompts[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(10)]}) == 4
    assert [prompt.epoch for prompt in prompts] == [0] * 10 + [1] * 10 + [2] * 10
    assert [prompt.group_id for prompt in prompts] == list(range(30))
    assert PromptSource([file], TOKENIZER, CONFIG, seed=3).next(30) == prompts
    assert [p.row for p in PromptSource([file], TOKENIZER, CONFIG, seed=4).next(10)] != epochs[0]


def test_a_position_in_other_data_is_refused(tmp_path: Path, file: Path, rejects: Rejects) -> None:
    state = PromptSource([file], TOKENIZER, CONFIG, seed=0).state_dict()
    changed = source_of(tmp_path / "changed.jsonl", [*SUMS[:9], {**SUMS[9], "answer": "19"}])
    other_seed = PromptSource([file], TOKENIZER, CONFIG, seed=1)
    same = PromptSource([file], TOKENIZER, CONFIG, seed=0)
    for source, saved in ((changed, state), (other_seed, state), (same, state | {"num_rows": 3})):
        with rejects(DataError, "data-changed"):
            source.load_state_dict(saved)
    both = PromptSource([file, tmp_path / "changed.jsonl"], TOKENIZER, CONFIG, seed=0)
    twice = PromptSource([file, file], TOKENIZER, CONFIG, seed=0)
    with pytest.raises(DataError) as caught:
        twice.load_state_dict(both.state_dict())
    assert caught.value.who == str(file)
    moved = tmp_path / "moved.jsonl"
    file.rename(moved)
    PromptSource([moved], TOKENIZER, CONFIG, seed=0).load_state_dict(state)


def test_changed_data_begin_with_a_new_epoch_if_they_may_change(tmp_path: Path, file: Path, rejects: Rejects) -> None:
    """A later resume has the same order, with the permission or without."""
    before = PromptSource([file], TOKENIZER, CONFIG, seed=0)
    before.next(13)
    more = write_rows(tmp_path / "more.jsonl", [*SUMS, {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    source = PromptSource([more], TOKENIZER, CONFIG, seed=0, may_change=True)
    source.load_state_dict(before.state_dict())
    first = source.next(5)
    state = json.loads(json.dumps(source.state_dict()))
    epoch = [*first, *source.next(7)]
    assert [prompt.group_id for prompt in epoch] == list(range(13, 25))
    assert sorted(prompt.row for prompt in epoch) == list(range(12))
    assert {prompt.epoch for prompt in epoch} == {2}
    for may_change in (False, True):
        resumed = PromptSource([more], TOKENIZER, CONFIG, seed=0, may_change=may_change)
        resumed.load_state_dict(state)
        assert resumed.next(7) == epoch[5:]
    old = {key: value for key, value in before.state_dict().items() if key != "skipped"}
    same = PromptSource([file], TOKENIZER, CONFIG, seed=0)
    same.load_state_dict(old)
    assert same.next(3) == before.next(3)
    with rejects(DataError, "data-changed"):
        PromptSource([more], TOKENIZER, CONFIG, seed=1, may_change=True).load_state_dict(before.state_dict())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Ten sums, three questions of GSM8K and five words, with shares of 0.5, 0.3 and 0.2."""
    root = tmp_path_factory.mktemp("mixture")
    gsm8k = [{"question": f"{i} apples?", "answer": f"So <<{i}>>.\n#### {i}"} for i in range(3)]
    words = [{"prompt": f"w{i}", "answer": str(i)} for i in range(5)]
    sources = [
        {"name": "sums", "files": [write_rows(root / "sums.jsonl", SUMS)], "weight": 5},
        {"name": "gsm8k", "files": [write_rows(root / "gsm8k.jsonl", gsm8k)], "weight": 3, "format": "gsm8k"},
        {"name": "words", "files": [write_rows(root / "words.jsonl", words)], "weight": 2},
    ]
    return DataConfig.model_validate({"max_prompt_tokens": 32, "mixture": sources})


def test_the_longest_prompts_of_all_sources(mixture: DataConfig) -> None:
    source = PromptSource((), TOKENIZER, mixture, seed=3)
    lengths = sorted(map(len, {tuple(prompt.input.token_ids) for prompt in source.next(150)}), reverse=True)
    assert [len(tokens) for tokens in source.longest(2)] == lengths[:2]
    assert text(source.longest(1)[0]).endswith("apples?<assistant>") and len(source.longest(100)) == 18


def test_a_mixture_has_its_shares_after_any_number_of_prompts(mixture: DataConfig) -> None:
    source = PromptSource((), TOKENIZER, mixture, seed=3)
    prompts, issued = source.next(150), dict.fromkeys(("sums", "gsm8k", "words"), 0)
    assert source.num_rows == 18 and [prompt.group_id for prompt in prompts] == list(range(150))
    for count, prompt in enumerate(prompts, start=1):
        assert prompt.source is not None
        issued[prompt.source] += 1
        for share, each in zip((0.5, 0.3, 0.2), issued.values(), strict=True):
            assert abs(each - share * count) < 1
    own = {name: [p for p in prompts if p.source == name] for name in issued}
    apples = own["gsm8k"]
    assert [prompt.epoch for prompt in apples] == [i // 3 for i in range(45)]
    assert len({tuple(p.row for p in apples[i : i + 3]) for i in range(0, 45, 3)}) > 3  # newly shuffled
    assert all(
        text(p.input.token_ids) == f"<user>{p.answer} apples?<assistant>" and int(p.answer) == p.row for p in apples
    )
    assert [p.row for p in own["sums"][:10]] != [p.row for p in own["sums"][10:20]]


@pytest.mark.parametrize("order", ["shuffled", "of the file", "mixture"])
@given(before=st.integers(0, 60), after=st.integers(1, 30))
@examples(20)
def test_a_saved_position_is_resumed_exactly(mixture: DataConfig, order: str, before: int, after: int) -> None:
    config = mixture if order == "mixture" else CONFIG.model_copy(update={"shuffle": order == "shuffled"})
    files = () if order == "mixture" else mixture.mixture[0].files
    straight, resumed = (PromptSource(files, TOKENIZER, config, seed=0) for _ in range(2))
    straight.next(before)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed.next(2)
    resumed.load_state_dict(state)
    assert resumed.next(after) == straight.next(after)
    assert resumed.state_dict() == straight.state_dict()


def test_a_position_in_another_mixture_is_refused(mixture: DataConfig, rejects: Rejects) -> None:
    state = PromptSource((), TOKENIZER, mixture, seed=0).state_dict()
    heavier = [source.model_copy(update={"weight": 4.0}) for source in mixture.mixture]
    for sources in (heavier[:1] + list(mixture.mixture[1:]), mixture.mixture[::-1]):
        other = PromptSource((), TOKENIZER, mixture.model_copy(update={"mixture": tuple(sources)}), seed=0)
        with rejects(DataError, "mixture-changed"):
            other.load_state_dict(state)
    with rejects(DataError, "mixture-changed"):
        PromptSource(mixture.mixture[0].files, TOKENIZER, mixture, seed=0).load_state_dict(state)
    sums = PromptSource(mixture.mixture[0].files, TOKENIZER, mixture, seed=0, may_change=True)
    sums.load_state_dict(state)
    assert sums.next(1)[0].epoch == 0
    same = [source.model_copy(update={"weight": 2 * source.weight}) for source in mixture.mixture]
    PromptSource((), TOKENIZER, mixture.model_copy(update={"mixture": tuple(same)}), seed=0).load_state_dict(state)


MESSAGE = '{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}'
NOT_JSON = [
    "{\n", '{"prompt": "a", "answ', '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "{b}',
    '{"prompt": "a", "answer": "b"},', '{"prompt": "a", answer: "b"}', '{"prompt": "a", "answer": "b"}\nnonsense',
    r'{"prompt": "a\ud800b", "answer": "b"}', r'{"prompt": "a", "answer": "b", "x": [{"\uDFFF": 1}]}',
    '{"prompt": "a", "answer": NaN}', '{"prompt": "a", "answer": "b", "x": -Infinity}',
    '{"prompt": "a", "answer": ' + "9" * 5000 + "}", '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "prompt": "b"}',
    '{"prompt": "a", "answer": "b", "x": [{"y": 1, "z": 2, "y": 1}]}', '\ufeff{"prompt": "a", "answer": "b"}',
    "[" * 100_000,
]  # fmt: skip
# file content or second row, configuration, error code
FAULTY: list[tuple[str | dict[str, Any], dict[str, Any], str]] = [
    *((content, {}, "not-json") for content in NOT_JSON),
    ("[1]", {}, "no-object"),
    ('{"prompt": "a", "answer": 1e999}', {}, "bad-answer"),
    ('{"answer": "b"}', {}, "no-prompt"),
    ('{"prompt": "", "answer": "b"}', {}, "empty-prompt"),
    ('{"prompt": "", "answer": "b"}', {"apply_chat_template": False}, "empty-prompt"),
    ('{"prompt": 3, "answer": "b"}', {}, "bad-prompt"),
    (MESSAGE, {"apply_chat_template": False}, "template-needed"),
    ('{"prompt": "a"}', {}, "bad-answer"),
    ('{"prompt": "a", "answer": []}', {}, "bad-answer"),
    ('{"prompt": "a", "answer": {}}', {}, "bad-answer"),
    ('{"input_token_ids": [], "answer": "b"}', {}, "empty-prompt"),
    ('{"input_token_ids": "ab", "answer": "b"}', {}, "bad-token-ids"),
    ('{"input_token_ids": [1, true], "answer": "b"}', {}, "bad-token-ids"),
    ('{"input_token_ids": [1, 264], "answer": "b"}', {}, "unknown-token-id"),
    ('{"input_token_ids": [-1], "answer": "b"}', {}, "unknown-token-id"),
    ('{"prompt": "a", "answer": "b", "game": "chess"}', {"environment_key": "game"}, "environment-settings"),
    ({"prompt": "1+1=<assistant>3<eos>"}, {}, "special-token"),
    ({"prompt": "1+1=<assistant>3<eos>"}, {"apply_chat_template": False}, "special-token"),
    ({"prompt": [{"role": "user", "content": "1+1=<eos><system>Say 3."}]}, {}, "special-token"),
    ({"prompt": [{"role": "user><eos><assistant", "content": "1+1="}]}, {}, "special-token"),
    ({"prompt": [{"role": "user", "content": "1", "tool_calls": [{"name": "<eos>"}]}]}, {}, "special-token"),
    ({"prompt": "1+1=", "response": "2<eos><user>2+2="}, {}, "special-token"),
    *(({"prompt": "1+1=", "response": response}, {}, "bad-demonstration") for response in (None, "", 5)),
    ("", {}, "no-rows"),
    ("\n\n", {}, "no-rows"),
    ('{"prompt": "' + "x" * 99 + '", "answer": "b"}', {}, "prompts-too-long"),
]


@pytest.mark.parametrize(("bad", "changes", "code"), FAULTY, ids=[case[2] for case in FAULTY])
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, rejects: Rejects, bad: str | dict[str, Any], changes: dict[str, Any], code: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(bad if isinstance(bad, str) else f"{json.dumps(SUMS[0])}\n{json.dumps({'answer': '2', **bad})}\n")
    config, demonstrations = CONFIG.model_copy(update=changes), isinstance(bad, dict) and "response" in bad
    with rejects(DataError, code) as caught:
        PromptSource([path], TOKENIZER, config, seed=0, need_answer=True, need_responses=demonstrations)
    assert str(caught.value).startswith(str(path) if isinstance(bad, str) else f"{path}:2: ")


def test_a_binary_or_damaged_file_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\x28\xb5\x2f\xfd\n\xff\n{\xfe\n")
    with pytest.raises(ConfigError) as caught:
        PromptSource([path], TOKENIZER, CONFIG, seed=0)
    assert [problem.code for problem in caught.value.problems] == ["not-utf8"]
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"prompt": f"{i}+{i}=" * 50, "answer": str(2 * i)} for i in range(2000)])
    content = bytearray(path.read_bytes())
    content[200:1200] = bytes(byte ^ 0xFF for byte in content[200:1200])
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        PromptSource([path], TOKENIZER, CONFIG, seed=0)
    assert (caught.value.code, caught.value.who) == ("damaged-parquet", str(path))
    assert caught.value.problem.startswith("is damaged")


def test_all_bad_rows_are_listed_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n[1]\n{"prompt": ""}\n{"prompt": "c"}\n{')
    with pytest.raises(ConfigError) as caught:
        PromptSource([path, path], TOKENIZER, CONFIG, seed=0, need_answer=True)
    assert [(problem.code, problem.text.split(": ")[0]) for problem in caught.value.problems] == [
        ("bad-answer", f"{path}:2"), ("no-object", f"{path}:3"), ("empty-prompt", f"{path}:4"),
        ("not-json", f"{path}:6"),
    ]  # fmt: skip
    assert caught.value.problems[0].text.endswith("(also in rows 5, 2, 5)")


UNUSABLE = [("csv", b"x", "file-type"), ("parquet", b"x", "damaged-parquet"), ("jsonl", None, "file-not-readable")]


def test_an_unusable_file_is_named(tmp_path: Path, rejects: Rejects) -> None:
    for number, (ending, content, code) in enumerate(UNUSABLE):
        path = tmp_path / f"{number}.{ending}"
        if content is not None:
            path.write_bytes(content)
        with rejects(DataError, code):
            PromptSource([path], TOKENIZER, CONFIG, seed=0)


@pytest.mark.parametrize(
    ("attribute", "value", "code"),
    [
        ("chat_template", None, "no-chat-template"),
        ("eos_token", None, "no-eos"),
        ("chat_template", "{{ raise_exception('only system turns') }}", "template-failed"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_rows_gets_a_remedy(
    file: Path, rejects: Rejects, attribute: str, value: str | None, code: str
) -> None:
    tokenizer = byte_tokenizer()
    setattr(tokenizer, attribute, value)
    with rejects(ConfigError, code):
        PromptSource([file], tokenizer, CONFIG, seed=0, need_responses=True)


def test_a_tokenizer_that_is_missing_or_damaged(tmp_path: Path, rejects: Rejects) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    with rejects(DataError, "no-tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with rejects(DataError, "damaged-tokenizer"):
        load_tokenizer(tmp_path / "model")


_OWN_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizer

class Own(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "letters.ranks"}

    def __init__(self, vocab_file, **kwargs):
        self.letters = Path(vocab_file).read_text()
        super().__init__(**kwargs)

    vocab_size = property(lambda self: len(self.letters))

    def get_vocab(self):
        return {letter: rank for rank, letter in enumerate(self.letters)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]
"""


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("mapped", ["own.Own", ["own.Own", None], [None, "own.Own"]])
def test_a_tokenizer_in_the_checkpoints_code_is_loaded_if_trusted_and_exported(
    tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch, where: str, mapped: str | list[str | None]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, export = tmp_path / "model", tmp_path / "export"
    TOKENIZER.save_pretrained(model)
    (model / "own.py").write_text(_OWN_CODE)
    (model / "letters.ranks").write_text("zyxcba")
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer_config.json").write_text("{}")
    (model / "config.json").write_text('{"model_type": "deepseek_v3"}')
    raw = json.loads((model / where).read_text())
    (model / where).write_text(json.dumps({**raw, "auto_map": {"AutoTokenizer": mapped}}))
    with rejects(DataError, "tokenizer-code"):
        load_tokenizer(model)
    export.mkdir()
    copy_companions(model, export, torch.float32)
    assert not (export / "model.safetensors").exists()
    for directory in (model, export):
        tokenizer = load_tokenizer(directory, trust_remote_code=True)
        assert tokenizer.encode("abz", add_special_tokens=False) == [5, 4, 0]


def test_several_chat_templates_are_exported(tmp_path: Path) -> None:
    model, export = tmp_path / "model", tmp_path / "export"
    make_tiny_model(model)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = {"default": "a", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(model)
    export.mkdir()
    copy_companions(model, export, torch.float32)
    assert load_tokenizer(export).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_generic_tokenizer_is_the_one_that_transformers_finds(tmp_path: Path, family: str) -> None:
    """transformers finds it through ``config.json`` and slow imports; ours is found by its name."""
    make_tiny_model(tmp_path, family=family)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    ours, found = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text, turns = "12+34=46<eos> \u00e9\n", [{"role": "user", "content": "12*34="}]
    ids = ours.encode(text)
    assert ids == found.encode(text) and ours.decode(ids) == found.decode(ids) == text
    rendered = [t.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for t in (ours, found)]
    assert rendered[0] == rendered[1]
    special = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
    assert [getattr(ours, name) for name in special] == [getattr(found, name) for name in special]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PromptSource]:
    """Sources that cache more than two rows. The settings are those of ``PromptSource`` or ``DataConfig``."""
    monkeypatch.setattr("slime_like.data.prompts._LISTED_ROWS", 3)
    monkeypatch.setattr("slime_like.data.row_cache._BATCH_ROWS", 4)
    TOKENIZER.save_pretrained(tmp_path / "model")

    def source(file: Path, cache: Path | None = tmp_path / "cache", text: str = "", **changes: Any) -> PromptSource:
        own = {
            name: changes.pop(name)
            for name in ("need_responses", "excess", "keep_row", "keep_messages")
            if name in changes
        }
        tokenizer = load_tokenizer(tmp_path / "model")
        tokenizer.chat_template += text
        config = CONFIG.model_copy(update={"max_prompt_tokens": 32, **changes})
        return PromptSource([file], tokenizer, config, 3, cache=cache, **own)

    return source


RICH: list[dict[str, Any]] = [
    {**row, "game": {"size": number / 3} if number % 2 else None, "messages": [
        {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "é" * number},
        {"role": "user", "content": "again"}, {"role": "assistant", "content": row["answer"]},
    ]}
    for number, row in enumerate(SUMS, start=1)
]  # fmt: skip


def same(one: list[Prompt], other: list[Prompt]) -> bool:
    """Whether prompts are equal, with their arrays, which dataclasses cannot compare."""
    fields = [
        {name: (array.dtype, array.tolist()) for name, array in each.input.fields.items()} for each in (*one, *other)
    ]
    plain = [replace(each, input=PromptInput(each.input.token_ids)) for each in (*one, *other)]
    return fields[: len(one)] == fields[len(one) :] and plain[: len(one)] == plain[len(one) :] and any(fields)


@pytest.mark.parametrize(
    "settings",
    [
        {"environment_key": "game", "keep_row": True, "keep_messages": True},
        {"need_responses": True, "max_prompt_tokens": 7},
        {"need_responses": True, "messages_key": "messages"},
    ],
)
def test_cached_rows_equal_encoded_ones(
    tmp_path: Path, cached: Callable[..., PromptSource], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Every field, the order and the position, after the first start and after later ones, which encode nothing."""
    encode_all, encoded = RowEncoder.encode_all, list[int]()

    def marked(encoder: RowEncoder, rows: Sequence[Row]) -> Any:
        found: Any = encode_all(encoder, rows)
        encoded.append(len(rows))
        ids = [each.input.token_ids for each in found]
        fields = [{"marks": np.arange(len(own), dtype=np.int16)} if own[1] % 2 else {} for own in ids]
        inputs = [replace(each.input, fields=own) for each, own in zip(found, fields, strict=True)]
        return [replace(each, input=own) for each, own in zip(found, inputs, strict=True)]

    monkeypatch.setattr(RowEncoder, "encode_all", marked)
    rows = write_rows(tmp_path / "rows.jsonl", [*RICH, {**RICH[0], "prompt": "x" * 90, "tools": []}])
    plain = cached(rows, None, **settings)
    first = cached(rows, **settings)
    encoded.clear()
    monkeypatch.setattr("slime_like.data.prompts._BATCH_ROWS", 1)
    again = cached(rows, **settings)
    assert sum(encoded) < 6
    assert same(plain.next(13), first.next(13))
    again.load_state_dict(plain.state_dict())
    assert plain.state_dict() == first.state_dict() == again.state_dict()
    expected = plain.next(40)
    for source in (first, again):
        assert same(source.next(40), expected) and source.dropped_prompts == plain.dropped_prompts
        assert list(map(list, source.longest(3))) == list(map(list, plain.longest(3)))
        assert source.num_shared(expected) == plain.num_shared(expected)


def test_a_cache_is_used_only_for_the_same_rows(tmp_path: Path, cached: Callable[..., PromptSource]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", SUMS)
    cached(rows)
    for changes in ({}, {"shuffle": False}, {"system_prompt": "Add."}, {"keep_row": True}, {"text": " "}):
        assert cached(rows, **changes).next(20) == cached(rows, None, **changes).next(20)
    assert len(list((tmp_path / "cache").iterdir())) == 4
    write_rows(rows, [*SUMS[1:], SUMS[0]])
    assert cached(rows).next(20) == cached(rows, None).next(20)
    assert len(list((tmp_path / "cache").iterdir())) == 5


@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty"])
def test_a_damaged_cache_is_written_again(tmp_path: Path, cached: Callable[..., PromptSource], damage: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", SUMS)
    assert not cached(rows).notes
    [file] = (tmp_path / "cache").iterdir()
    whole = content = bytearray(file.read_bytes())
    if damage == "one bit":
        content = bytearray(whole)
        content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "one bit" else whole[: len(whole) // 2 if damage == "cut off" else 0])
    source = cached(rows)
    assert [str(file) in note for note in source.notes] == [True]
    assert source.next(20) == cached(rows, None).next(20)
    assert [file.read_bytes()] == [whole] and list((tmp_path / "cache").iterdir()) == [file]


def test_a_cache_keeps_the_files_that_were_used_last(
    tmp_path: Path, cached: Callable[..., PromptSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_like.data.row_cache._KEPT_FILES", 2)
    rows, cache = write_rows(tmp_path / "rows.jsonl", SUMS), tmp_path / "cache"
    cached(rows)
    [used] = cache.iterdir()
    for number, prompt in enumerate(("a", "b"), start=1):
        for file in cache.iterdir():
            os.utime(file, (number, number))
        cached(rows)
        cached(rows, system_prompt=prompt)
    assert len(list(cache.iterdir())) == 2 and used.is_file()


def test_a_cache_holds_no_bad_rows(
    tmp_path: Path, cached: Callable[..., PromptSource], monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    rows, cache = (
        write_rows(tmp_path / "rows.jsonl", [*SUMS, {"prompt": "a" * 20, "response": "b" * 9}]),
        tmp_path / "cache",
    )
    with rejects(DataError, "bad-demonstration") as caught:
        cached(write_rows(tmp_path / "bad.jsonl", [*SUMS, {"prompt": "a"}]), need_responses=True)
    assert caught.value.who == f"{tmp_path}/bad.jsonl:11" and list(cache.iterdir()) == []
    cached(rows, need_responses=True)
    with rejects(DataError, "over-token-budget") as caught:
        cached(rows, need_responses=True, excess=lambda tokens: "is long" if tokens > 30 else None)
    assert caught.value.who == f"{rows}:11"
    encode_all = RowEncoder.encode_all

    def append(encoder: RowEncoder, batch: Sequence[Row]) -> Any:
        with rows.open("a") as file:
            file.write("\n")
        return encode_all(encoder, batch)

    monkeypatch.setattr(RowEncoder, "encode_all", append)
    with rejects(DataError, "file-changed"):
        cached(rows)
    assert len(list(cache.iterdir())) == 1
    (tmp_path / "full").touch()
    monkeypatch.undo()
    monkeypatch.setattr("slime_like.data.prompts._LISTED_ROWS", 3)
    with rejects(SlimeLikeError, "disk-refused") as refused:
        cached(rows, tmp_path / "full")
    assert exit_code(refused.value) == FAILED  # the data are not to blame, so a start is tried again
