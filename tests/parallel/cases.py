"""Cases of the parity tests: a checkpoint, sequences and the float64 reference's results for them, by feature."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.algorithms.packing.prefixes import Sharing
from slime_like.config import RunConfig
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel import checks, references
from tests.parallel.checks import EVERYTHING
from tests.parallel.layouts import Settings
from tests.parallel.reference import Reference, ReferenceStep, adamw_steps
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.tiny import OTHERS, VOCAB, save_checkpoint, scored_sequences

STEPS = 2

# (prompt, response) lengths. An ordinary pack with a single-token response; a long prompt whose response lies in the
# slice of one context rank; one sequence that fills its pack; a fully masked sample next to another one.
PACKS = [[(5, 9), (3, 1), (11, 6), (2, 17)], [(60, 2)], [(8, 21)], [(7, 3), (4, 12)]]
MASKED = (7,)
TAIL = 5  # padding at the end of the first pack

# Shorter than a convolution, around a chunk's end, or of several chunks. With context ranks, one spans the ranks.
LENGTHS = [[(1, 1), (1, 2), (40, 23), (2, 62), (9, 56)], [(70, 75), (3, 30)]]

# The packs' numbers of sequences; per sequence (prompt, response) lengths and the sequence that starts with its prompt.
SHARED_PACKS = (5, 2, 5, 2)
SHARED: list[tuple[int, int, int | None]] = [
    *[(9, 9, None), (9, 1, 0), (9, 6, 0), (9, 6, 0), (3, 5, None)],
    *[(60, 2, None), (60, 3, 5)],
    *[(8, 5, None), (13, 6, 7), (13, 4, 7), (8, 7, 7), (10, 3, 7)],
    *[(7, 3, None), (4, 12, None)],
]
EQUAL, BEGINNING = (2, 3), (1, 0)
"""Pairs of sequences: equal responses, and a response that is the start of the other one."""

OPTIMIZER = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 4.0}
ALGORITHM = {"kl": {"coef": 0.05}, "entropy_coef": 0.01, "reduction": "samples"}
WIDE_CLIP = {"loss": {"name": "ppo_clip", "clip_low": 0.99, "clip_high": 100.0}}
"""For 16 bits: a ratio that rounding moves over the clip's bound would change the gradient abruptly."""
BALANCE = dict.fromkeys(
    ("qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v3_direct", "glm4_moe", "qwen3_next", "qwen3_5_moe_text"), 0.2
)
"""Coefficient of the routers' balancing loss, chosen to make up about half of their gradients."""

RATES = dict.fromkeys(("deepseek_v3", "deepseek_v3_direct", "glm4_moe"), 0.02)
"""Moves of routers' biases, as large as their differences."""

WIDTH = 9
"""Supports have up to so many tokens."""


def parity_config(
    checkpoint: Path, run_dir: Path, layout: Settings, dtype: str = "float32", **algorithm: Any
) -> RunConfig:
    settings = dict(layout)
    dtype = settings.pop("dtype", dtype)
    of_optimizer = ("distributed", "overlap", "overlap_bucket_params", "clip_grad", "offload", "lr")
    optimizer: dict[str, Any] = {"distributed": settings.get("backend") == "fsdp"}
    optimizer |= {name: settings.pop(name) for name in of_optimizer if name in settings}
    of_trainer = ("backend", "recompute", "attention", "activation_offload", "share_prefixes", "fsdp")
    of_trainer += ("router_bias_rate",)
    options = {name: settings.pop(name) for name in of_trainer if name in settings}
    return RunConfig(
        run_dir=run_dir,
        steps=STEPS,
        model={"path": checkpoint, "dtype": dtype},
        algorithm={**ALGORITHM, **algorithm},
        data={"max_prompt_tokens": 31},
        rollout={"max_new_tokens": 31},  # the longest sequence of ``PACKS`` has as many tokens; plans trace these
        trainer={
            "target_tokens_per_batch": 128,
            "parallel": settings,
            "optimizer": {**OPTIMIZER, **optimizer},
            **options,
            "head_chunk_tokens": 8,
            "step_timeout_s": 300.0,
            "cpu_threads": 1,
        },
    )


def samples_with_loss(sequences: list[ScoredTrajectory]) -> float:
    """Return the step's denominator under the reduction in ``ALGORITHM``."""
    return float(sum(bool(s.loss_mask.any()) for s in sequences))


