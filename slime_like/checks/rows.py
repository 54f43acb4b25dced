"""Data files and their rows. Only rows that are rejected anyway are read: a run reads its rows with the tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from slime_like.checks.directories import missing
from slime_like.config.run import DataConfig, RunConfig
from slime_like.data.encoding import RowEncoder
from slime_like.data.formats import held_out_settings, in_format
from slime_like.data.messages import read_conversation
from slime_like.data.rows import SUFFIXES, BadRows, Row, data_files, read_rows
from slime_like.data.tokenizer import missing_tokenizer
from slime_like.errors import DataError
from slime_like.interfaces.environment import Task
from slime_like.sandbox.rewards.pool import RewardItem

_MAX_ROWS = 20_000
"""Of each file: a second."""


def tokenizer_problems(config: RunConfig) -> Iterator[str]:
    is_checkpoint = (config.model.path / "config.json").is_file()
    if is_checkpoint and (problem := missing_tokenizer(config.model.path)):
        yield problem


def training_row_problems(config: RunConfig) -> Iterator[str]:
    if config.debug.load_rollouts is None:
        for part in config.data.parts:
            yield from _bad_rows(part, part.train, config.supervised)


def conversation_problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.messages_key is None:
        return
    field = f"data.messages_key={data.messages_key}"
    if not config.supervised:
        yield f"{field}: conversations are demonstrations; set algorithm.loss: sft, or remove it"
    if data.response_key != type(data).model_fields["response_key"].default:
        yield f"{field} and data.response_key={data.response_key}: a run takes one kind of demonstration; remove one"
    if not data.apply_chat_template:
        yield f"{field} needs the chat template; set data.apply_chat_template: true"


def prompt_problems(config: RunConfig) -> Iterator[str]:
    """A system prompt, or a format, that nothing would use."""
    data, supervised = config.data, config.supervised and config.data.messages_key is not None
    if data.system_prompt is not None and not data.apply_chat_template:
        yield "data.system_prompt needs the chat template; set data.apply_chat_template: true, or remove it"
    for name, is_set in (("system_prompt", data.system_prompt is not None), ("format", data.format != "keys")):
        if supervised and is_set:
            yield f"data.{name} is for prompts, and data.messages_key is set, whose rows are conversations; remove one"


def held_out_row_problems(config: RunConfig) -> Iterator[str]:
    for file in config.evaluation.files:
        if list(_file_problems("", [file])):
            continue
        try:
            data = held_out_settings(config.data, file)
        except DataError as error:
            yield str(error)
        else:
            yield from _bad_rows(data, [file], need_response=False)


def _bad_rows(data: DataConfig, files: Sequence[Path], need_response: bool) -> Iterator[str]:
    if not files or list(_file_problems("", files)):
        return
    key, bad, found = data.messages_key, BadRows(), False
    encoder = RowEncoder(_AnyTokenizer(), data, need_response)
    for file in files:
        with bad.collect():
            for row in islice(read_rows(file, bad), _MAX_ROWS):
                found = True
                with bad.collect():
                    encoder.encode(row) if key is None or not need_response else read_conversation(row, key)
    yield from map(str, bad.problems())
    if not found and not bad:
        yield f"{', '.join(map(str, files))}: no rows; give a file with rows"


def sources_of(config: RunConfig) -> list[tuple[str, DataConfig]]:
    """The mixture's sources by name, or all data."""
    names = [f"source {source.name}" for source in config.data.mixture] or ["the data"]
    return list(zip(names, config.data.parts, strict=True))


def first_samples(config: RunConfig, most: int, most_of_source: int) -> list[tuple[str, list[RewardItem]]]:
    """By source of the mixture: one may be right where another's key or format is wrong."""
    if not config.data.mixture:
        return [("the data", list(islice(answered_samples(config), most)))]
    return [(source, list(islice(samples_of(part), most_of_source))) for source, part in sources_of(config)]


def answered_samples(config: RunConfig) -> Iterator[RewardItem]:
    """Rows of all training and held-out files."""
    for data in (*config.data.parts, *_held_out_parts(config)):
        yield from samples_of(data)


def samples_of(data: DataConfig) -> Iterator[RewardItem]:
    """Text of each row of ``data.train`` (of chat messages, their contents), with its answer as the response; of a
    file, up to the first row that cannot be read."""
    encoder = RowEncoder(_AnyTokenizer(), data, need_response=False)
    for file in data.train:
        with suppress(DataError):
            for row in read_rows(file):
                answer = encoder.encode(row).answer
                yield RewardItem(_prompt_text(row, data), answer, answer)


def _held_out_parts(config: RunConfig) -> Iterator[DataConfig]:
    for file in config.evaluation.files:
        with suppress(DataError):
            yield held_out_settings(config.data, file).model_copy(update={"train": (file,)})


def first_task(config: RunConfig) -> Task | None:
    """What an environment is reset with for the first row, with the row's text as the prompt's."""
    data = config.data.parts[0]
    encoder = RowEncoder(_AnyTokenizer(), data, need_response=False)
    for file in data.train or config.evaluation.files:
        with suppress(DataError):
            for row in read_rows(file):
                encoded = encoder.encode(row)
                return Task(_prompt_text(row, data), encoded.answer, encoded.environment or {})
    return None


def _prompt_text(row: Row, data: DataConfig) -> str:
    """The prompt; of chat messages, their contents."""
    prompt = in_format(row, data).get(data.prompt_key) or ""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


class _AnyTokenizer:
    """Takes whatever only a model's own tokenizer could refuse."""

    chat_template = ""
    eos_token_id = 0
    all_special_tokens = ()
    added_tokens_decoder: Mapping[int, Any] = {}

    def __len__(self) -> int:
        return 2**31

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        return ""


def training_file_problems(config: RunConfig) -> Iterator[str]:
    if not config.data.training_files and not config.debug.load_rollouts:
        yield "data.train=[] is empty; give at least one .jsonl or .parquet file, or sources in data.mixture"
    yield from _file_problems("data.train", config.data.train)


def source_file_problems(config: RunConfig) -> Iterator[str]:
    for number, source in enumerate(config.data.mixture):
        yield from _file_problems(f"data.mixture.{number}.files", source.files)


def mixture_problems(config: RunConfig) -> Iterator[str]:
    names = [source.name for source in config.data.mixture]
    if names and config.data.train:
        yield "data.train and data.mixture are both set; name the files of data.train as a source, or remove one"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.mixture: several sources are named {name}; give each another name"


def held_out_file_problems(config: RunConfig) -> Iterator[str]:
    return _file_problems("evaluation.files", config.evaluation.files)


def _file_problems(field: str, files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        try:
            found = data_files(path)
        except DataError as error:
            yield f"{field}={error}"
            continue
        yield from _unusable(field, found)


def _unusable(field: str, files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        if not file.suffix and not file.exists():
            yield f"{field}={file} {missing(file)}; give an existing file, directory or pattern"
        elif file.suffix not in SUFFIXES:
            yield (
                f"{field}={file} is of an unknown type; give {' or '.join(SUFFIXES)} files (of a dataset, "
                "`datasets.load_dataset(...)[split].to_json('train.jsonl')` writes one)"
            )
        elif not file.is_file():
            yield f"{field}={file} {missing(file)}; give an existing file"
