"""The trainer's benchmark counts FLOPs like torch, and both forms of Hugging Face's model compute the same step."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.trainer.batch import full_packs
from benchmarks.trainer.sides import HuggingFaceSide
from benchmarks.trainer.work import step_flops
from slime_like.algorithms.packing.pack import unpack_sequences
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.dimensions import ModelDimensions

TOKENS = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=264)
    return directory


def test_flops_match_torchs_count(model: Path) -> None:
    """Hugging Face's eager attention computes all of L x L, so the half that causality saves is added."""
    pack = full_packs(TOKENS, 1, 264)[0]
    dimensions = ModelDimensions.from_checkpoint(model)
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        for sequence in unpack_sequences(pack):
            tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
            rows = torch.arange(sequence.prompt_len - 1, sequence.total_len - 1)
            network(input_ids=tokens[None], logits_to_keep=rows, use_cache=False).logits.sum().backward()
    lengths = pack.cu_seqlens.diff().double()
    saved = 6.0 * dimensions.num_layers * dimensions.num_heads * dimensions.head_dim * float((lengths**2).sum())
    assert counter.get_total_flops() == pytest.approx(step_flops(dimensions, [pack]) + saved, rel=2e-3)


def test_packed_and_padded_are_the_same_step(model: Path) -> None:
    """Logprobs match unpacked sequences in float64, and gradients of both forms have the same norm."""
    packs = full_packs(TOKENS, 2, 264)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    expected = []
    with torch.no_grad():
        for sequence in (sequence for pack in packs for sequence in unpack_sequences(pack)):
            tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
            logits = reference(input_ids=tokens[None]).logits[0, sequence.prompt_len - 1 : -1]
            expected.append(logits.log_softmax(-1).gather(1, sequence.response_tokens[:, None]).squeeze(1))
    norms = []
    for padded in (False, True):
        side = HuggingFaceSide(model, torch.float32, packs, padded=padded, budget=TOKENS, recompute=padded)
        torch.testing.assert_close(side.logprobs().double(), torch.cat(expected), rtol=0, atol=1e-5)
        side.forward_backward()
        norms.append(side.update())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0