# ------------------------------------------------------------------------------------------------------------ the cases
@dataclass
class Case:
    """A checkpoint and sequences, with the reference's results for them.

    Attributes:
        expected: the step's results.
        updated, initial: weights after ``STEPS`` updates, and before.
        settings: of the layout, whatever it is.
        loads, biases: of the last update, and after it, for each layer with experts.
        sizes, tails: the packs' numbers of sequences and of tokens of padding.
    """

    checkpoint: Path
    sequences: list[ScoredTrajectory]
    expected: ReferenceStep
    algorithm: dict[str, Any] = field(default_factory=dict)
    updated: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    bias_rate: float = 0.0
    loads: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)
    sizes: Sequence[int] = tuple(map(len, PACKS))
    tails: Sequence[int] = (TAIL, 0, 0, 0)
    sharing: Sharing | None = None
    checks: Sequence[Callable[..., None]] = EVERYTHING
    steps: int = STEPS

    is_critic: ClassVar[bool] = False
    run: ClassVar[Callable[..., RankResult]] = staticmethod(train_rank)

    @property
    def denominator(self) -> float:
        return samples_with_loss(self.sequences)

    def packs(self) -> list[PackedTrajectory]:
        return packs_of(self.sequences, self.sizes, self.tails, self.sharing)

    def config(self, directory: Path, layout: Settings, **algorithm: Any) -> RunConfig:
        settings = {"router_bias_rate": self.bias_rate, **self.settings, **layout}
        return parity_config(self.checkpoint, directory, settings, **{**self.algorithm, **algorithm})

    def task(self, directory: Path, layout: Settings, **algorithm: Any) -> tuple[Any, ...]:
        """Return the arguments of ``run`` under this layout."""
        return self.config(directory, layout, **algorithm), self.packs(), self.denominator, self.steps


def packs_of(
    sequences: list[ScoredTrajectory], sizes: Sequence[int], tails: Sequence[int], sharing: Sharing | None
) -> list[PackedTrajectory]:
    found, start = [], 0
    for size, tail in zip(sizes, tails, strict=True):
        part = sequences[start : start + size]
        budget = sum(s.total_len for s in part) + tail if tail else None
        found.append(pack_sequences(part, target_tokens_per_batch=budget, sharing=sharing))
        start += size
    return found


def plain_sequences() -> list[ScoredTrajectory]:
    return scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)


def computed(
    reference: Reference,
    checkpoint: Path,
    sequences: list[ScoredTrajectory],
    steps: int,
    kind: type[Case] = Case,
    bias_rate: float = 0.0,
    **more: Any,
) -> Any:
    """Return a case of this kind with the reference's step and ``steps`` updates."""
    initial = {name: parameter.detach().clone() for name, parameter in reference.trained().items()}
    denominator = samples_with_loss(sequences)
    expected = reference.step(sequences, denominator)
    updated = adamw_steps(
        reference, sequences, denominator, steps, OPTIMIZER["clip_grad"], OPTIMIZER["lr"], OPTIMIZER["eps"], bias_rate
    )
    if bias_rate:
        more |= {"bias_rate": bias_rate, "loads": reference.loads, "biases": reference.biases}
    return kind(checkpoint, sequences, expected, updated=updated, initial=initial, steps=steps, **more)


def plain_case(
    family: str,
    directory: Path,
    steps: int,
    layers: int,
    sequences: list[ScoredTrajectory] | None = None,
    balance: float | None = None,
    rate: float | None = None,
    **more: Any,
) -> Case:
    """Save a tiny checkpoint of ``family``; ``balance`` is the coefficient of the routers' loss."""
    checkpoint = save_checkpoint(family, directory, layers=layers)
    algorithm = {"moe_aux_loss_coef": BALANCE.get(family, 0.0) if balance is None else balance}
    reference = Reference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    rate = RATES.get(family, 0.0) if rate is None else rate
    sequences = sequences or plain_sequences()
    case: Case = computed(reference, checkpoint, sequences, steps, bias_rate=rate, algorithm=algorithm, **more)
    if family in OTHERS or not algorithm["moe_aux_loss_coef"]:
        case.expected.balance = 0.0  # not requested
    return case


def rounded_case(family: str, directory: Path, steps: int, layers: int) -> Case:
    checkpoint = save_checkpoint(family, directory, layers=layers)
    reference = Reference(checkpoint, parity_config(checkpoint, directory, {}, **WIDE_CLIP).algorithm)
    reference.model.bfloat16().double()
    bounded = (checks.check_mean_scores, partial(checks.check_gradients, bound=5e-2))
    more = {"algorithm": WIDE_CLIP, "settings": {"dtype": "bfloat16"}, "checks": bounded}
    case: Case = computed(reference, checkpoint, plain_sequences(), 0, **more)
    case.steps = 1
    return case


def lengths_case(family: str, directory: Path, steps: int, layers: int) -> Case:
    sequences = scored_sequences([pair for lengths in LENGTHS for pair in lengths])
    return plain_case(family, directory, steps, layers, sequences, rate=0.0, sizes=(5, 2), tails=(0, 0))


@dataclass
class NeighborCase(Case):
    """Two packs of the first ``LENGTHS`` that differ in one sequence."""

    changed: int = 0


