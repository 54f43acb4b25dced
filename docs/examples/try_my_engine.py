"""Update the engine's weights as a trainer would, and compare its samples with that model."""

import asyncio
import tempfile
import uuid
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_like.config import ModelConfig, RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import GenerationRequest, Manifest, PromptInput, SamplingParams, WeightBucket, load_engine
from slime_like.weights.transports.registry import open_sender


async def main(root: Path) -> None:
    for seed in (0, 1):
        make_tiny_model(root / f"model{seed}", seed=seed)
    config = RunConfig(run_dir=root, model=ModelConfig(path=root / "model0", dtype="float32"))
    engine = load_engine("plain")(config, 0)
    await engine.start()

    # Send it the weights of the other model, as the trainer would.
    sender = open_sender("shared_memory", f"try-{uuid.uuid4().hex}")
    await engine.connect("shared_memory", sender.rendezvous())
    weights = load_file(root / "model1" / "model.safetensors")
    await engine.begin_update(1, Manifest.of(weights))
    bucket = sender.send(WeightBucket(list(weights.items())))
    await engine.update(bucket)
    receipt = await engine.finish_update(1)
    sender.close()
    assert receipt.checksums == {entry.name: entry.checksum for entry in bucket.entries}

    # Its samples now have the logprobs of that model.
    request = GenerationRequest("r", PromptInput([9, 8, 7]), SamplingParams(temperature=0.7, max_new_tokens=5))
    (sample,) = await engine.generate(request)
    model = AutoModelForCausalLM.from_pretrained(root / "model1", dtype=torch.float32)
    ids = torch.tensor([9, 8, 7, *sample.token_ids])
    expected = (model(ids[None]).logits[0, 2:-1] / 0.7).log_softmax(-1).gather(1, ids[3:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected.detach(), rtol=0, atol=1e-5)
    assert (sample.weight_versions == 1).all()
    await engine.stop()


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
