"""Measure how many bfloat16 weights an AdamW step changes, and the savings of sending only those.

A small Qwen3 is trained on sums, first at a rate at which it learns, so that weights and moments are realistic, then at
the rates of RL fine-tuning. Every sync is received, and its tensors are compared bit by bit with the sent ones.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.weights.model import buckets_of
from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from slime_like.weights.transport import TransportSettings
from slime_like.weights.transports.registry import open_receiver, open_sender

RATES = (1e-6, 1e-5)
_SIZES = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 4, "num_attention_heads": 6}
_WARM_STEPS, STEPS = 60, 10
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Changes:
    """One step at ``rate``: share of changed elements, bytes sent, and bytes of a whole sync."""

    rate: float
    step: int
    changed_fraction: float
    wire_nbytes: int
    nbytes: int

    @property
    def ratio(self) -> float:
        return self.nbytes / self.wire_nbytes


def measure(scratch: Path) -> tuple[int, list[Changes]]:
    """Return the number of parameters, and a row per rate and step."""
    torch.set_num_threads(1)
    make_tiny_model(scratch / "model", family="qwen3", seed=0, **_SIZES)
    make_arithmetic_data(scratch / "data", seed=0)
    trained = Trained(scratch / "model")
    batches = _batches(scratch)
    for _ in range(_WARM_STEPS):
        trained.step(next(batches))
    state = trained.state()
    rows: list[Changes] = []
    for rate in RATES:
        trained.restore(state, rate)
        rows += _run_at(rate, trained, batches)
    return sum(weight.numel() for weight in trained.exported().values()), rows


class Trained:
    """A model with bfloat16 weights and float32 main weights in the optimizer, as in mixed-precision training."""

    def __init__(self, model: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._main = {name: weight.detach().clone() for name, weight in self._model.named_parameters()}
        for weight in self._main.values():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02)  # the spread of pretrained weights, on which rounding depends
        self._optimizer = torch.optim.AdamW(self._main.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
        self._round()

    def exported(self) -> dict[str, Tensor]:
        return {name: weight.to(torch.bfloat16) for name, weight in self._main.items()}

    def step(self, ids: Tensor) -> None:
        """Apply gradients of the rounded weights to the main weights (in float32: CPUs are slow in bfloat16)."""
        self._model.zero_grad()
        self._model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for name, parameter in self._model.named_parameters():
            self._main[name].grad = parameter.grad
        self._optimizer.step()
        self._round()

    def state(self) -> Any:
        return copy.deepcopy((list(self._main.values()), self._optimizer.state_dict()))

    def restore(self, state: Any, rate: float) -> None:
        weights, moments = copy.deepcopy(state)
        for main, saved in zip(self._main.values(), weights, strict=True):
            main.copy_(saved)
        self._optimizer.load_state_dict(moments)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._main[name].to(torch.bfloat16))


def _run_at(rate: float, trained: Trained, batches: Iterator[Tensor]) -> Iterator[Changes]:
    sender = open_sender("shared_memory", "changes-benchmark", TransportSettings(delta=True))
    receiver = open_receiver("shared_memory", sender.rendezvous())
    try:
        for step in range(STEPS + 1):
            exported = trained.exported()
            wire = changed = elements = 0
            for bucket in buckets_of(exported, 64 << 20):
                metadata = sender.send(bucket)
                for (name, tensor), (sent_name, sent) in zip(receiver.receive(metadata), bucket.tensors, strict=True):
                    assert name == sent_name
                    assert np.array_equal(tensor.view(torch.int16).numpy(), sent.view(torch.int16).numpy())
                sender.release(metadata)
                wire += metadata.nbytes - metadata.saved_nbytes
                changed += metadata.changed
                elements += metadata.compared
            if step:  # the first sync sends everything
                nbytes = sum(2 * tensor.numel() for tensor in exported.values())
                yield Changes(rate, step, changed / elements, wire, nbytes)
            trained.step(next(batches))
    finally:
        receiver.close()
        sender.close()


def _batches(scratch: Path) -> Iterator[Tensor]:
    """Yield (_BATCH, length) byte ids of sums forever, cut to the shortest sum of the batch."""
    rows = [json.loads(line) for line in (scratch / "data" / "sft.jsonl").read_text().splitlines()]
    texts = [[8 + byte for byte in (row["prompt"] + row["response"]).encode()] for row in rows]
    generator = np.random.default_rng(0)
    while True:
        chosen = [texts[index] for index in generator.integers(0, len(texts), _BATCH)]
        length = min(map(len, chosen))
        yield torch.tensor([ids[:length] for ids in chosen])