def neighbor_case(family: str, directory: Path, steps: int, layers: int, changed: int = 3, only: bool = False) -> Case:
    sequences = scored_sequences(LENGTHS[0])
    one, others = sequences[changed], list(sequences)
    others[changed] = replace(one, prompt_tokens=one.prompt_tokens.flip(0), response_tokens=one.response_tokens.flip(0))
    reads = () if only else (checks.check_scores, checks.check_gradients, checks.check_exported_gradients)
    more = {"kind": NeighborCase, "changed": changed, "checks": (*reads, checks.check_neighbor)}
    return plain_case(family, directory, 0, layers, sequences + others, rate=0.0, sizes=(5, 5), tails=(1, 1), **more)


# -------------------------------------------------------------------------------------------------- shared prefixes
def sharing_sequences() -> list[ScoredTrajectory]:
    plain = scored_sequences([lengths[:2] for lengths in SHARED], fully_masked=(2, 11))
    found: list[ScoredTrajectory] = []
    for index, (sequence, (prompt, _, earlier)) in enumerate(zip(plain, SHARED, strict=True)):
        tokens = sequence.prompt_tokens
        if earlier is not None:
            tokens = torch.cat([found[earlier].prompt_tokens, found[earlier].response_tokens])[:prompt]
        group = sum(start <= index for start in (0, 4, 5, 7, 12, 13))
        found.append(replace(sequence, prompt_tokens=tokens, group_id=group))
    for index, other in (EQUAL, BEGINNING):
        found[index].response_tokens = found[other].response_tokens[: found[index].response_len]
    return found


def shared_packs(sequences: list[ScoredTrajectory]) -> list[PackedTrajectory]:
    return packs_of(sequences, SHARED_PACKS, (0,) * len(SHARED_PACKS), "tree")


def sharing_fields(sharing: Sharing = "tree") -> dict[str, Any]:
    """Return the fields of a case whose packs share prefixes."""
    settings = {"share_prefixes": sharing}
    return {"sharing": sharing, "settings": settings, "sizes": SHARED_PACKS, "tails": (0,) * len(SHARED_PACKS)}


def shared_case(
    family: str,
    directory: Path,
    steps: int,
    layers: int = 2,
    sharing: Sharing = "tree",
    sequences: list[ScoredTrajectory] | None = None,
) -> Case:
    """Make a case of packs that share, expecting the reference's step on the whole sequences."""
    sequences, more = sequences or sharing_sequences(), sharing_fields(sharing)
    return plain_case(family, directory, min(steps, 1), layers, sequences, balance=0.0, rate=0.0, **more)


def balanced_case(family: str, directory: Path, steps: int, layers: int) -> Case:
    """Make a case of shared prefixes whose routers' loss is more than half of their gradient."""
    case = shared_case(family, directory, 1)
    case.algorithm["moe_aux_loss_coef"] = 0.5
    algorithm = parity_config(case.checkpoint, directory, {}, **case.algorithm).algorithm
    reference = references.TreeReference(case.checkpoint, algorithm)
    case.expected = reference.balanced_step(case.sequences, case.denominator, case.packs())
    return replace(case, checks=(checks.check_loss, checks.check_gradients))


def with_supports(sequence: ScoredTrajectory, generator: torch.Generator) -> ScoredTrajectory:
    """Give a sequence supports of one to ``WIDTH`` tokens; every fifth token was sampled from the whole vocabulary."""
    supports = list[torch.Tensor]()
    for number, token in enumerate(sequence.response_tokens.tolist()):
        kept = []
        if number % 5 != 4:
            count = int(torch.randint(0, WIDTH, (), generator=generator))
            others = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
            kept = [token, *(other for other in dict.fromkeys(others) if other != token)]
        order = torch.randperm(len(kept), generator=generator)
        supports.append(torch.tensor(kept, dtype=torch.int32)[order])
    sequence.support_ids = torch.cat(supports)
    sequence.support_sizes = torch.tensor(list(map(len, supports)), dtype=torch.int32)
    counts = sequence.support_sizes  # a token sampled from fewer is likelier; ratios stay near 1
    likelier = torch.where(counts > 0, math.log(VOCAB) - counts.clamp_min(1).log(), 0.0)
    assert sequence.old_logprobs is not None and sequence.ref_logprobs is not None
    sequence.old_logprobs, sequence.ref_logprobs = sequence.old_logprobs + likelier, sequence.ref_logprobs + likelier
    return sequence


def supports_case(family: str, directory: Path, steps: int, layers: int, shares: bool = False) -> Case:
    generator = torch.Generator().manual_seed(int(shares))
    sequences = [with_supports(each, generator) for each in (sharing_sequences if shares else plain_sequences)()]
    if shares:
        return shared_case(family, directory, 1, sequences=sequences)
    return plain_case(family, directory, 1, layers, sequences)
