"""Probe of a weight sync: text for which the logprobs of engines and trainer must agree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from slime_like.config import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.interfaces import Generation, GenerationRequest, PromptInput, SamplingParams
from slime_like.models.dimensions import ModelDimensions

_FLOAT32_BOUND = 1e-4
_FLOAT32_ROUNDINGS = 256
BFLOAT16_BOUND = 0.11
ROUTED_BOUND = 0.3
_QUANTIZED_BOUND = 0.3
_LEAST_BOUND = 0.05
_LEAST_SPREAD = 0.05
_NOTED, _FAILS = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """Result of the probe.

    In float32, the largest difference counts. Rounding grows with depth and with the spread (standard deviation) of the
    logprobs. The bound is 256 units of rounding (2^-23) times both, at least 1e-4. For SmolLM2-135M (30 layers, spread
    2.7), rounding was 2e-5 to 3e-4, one tensor zeroed or permuted 0.6 to 18, and the bound is 2.5e-3.

    In bfloat16, a trained model's logprob of one random token in sixty may be off by 3 even if both sides are sound. So
    the median difference counts, as a share of the spread. For SmolLM2-135M in vLLM, it was 0.018 to 0.022; with one of
    25 matrices permuted, at least 0.13. The bound is five times the sound value.

    A mixture of experts chooses other experts if its router's logits nearly tie. Large ones differ by 0.37 nats on
    average (radixark/miles#2722), and logprobs of text have a spread of about 2, so the bound is 0.3. Swapped or
    reordered heads give 0.33 to 3.5. One of four layers missing gives 0.11 to 0.26: only a later sync, compared with
    the first, reveals that.

    With 8-bit weights, which the trainer does not have, the median counts in float32, too. If only the trainer's
    products are in FP8, the bound is the same. Sound medians were 0.03 to
    0.15, and the bound is twice the largest. If every matrix has wrong scales, the median is 1.6 to 6. One such matrix
    of 210 may be missed: it gives 0.03 to 17.

    Attributes:
        largest: largest difference of a token's logprob, in nats.
        share: median difference over the spread of the trainer's logprobs (at least 0.05).
        bound: bound on ``largest`` in float32, on ``share`` in bfloat16.
        in_float32: whether ``largest`` counts instead of ``share``.
    """

    largest: float
    share: float
    bound: float
    in_float32: bool

    @classmethod
    def compare(cls, got: np.ndarray, expected: np.ndarray, dtype: str, layers: int, bound: float | None) -> Self:
        """Compare logprobs (n,) of engine and trainer. The default ``bound`` follows from ``dtype`` and ``layers``."""
        in_float32 = dtype == "float32"
        gaps = np.abs(got.astype(np.float64) - expected)
        spread = float(np.std(expected, dtype=np.float64))
        share = float(np.median(gaps) / max(spread, _LEAST_SPREAD))
        if bound is None and in_float32:
            bound = max(_FLOAT32_BOUND, _FLOAT32_ROUNDINGS * float(np.finfo(np.float32).eps) * layers * spread)
        return cls(float(gaps.max()), share, BFLOAT16_BOUND if bound is None else bound, in_float32)

    @property
    def is_sound(self) -> bool:
        """True if the gap is within the bound; False for NaN."""
        return (self.largest if self.in_float32 else self.share) <= self.bound

    def __str__(self) -> str:
        if self.in_float32:
            return f"by up to {self.largest:.2e} (bound {self.bound:.0e})"
        median = f"a median of {self.share:.2f} of the trainer's spread (bound {self.bound:g})"
        return f"by up to {self.largest:.2e}, with {median}"


class Probe:
    """Fixed tokens, and the run's bounds on how much engines and trainer may differ on them.

    In bfloat16, the first sound sync sets the run's baseline. Later syncs must stay within three times the baseline (or
    0.05), and within the first sync's bound. A resumed run takes a new baseline.

    Attributes:
        sequences: token ids of each sequence.
        baseline: largest share of any engine at the first sync; ``None`` before it.
        trial_due: whether engines get factors that may still be 0, and have not yet been given others.
    """

    def __init__(
        self,
        model: ModelConfig,
        bound: float | None,
        longest: int,
        prompts: Sequence[Sequence[int]],
        quantized: bool = False,
    ) -> None:
        dimensions = ModelDimensions.from_checkpoint(model.path)
        self.sequences = probe_sequences(longest, dimensions.vocab_size, prompts)
        self.baseline: float | None = None
        self.trial_due = model.lora.sends_factors
        self._dtype, self._layers = model.dtype, dimensions.num_layers
        self._given = bound
        self._first = ROUTED_BOUND if dimensions.num_experts else BFLOAT16_BOUND
        if quantized:
            self._dtype, self._first = "bfloat16", _QUANTIZED_BOUND

    def requests(self, version: int) -> list[GenerationRequest]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1, training=False)
        return [
            GenerationRequest(f"probe-{version}-{index}", PromptInput(tokens), sampling, prompt_logprobs=True)
            for index, tokens in enumerate(self.sequences)
        ]

    def notices(self, got: np.ndarray, expected: np.ndarray) -> bool:
        """Return whether such logprobs of an engine would exceed the bound, even if it were twice as large."""
        gap = ProbeGap.compare(got, expected, self._dtype, self._layers, self._bound())
        return not replace(gap, bound=2 * gap.bound).is_sound

    def judge(self, version: int, answers: Sequence[Sequence[Generation]], expected: np.ndarray) -> tuple[float, str]:
        """Compare each engine's answers to ``requests`` with the trainer's logprobs.

        Returns:
            The largest difference, in nats, and a note for the user, which may be empty.

        Raises:
            WeightSyncError: an engine's logprobs differ from the trainer's.
        """
        bound = self._bound()
        gaps = []
        for engine, generations in enumerate(answers):
            got = np.concatenate([_prompt_logprobs(generation, engine) for generation in generations])
            gaps.append(ProbeGap.compare(got, expected, self._dtype, self._layers, bound))
            if not gaps[-1].is_sound:
                raise WeightSyncError(
                    f"engine {engine}'s logprobs differ from the trainer's {gaps[-1]}: "
                    "it does not serve the weights it received",
                    code="probe-gap",
                    who=f"weight sync to version {version}",
                    remedy="compare weights/probe_gap of earlier steps: if it grew slowly, this is rounding, so raise "
                    "sync.probe_tolerance; if it jumped, report this with the engine's version and log",
                )
        return max(gap.largest for gap in gaps), self._note(max(gap.share for gap in gaps))

    def _bound(self) -> float | None:
        """Return the bound on this sync, or ``None`` for the one that depends on the logprobs."""
        if self._given is not None or self._dtype == "float32":
            return self._given
        return self._first if self.baseline is None else min(self._first, self._from_baseline(_FAILS))

    def _from_baseline(self, times: float) -> float:
        """Return ``times`` the baseline, or that share of ``_LEAST_BOUND`` if it is more."""
        return times * max(self.baseline or 0.0, _LEAST_BOUND / _FAILS)

    def _note(self, share: float) -> str:
        """Take the first ``share`` as the baseline, and compare later shares with it."""
        if self._given is not None or self._dtype == "float32":
            return ""
        differ = f"weight sync: engines and trainer differ by a median of {share:.3f} of the logprobs' spread"
        if self.baseline is None:
            self.baseline = share
            return f"{differ}; later syncs of this run fail above {self._bound():.3f}"
        if share <= self._from_baseline(_NOTED):
            return ""
        return f"{differ}, up from {self.baseline:.3f} at the first sync; the run fails above {self._bound():.3f}"


def probe_sequences(longest: int, vocab_size: int, prompts: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Return two sequences of at most 32 tokens: the middles of ``prompts``, or random tokens if those are shorter.

    Text reveals more than random tokens. In tiny trained models, attention faults are up to three times as large on
    text, and router noise is a third. ``longest`` is the most tokens that a sequence may have.
    """
    length = min(32, longest - 1)
    middles = [list(prompt[(len(prompt) - length) // 2 :][:length]) for prompt in prompts if len(prompt) >= length]
    generator = np.random.default_rng(20_240_607)
    return (middles + [generator.integers(0, vocab_size, length).tolist() for _ in range(2)])[:2]


def _prompt_logprobs(generation: Generation, engine: int) -> np.ndarray:
    if generation.prompt_logprobs is None:
        raise WeightSyncError(
            f"engine {engine} returned no prompt logprobs for the probe; its adapter must", code="no-probe-logprobs"
        )
    return np.asarray(generation.prompt_logprobs, dtype=np.float64)
