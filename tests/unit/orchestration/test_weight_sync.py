"""Verification of weight syncs: differing hashes, and the probe's verdict on a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.errors import WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Generation, UpdateReceipt
from slime_like.orchestration.rollout.sync_probe import Probe, ProbeGap, probe_sequences
from slime_like.orchestration.weight_sync import compare_checksums
from slime_like.weights.quantization import dequantize, quantize
from tests.engines.harness import run_config
from tests.support.rejections import Rejects

SENT = {"a.weight": 1, "b.weight": 2}


@pytest.mark.parametrize(
    "received",
    [{"a.weight": 1}, {**SENT, "c.weight": 5}, {"a.weight": 1, "b.weight": 7}],
    ids=["missing", "more", "changed"],
)
def test_differing_hashes_are_rejected(received: dict[str, int], rejects: Rejects) -> None:
    with rejects(WeightSyncError, "tensors-differ"):
        compare_checksums(SENT, UpdateReceipt(3, received), engine=1)


# --------------------------------------------------------------------------------------------------------- the probe
LAYERS = 3  # layers of the tiny model
SHARP = 12.0
"""Factor on an untrained model's logits, which makes them as large as in trained models, or larger."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probed")
    make_tiny_model(directory)
    return directory


def logprobs(model_dir: Path, dtype: torch.dtype, sharpness: float = 1.0, wrong: str | None = None) -> np.ndarray:
    """Return (62,) logprobs of two random sequences. The rows of the matrix ``wrong`` are rotated by half."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    tokens = torch.randint(0, model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness)
        if wrong is not None:
            weight: Tensor = model.get_parameter(wrong)
            weight.copy_(weight.roll(len(weight) // 2, 0))
        logits = model(tokens).logits.float()
    found = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).flatten()
    return np.asarray(found.numpy())


@pytest.mark.parametrize("sharpness", [1.0, SHARP])
def test_a_sound_engine_in_bfloat16(model_dir: Path, sharpness: float) -> None:
    """Rounding grows with the logits. Sound logprobs may be off by more than half a nat."""
    got, expected = (logprobs(model_dir, dtype, sharpness) for dtype in (torch.bfloat16, torch.float32))
    gap = ProbeGap.compare(got, expected, "bfloat16", LAYERS, None)
    assert gap.is_sound and 5 * gap.share < gap.bound
    assert (gap.largest > 0.5) is (sharpness == SHARP)
    assert not ProbeGap.compare(got, expected, "bfloat16", LAYERS, 1e-3).is_sound
    assert not ProbeGap.compare(got, expected, "float32", LAYERS, None).is_sound


@pytest.mark.parametrize("sharpness", [1.0, SHARP])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrong",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.mlp.gate_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_one_wrong_matrix_is_found(model_dir: Path, wrong: str, dtype: str, sharpness: float) -> None:
    got = logprobs(model_dir, getattr(torch, dtype), sharpness, wrong)
    gap = ProbeGap.compare(got, logprobs(model_dir, torch.float32, sharpness), dtype, LAYERS, None)
    assert not gap.is_sound
    assert gap.share > 0.2  # median, relative to the spread


@pytest.mark.parametrize(("layers", "sharpness"), [(LAYERS, 1.0), (LAYERS, SHARP), (24, 1.0), (24, SHARP)])
def test_the_bound_in_float32_lies_between_rounding_and_a_wrong_matrix(
    tmp_path: Path, layers: int, sharpness: float
) -> None:
    """The bound is at least five times rounding and at most a hundredth of a wrong matrix.

    A trained model rounds more; ``ProbeGap`` has measured values.
    """
    make_tiny_model(tmp_path, num_hidden_layers=layers)
    exact = logprobs(tmp_path, torch.float64, sharpness)
    wrong = logprobs(tmp_path, torch.float32, sharpness, "model.layers.1.self_attn.v_proj.weight")
    rounded = ProbeGap.compare(logprobs(tmp_path, torch.float32, sharpness), exact, "float32", layers, None)
    assert 5 * rounded.largest < rounded.bound < ProbeGap.compare(wrong, exact, "float32", layers, 1.0).largest / 100
    assert (rounded.bound == pytest.approx(1e-4)) is (layers == LAYERS and sharpness == 1.0)


def test_a_trained_models_measured_rounding_is_sound() -> None:
    """SmolLM2-135M: its worst rounding of nine measurements, and the smallest effect of a wrong tensor."""
    expected = np.array([-15.2 - 2.7, -15.2 + 2.7])
    assert 5 * 3.18e-4 < ProbeGap.compare(expected, expected, "float32", 30, None).bound < 0.58 / 100


def test_one_token_far_off_is_rounding_in_bfloat16() -> None:
    """SmolLM2-135M in vLLM has a median of 0.022 of the spread, and one token of 62 is off by 3.6 nats. The smallest
    effect of a permuted matrix is a median of 0.132."""
    expected = np.linspace(-15.2 - 2.67 * 1.7, -15.2 + 2.67 * 1.7, 62)
    got = expected + 0.022 * expected.std()
    got[7] += 3.6
    sound = ProbeGap.compare(got, expected, "bfloat16", 30, None)
    assert sound.is_sound and sound.largest > 3.5 and 4.9 * sound.share < sound.bound
    assert not ProbeGap.compare(expected + 0.132 * expected.std(), expected, "bfloat16", 30, None).is_sound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_not_sound(dtype: str) -> None:
    expected = np.linspace(-9, -1, 62, dtype=np.float32)
    got = expected.copy()
    got[5] = np.nan
    assert not ProbeGap.compare(got, expected, dtype, LAYERS, None).is_sound
    assert ProbeGap.compare(expected, expected, dtype, LAYERS, None).is_sound


def test_equal_logprobs_are_compared_without_their_spread() -> None:
    """A model with a zero head has such logprobs."""
    expected = np.full(62, -5.5, dtype=np.float32)
    assert ProbeGap.compare(expected + np.float32(0.005), expected, "bfloat16", LAYERS, None).is_sound
    assert not ProbeGap.compare(expected + np.float32(0.05), expected, "bfloat16", LAYERS, None).is_sound


# --------------------------------------------------------------------------------------------------- 8-bit weights
def rounded_logprobs(probe: Probe, directory: Path, sharpness: float, ignored: bool = False) -> list[np.ndarray]:
    """Return (62,) logprobs of the probe: with the weights, with rounded ones, and with rounded activations, too.

    If ``ignored``, scales are.
    """

    def round_input(layer: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        rows = inputs[0].flatten(0, -2)  # each row of 128 has a scale
        return (torch.stack([dequantize(*quantize(row[None]))[0] for row in rows]).view_as(inputs[0]),)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    tokens, found = torch.tensor(probe.sequences), []
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness)
        for part in range(3):
            logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
            found.append(logprobs.gather(2, tokens[:, 1:, None]).flatten().numpy())
            for name, weight in model.model.layers.named_parameters() if part == 0 else ():
                for matrix in weight if weight.ndim == 3 else [weight] if name.endswith("_proj.weight") else []:
                    elements, scales = quantize(matrix)
                    matrix.copy_(dequantize(elements, torch.ones_like(scales) if ignored else scales))
            for layer in model.model.layers.modules() if part == 1 else ():
                if isinstance(layer, torch.nn.Linear):
                    layer.register_forward_pre_hook(round_input)
    return found


@pytest.mark.parametrize("sharpness", [1.0, SHARP])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_bound_of_8_bit_weights_is_twice_their_gap(
    tmp_path: Path, family: str, sharpness: float, rejects: Rejects
) -> None:
    make_tiny_model(tmp_path, family)
    probe = Probe(run_config(tmp_path, tmp_path).model, None, 64, (), quantized=True)
    expected, *rounded = rounded_logprobs(probe, tmp_path, sharpness)
    for got in rounded:
        probe.judge(1, [answers(got)], expected)
        assert 0.04 < (probe.baseline or 0) < 0.15
        assert not ProbeGap.compare(got, expected, "float32", LAYERS, None).is_sound
        probe.baseline = None
    with rejects(WeightSyncError, "probe-gap"):
        probe.judge(1, [answers(rounded_logprobs(probe, tmp_path, sharpness, ignored=True)[1])], expected)
    for measured in (0.148, 0.125, 0.044):  # SmolLM2-135M: random tokens in bfloat16 and float32, and text
        probe.judge(1, [answers(expected + measured * expected.std())], expected)
    with rejects(WeightSyncError, "probe-gap"):  # its smallest gap if all scales are wrong: 1.6
        probe.judge(1, [answers(expected + 0.5 * expected.std())], expected)


# ------------------------------------------------------------------------------------- the run's own bound in bfloat16
Change = Callable[[Any], None]


class Run:
    """Syncs of one model. The trainer uses float32, the engine bfloat16 and changed weights."""

    def __init__(self, directory: Path, **sync: Any) -> None:
        self._directory = directory
        config = run_config(directory, directory / "run", dtype="bfloat16")
        self.config = config.model_copy(update={"sync": config.sync.model_copy(update=sync)})
        self.probe = Probe(self.config.model, self.config.sync.probe_tolerance, self.config.max_model_len, ())
        self.expected = self.logprobs(torch.float32, sound)

    def sync(self, change: Change, version: int = 1) -> tuple[float, str]:
        return self.probe.judge(version, [answers(self.logprobs(torch.bfloat16, change))], self.expected)

    def logprobs(self, dtype: torch.dtype, change: Change) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)
        tokens = torch.tensor(self.probe.sequences)
        with torch.no_grad():
            change(model)
            logits = model.to(dtype)(tokens).logits.float()
        return np.asarray(logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).flatten().numpy())


def answers(logprobs: np.ndarray) -> list[Generation]:
    """Return an engine's answers to the probe's two requests."""
    nothing = np.empty(0)
    halves = np.split(logprobs, 2)
    return [Generation(nothing, nothing, nothing, "length", prompt_logprobs=half) for half in halves]


def sound(model: Any) -> None:
    """Change nothing."""


def routers_moved(model: Any, size: float = 1e-3) -> None:
    generator = torch.Generator().manual_seed(3)
    routers = [weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    for weight in routers:
        weight += size * torch.randn(weight.shape, generator=generator)


def other_experts(model: Any) -> None:
    """Add as much noise as in large models whose engines choose other experts: 0.37 nats."""
    routers_moved(model, 0.07)


def queries_and_keys_swapped(model: Any) -> None:
    for layer in model.model.layers:
        query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        both = query[: len(key)].clone(), key.clone()
        query[: len(key)], key[:] = both[1], both[0]


def keys_and_values_swapped(model: Any) -> None:
    for layer in model.model.layers:
        key, value = layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight
        both = key.clone(), value.clone()
        key[:], value[:] = both[1], both[0]


def a_layer_not_loaded(model: Any) -> None:
    for weight in model.model.layers[1].parameters():
        weight.zero_()


def the_head_zeroed(model: Any) -> None:
    model.lm_head.weight.zero_()


def one_matrix_wrong(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.copy_(weight.roll(len(weight) // 2, 0))


GROSS = [queries_and_keys_swapped, keys_and_values_swapped, a_layer_not_loaded, the_head_zeroed]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return a factory of runs. Each family's model is made once."""
    made = {family: tmp_path_factory.mktemp(family) for family in ("qwen3", "qwen3_moe")}
    for family, directory in made.items():
        make_tiny_model(directory, family)
    return lambda family, **sync: Run(made[family], **sync)


