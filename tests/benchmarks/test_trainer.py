"""The trainer's benchmark: what it counts, and that both forms of Hugging Face's model compute the same step.

Not covered: times, CUDA, and the trainers themselves, whose gradient norm the table shows beside Hugging Face's.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.trainer.batch import full_packs, padded_batches, quickstart_packs
from benchmarks.trainer.measure import _deliver
from benchmarks.trainer.sides import HuggingFaceSide
from benchmarks.trainer.work import step_flops
from slime_like.algorithms.packing.pack import pack_sequences, unpack_sequences
from slime_like.errors import TrainerError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.dimensions import ModelDimensions

TOKENS = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=264)
    return directory


def test_packs_are_full_and_lose_nothing_when_padded() -> None:
    packs = full_packs(TOKENS, 3, 264)
    assert [(pack.packed_seq_len, pack.actual_total_tokens) for pack in packs] == [(TOKENS, TOKENS)] * 3
    assert all(pack.num_sequences >= 4 for pack in packs)
    sequences = [sequence for pack in packs for sequence in unpack_sequences(pack)]
    batches = padded_batches(sequences, TOKENS)
    assert sum(len(batch.tokens) for batch in batches) == len(sequences)
    assert all(batch.tokens.numel() <= TOKENS for batch in batches) and len(batches) > len(packs)
    targets = torch.cat([sequence.response_tokens for sequence in sequences])
    assert torch.equal(torch.cat([batch.targets for batch in batches]), targets)
    assert all(torch.equal(batch.tokens.flatten()[batch.rows + 1], batch.targets) for batch in batches)
    assert len(quickstart_packs()) == 1


def test_flops_are_those_that_torch_counts(model: Path) -> None:
    """Of Hugging Face's model with eager attention, which computes all of L x L: what causality spares is added."""
    pack = full_packs(TOKENS, 1, 264)[0]
    dimensions = ModelDimensions.from_checkpoint(model)
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        for sequence in unpack_sequences(pack):
            tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
            rows = torch.arange(sequence.prompt_len - 1, sequence.total_len - 1)
            network(input_ids=tokens[None], logits_to_keep=rows, use_cache=False).logits.sum().backward()
    lengths = pack.cu_seqlens.diff().double()
    spared = 6.0 * dimensions.num_layers * dimensions.num_heads * dimensions.head_dim * float((lengths**2).sum())
    assert counter.get_total_flops() == pytest.approx(step_flops(dimensions, [pack]) + spared, rel=2e-3)


def test_packed_and_padded_are_the_same_step(model: Path) -> None:
    """Logprobs are those of unpacked sequences in float64; so gradients of both have the same norm."""
    packs = full_packs(TOKENS, 2, 264)
    sequences = [sequence for pack in packs for sequence in unpack_sequences(pack)]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    expected = []
    with torch.no_grad():
        for sequence in sequences:
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


def test_main_weights_are_updated_in_float32(model: Path) -> None:
    """A step of 1e-6 is less than bfloat16 shows; many of them are not."""
    pack = pack_sequences(unpack_sequences(full_packs(TOKENS, 1, 264)[0])[:2])
    side = HuggingFaceSide(model, torch.bfloat16, [pack], padded=False, budget=TOKENS, recompute=False)
    before = [main.clone() for main in side._main]
    side.forward_backward()
    side.update()
    changes = [float((main - old).abs().max()) for main, old in zip(side._main, before, strict=True)]
    assert all(main.dtype == torch.float32 for main in side._main)
    assert max(changes) == pytest.approx(1e-6, rel=0.05)


def test_memory_that_ran_out_is_known_behind_a_trainers_sentence() -> None:
    results: list[object] = []
    queue = SimpleNamespace(put=results.append)
    _deliver(queue, _run_out_of_memory)
    _deliver(queue, lambda: 3)
    assert results == [None, 3]
    with pytest.raises(TrainerError) as caught:
        _deliver(queue, _fail)
    assert caught.value.code == "loss-not-finite"


def _run_out_of_memory() -> None:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError as error:
        raise TrainerError("rank 0, accumulate: OutOfMemoryError") from error


def _fail() -> None:
    raise TrainerError("the loss is not finite", code="loss-not-finite")
