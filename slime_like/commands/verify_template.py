"""``slime-like verify template``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime_like.commands.command import Command, at_least_one, given_path
from slime_like.data.rows import Row, read_rows
from slime_like.errors import ConfigError, DataError

_FAILS = 1


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=given_path, metavar="MODEL", help="Hugging Face directory; weights are not read")
    add("--data", type=given_path, metavar="FILE", help="show what carries loss in a row of this file")
    add("--row", type=at_least_one, metavar="N", help="line of the file, or row of a Parquet file (default: 1)")
    add("--messages_key", default="messages", metavar="KEY", help="row key of the messages (default: %(default)s)")
    add(
        "--stop_token_ids",
        type=int,
        nargs="+",
        default=(),
        metavar="ID",
        help="as rollout.stop_token_ids (default: the model's EOS tokens)",
    )
    add("--histories", type=at_least_one, default=100, metavar="N", help="random histories (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the histories (default: %(default)s)")


def _run(options: argparse.Namespace, _: list[str]) -> int:
    if options.row is not None and options.data is None:
        raise ConfigError("--row needs --data; give the file", code="row-without-data")
    row = None if options.data is None else _row(options.data, options.row or 1)
    from slime_like.data.encoding import require_text
    from slime_like.data.messages import read_conversation
    from slime_like.data.spans import ConversationEncoder, SpanFault
    from slime_like.data.tokenizer import load_tokenizer
    from slime_like.models.special_tokens import special_token_pattern
    from slime_like.verification.template.report import print_conversation, print_verdicts, sample
    from slime_like.verification.template.verify import verify_template

    conversation = None if row is None else read_conversation(row, options.messages_key)
    tokenizer = load_tokenizer(options.model)
    if row is not None:
        require_text(row, options.messages_key, [*(conversation or ())], special_token_pattern(tokenizer))
    stops = options.stop_token_ids or _stop_token_ids(options.model, len(tokenizer))
    try:
        encoder = ConversationEncoder(tokenizer, stops)
    except SpanFault as fault:
        raise DataError(fault.problem, code=fault.code, who=str(options.model), remedy=fault.remedy) from fault
    verdicts = verify_template(encoder, tokenizer, options.seed, options.histories)
    print_verdicts(f"Chat template of {options.model} ({options.histories} random histories)", verdicts)
    name = "a sample" if row is None else f"{row.path}:{row.line}"
    try:
        print_conversation(name, sample(encoder) if conversation is None else encoder.encode(*conversation))
    except SpanFault as fault:
        print(f"{name}: {fault.problem}; {fault.remedy} [{fault.code}]")
        return _FAILS
    return _FAILS if any(verdict.is_fatal for verdict in verdicts) else 0


def _row(file: Path, line: int) -> Row:
    row = next((row for row in read_rows(file) if row.line >= line), None)
    if row is None or row.line != line:
        raise DataError("there is no such row", code="no-row", who=f"{file}:{line}", remedy="give the line of a row")
    return row


def _stop_token_ids(model: Path, vocab_size: int) -> Sequence[int]:
    """EOS ids of the checkpoint's files; none where these name none."""
    from slime_like.models.config_json import eos_ids, read_object

    config = model / "config.json"
    try:
        return eos_ids(read_object(config) if config.is_file() else {}, model, vocab_size)
    except ValueError as error:
        raise DataError(
            str(error), code="bad-eos", who=str(model), remedy="correct it, or give --stop_token_ids"
        ) from error


COMMAND = Command(
    "verify template",
    "judge a model's chat template, and show what would carry loss",
    _run,
    "Try the chat template on random histories: is history rendered as it was sampled, do stop tokens end\n"
    "answers, are the spans that carry loss found? A failed property comes with its smallest history. Then show\n"
    "what carries loss in a sample, or in a row of a file. Exit code 0: everything needed for supervised\n"
    "conversations and for agents that go on from sampled tokens holds; 1: not.",
    _add_arguments,
    takes_flags=False,
)