@pytest.mark.parametrize("change", [sound, routers_moved, other_experts])
def test_a_sound_mixture_of_experts_is_never_rejected(runs: Callable[..., Run], change: Change) -> None:
    """Neither the first nor later syncs with the same noise are rejected."""
    run = runs("qwen3_moe")
    run.sync(change)
    assert run.sync(change, 2)[1] == ""
    if change is other_experts:
        assert np.abs(run.logprobs(torch.bfloat16, change) - run.expected).mean() > 0.37


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("change", GROSS)
def test_a_gross_fault_fails_the_first_sync(
    runs: Callable[..., Run], family: str, change: Change, rejects: Rejects
) -> None:
    """Hashes are right even if an engine puts the bytes in the wrong place."""
    run = runs(family)
    with rejects(WeightSyncError, "probe-gap"):
        run.sync(change)
    assert run.probe.baseline is None  # a rejected sync sets no baseline


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_one_wrong_matrix_fails_a_later_sync(runs: Callable[..., Run], family: str, rejects: Rejects) -> None:
    """Later syncs have at most the bound of the first sync."""
    run = runs(family)
    _, note = run.sync(sound)
    assert run.probe.baseline is not None and f"{run.probe.baseline:.3f}" in note and "0.050" in note
    with rejects(WeightSyncError, "probe-gap"):
        run.sync(one_matrix_wrong, 2)
    assert run.sync(sound, 3)[1] == ""


