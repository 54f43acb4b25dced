"""Compare packed and padded training of a small transformer: computed tokens, time, peak memory."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.algorithms.measure import Row, best_times, peak_bytes, time_rows

NUM_SEQUENCES, HEADS, HEAD_DIM, LAYERS, VOCABULARY = 32, 4, 32, 2, 512
PADDED, PACKED = "padded [B, T]", "packed"


class Block(nn.Module):
    """Pre-norm attention and MLP; attention is causal inside each row of (B, T) or each packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, lengths: list[int] | None) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        if lengths is None:
            mixed = _attend(heads)
        else:
            mixed = torch.cat([_attend(part[None])[0] for part in heads.split(lengths)])
        x = x + self.out(mixed.flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


def _attend(heads: Tensor) -> Tensor:
    q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, lengths: list[int] | None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, lengths)
        return x @ self.embedding.weight.T


def rows() -> list[Row]:
    """Measure 32 lognormal sequences (median 200 tokens, sigma 0.8); checks that the losses agree in float32."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(NUM_SEQUENCES, generator=generator) * 0.8 + math.log(200)).exp().clamp(16, 2048).long()
    sequences = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths.tolist()]
    torch.manual_seed(0)
    model = Model()
    losses = {PADDED: _padded(model, sequences).item(), PACKED: _packed(model, sequences).item()}
    if not math.isclose(*losses.values(), rel_tol=1e-5):
        raise AssertionError(f"packed and padded training disagree: {losses}")
    steps = {
        PADDED: lambda: _padded(model, sequences).backward(),
        PACKED: lambda: _packed(model, sequences).backward(),
    }
    tokens = {PADDED: NUM_SEQUENCES * int(lengths.max()), PACKED: int(lengths.sum())}
    found = [
        Row("training step, tokens computed", name, n, "tokens", f"{tokens[PACKED] / n:.0%} of them real")
        for name, n in tokens.items()
    ]
    found += time_rows("training step, time", best_times(steps, repeats=3), PADDED)
    for name, step in steps.items():
        peak = peak_bytes(lambda: model.zero_grad(), partial(_without_input, step))
        found.append(Row("training step, peak memory", name, peak / 2**20, "MiB"))
    return found


def _without_input(step: Callable[[], None], _: object) -> None:
    step()


def _padded(model: Model, sequences: list[Tensor]) -> Tensor:
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)
    # Padding is at the end, so the causal mask already hides it from real tokens.
    logits = model(tokens, None)
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _packed(model: Model, sequences: list[Tensor]) -> Tensor:
    tokens = torch.cat(sequences)
    labels = tokens.roll(-1)
    lengths = [sequence.numel() for sequence in sequences]
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    return cross_entropy(model(tokens, lengths), labels)
