"""Show what works with published chat templates: ``python -m benchmarks.templates [--folder DIR] [--result FILE]``.

The templates are the ``*.jinja`` files of TRL (extra ``bench``) or of a folder. Each gets a tokenizer of bytes with the
special tokens that the template names. Columns:

- tools: a tool's description is in the prompt.
- form: calls are read back in the form of this name.
- thinking: a turn with thinking is read back as thinking and an answer.
- turns: after a turn, an observation is what the template writes for it, and the turn ends once.
- spans: in a conversation of two exchanges, both answers carry loss, and no question does.
"""

import argparse
import datetime
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from slime_like.agents import responses
from slime_like.agents.messages import Message
from slime_like.agents.rendering import ChatFormat
from slime_like.data.messages import read_conversation
from slime_like.data.rows import Row
from slime_like.data.spans import ConversationEncoder, SpanFault
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.models.special_tokens import special_token_pattern
from slime_like.sandbox.environments.observations import ObservationEncoder

YES, NO_SUPPORT = "yes", "-"
_MARK = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^<>]+?\uff5c>|<\|[a-z_\"]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|<(?:start|end)_of_\w+>"
)
_STOPS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "diffusion_gemma": "<|tool_response> <turn|>", "gemma4": "<|tool_response> <turn|>", "gemma": "<end_of_turn>",
    "glm": "<|observation|> <|user|>",
    "gptoss": "<|call|> <|return|>", "harmony": "<|call|> <|return|>", "idefics": "<end_of_utterance>",
    "llama": "<|eot_id|>", "llava": "</s>", "mistral": "</s>", "muse": "<|eot|>", "phi": "<|end|>",
    "smolvlm": "<end_of_utterance>", "": "<|im_end|>",
}  # fmt: skip
"""Stop tokens of the families' published generation configurations, by the start of the name."""

_ASKED = {"role": "user", "content": "2+2?"}
_SAID = {"role": "assistant", "content": "so"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "environment", "arguments": {"k": 1}}}
_SEEN = {"role": "tool", "content": "seen"}
_NAMED = {**_SEEN, "name": "environment", "tool_call_id": "abcdefghi"}
_TALKS: Sequence[Sequence[Any]] = (
    [_SAID, _SEEN],
    [{**_SAID, "content": "", "tool_calls": [_CALL]}, _NAMED],
    [_SAID, {**_SEEN, "role": "user"}],
)


def tools(tokenizer: Any, stops: Sequence[str]) -> str:
    return YES if ChatFormat(tokenizer).renders_tools else NO_SUPPORT


def form(tokenizer: Any, stops: Sequence[str]) -> str:
    if not ChatFormat(tokenizer).renders_tools:
        return NO_SUPPORT
    forms = yaml.safe_load(Path(responses.__file__).with_name("response_forms.yaml").read_text("utf-8"))["forms"]
    found = responses.response_form(tokenizer)
    return next(name for name, each in forms.items() if each == found.template) if found.has_calls else "no call fits"


def thinking(tokenizer: Any, stops: Sequence[str]) -> str:
    template, chat, asked = tokenizer.chat_template, ChatFormat(tokenizer), Message("user", "2+2?")
    if not re.search(r"reasoning|thinking|<think>|analysis", template):
        return NO_SUPPORT
    prompt = chat.render([asked], []).text
    whole = chat.render([asked, Message("assistant", "4", reasoning="so why")], [], next_turn=False).text
    prompt = prompt[: next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))]
    opened, closed = ("<|channel>thought", "<channel|>") if "<channel|>" in template else ("<think>", "</think>")
    turn = whole[len(prompt) :] if "so why" in whole else f"{opened}\nso why\n{closed}\n\n4"  # as a model writes it
    turn = re.sub(rf"(?:{special_token_pattern(tokenizer).pattern})?\s*\Z", "", turn)
    read = responses.response_form(tokenizer).message(prompt, turn, [])
    found = read.reasoning.strip(), read.content.strip()
    return YES if found == ("so why", "4") else f"read as {found}"


def turns(tokenizer: Any, stops: Sequence[str]) -> str:
    encoder, between = ObservationEncoder(tokenizer, None, 99), ""
    for stop in stops:
        token = tokenizer.convert_tokens_to_ids(stop)
        between = tokenizer.decode(encoder.encode("seen", token)[0], clean_up_tokenization_spaces=False)
        for talk in _TALKS:
            try:
                whole = tokenizer.apply_chat_template([_ASKED, *talk], tokenize=False, add_generation_prompt=True)
            except Exception:  # templates are programs of the checkpoint and can raise anything
                continue
            if whole.endswith(stop + between) and not whole.endswith(stop * 2 + between):
                return YES
    return f"another text: {between!r}"


def spans(tokenizer: Any, stops: Sequence[str]) -> str:
    talk = [_ASKED, {**_SAID, "content": "4"}, {"role": "user", "content": "and 1?"}, {**_SAID, "content": "5"}]
    encoder = ConversationEncoder(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)))
    rows = encoder.encode(*read_conversation(Row(Path("row"), 1, {"messages": talk}), "messages"))
    special = special_token_pattern(tokenizer)
    trained = [special.sub("", tokenizer.decode(ids[a:b])).strip() for ids, ranges in rows for a, b in ranges]
    return YES if [text[-1:] for text in trained] == ["4", "5"] and "?" not in "".join(trained) else f"trains {trained}"


def cell(check: Callable[[Any, Sequence[str]], str], file: Path) -> str:
    tokenizer, text = byte_tokenizer(), file.read_text("utf-8")
    stops = next(stops for name, stops in _STOPS.items() if file.stem.startswith(name)).split()
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys([*_MARK.findall(text), *stops]))})
    tokenizer.eos_token, tokenizer.chat_template = stops[-1], text
    try:
        found = check(tokenizer, stops)
    except (SpanFault, ConfigError) as error:
        found = str(error).partition("; ")[0]
    return found.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of *.jinja files; default: TRL's")
    parser.add_argument("--result", type=Path)
    options, trl = parser.parse_args(), importlib.util.find_spec("trl")
    folder = options.folder or (Path(str(trl.origin)).with_name("chat_templates") if trl else None)
    if folder is None:
        parser.error("TRL is missing; install the extra bench, or give --folder")
    files = [file for file in sorted(folder.glob("*.jinja")) if not file.stem.endswith("_training")]
    columns = {check.__name__: [cell(check, file) for file in files] for check in (tools, form, thinking, turns, spans)}
    shares = []
    for cells in columns.values():
        supported = [one for one in cells if one != NO_SUPPORT]
        right = sum(" " not in one for one in supported)
        shares.append(f"{right} of {len(supported)}, {right / max(1, len(supported)):.0%}")
    rows = zip([file.stem for file in files], *columns.values(), strict=True)
    lines = [("template", *columns), ["---"] * (1 + len(columns)), *rows, ("yes, if supported", *shares)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    print(text)
    if options.result:
        said = f"Published chat templates, {datetime.date.today()}, `python -m benchmarks.templates`."
        said += "\n`-`: not supported by the template. `no call fits`: it renders tools, but no calls."
        said += (
            "\nThe templates of idefics3, llava_next and smolvlm, which are vision models, read only lists of parts."
        )
        options.result.write_text(f"{said}\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