def test_a_gap_that_grows_is_noted_before_it_fails(runs: Callable[..., Run], rejects: Rejects) -> None:
    """A gap is noted above 2 times the first one and rejected above 3 times, but never below 0.05."""
    probe = runs("qwen3_moe").probe
    expected = np.linspace(-9, -1, 62)

    def sync(share: float) -> str:
        return probe.judge(1, [answers(expected + share * expected.std())], expected)[1]

    sync(0.004)
    assert probe.baseline == pytest.approx(0.004)
    assert [bool(sync(share)) for share in (0.033, 0.034, 0.049)] == [False, True, True]
    with rejects(WeightSyncError, "probe-gap"):
        sync(0.051)
    probe.baseline = 0.08
    assert [bool(sync(share)) for share in (0.15, 0.17, 0.23)] == [False, True, True]
    with rejects(WeightSyncError, "probe-gap"):
        sync(0.25)
    probe.baseline = 0.3  # never above the bound of a first sync
    assert sync(0.29) == ""
    with rejects(WeightSyncError, "probe-gap"):
        sync(0.31)


def test_a_configured_tolerance_replaces_every_bound(runs: Callable[..., Run], rejects: Rejects) -> None:
    run = runs("qwen3", probe_tolerance=5.0)
    assert run.sync(sound)[1] == "" and run.probe.baseline is None
    run.sync(the_head_zeroed, 2)
    with rejects(WeightSyncError, "probe-gap"):
        runs("qwen3", probe_tolerance=1e-3).sync(sound)


def test_the_probe_is_the_middle_of_the_longest_prompts(runs: Callable[..., Run]) -> None:
    longest = runs("qwen3").config.max_model_len
    long, longer, short = list(range(40)), list(range(100)), [1, 2, 3]
    assert probe_sequences(longest, 264, [longer, long]) == [longer[34:66], long[4:36]]
    first, second = probe_sequences(longest, 264, [long, short])
    assert first == long[4:36] and len(second) == 32 and second != short
    assert probe_sequences(longest, 264) == probe_sequences(longest, 264, [short]) != [first, second]
