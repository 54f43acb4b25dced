"""Texts that end a response as soon as its tokens spell them. Conformance covers ids and EOS."""

import random

import pytest

from rollout.requests import StopTexts
from rollout.transformers.samples import Sample
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces import SamplingParams
from tests.unit.agents.histories import PLAIN, tokenizer

TOKENIZERS = {"bytes": byte_tokenizer(), "merges": tokenizer(PLAIN)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("stop", ["a", "</a>", "日本", "\n\n", "<eos>", "é!"])
def test_the_first_token_that_completes_a_text_ends_the_response(kind: str, stop: str) -> None:
    """Compared with a search in the whole text, after every token."""
    draw, used = random.Random(3), TOKENIZERS[kind]
    texts = StopTexts(used)
    pieces = [*stop, stop[1:], stop[:-1], "x", "日", " ", stop]
    ended = 0
    for _ in range(25):
        written = "".join(draw.choices(pieces, k=12))
        tokens = used.encode(written, add_special_tokens=False)
        sampling = SamplingParams(stop=("not this", stop), max_new_tokens=len(tokens))
        sample = Sample([1], sampling, frozenset(), random.Random(0), stop_texts=texts)
        while sample.finish_reason is None:
            sample.append(tokens[len(sample.token_ids)], -1.0, 0)
        whole = (end for end in range(1, len(tokens) + 1) if stop in used.decode(tokens[:end]))
        end = next(whole, None)
        assert (len(sample.token_ids), sample.finish_reason) == ((end, "stop") if end else (len(tokens), "length"))
        ended += end is not None
    assert ended > 0
