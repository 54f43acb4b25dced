"""The parity tests' comparisons: the case of one step, its run on many ranks, and every bound.

The matrix of layouts uses them, and so do the mutation tests of that matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from slime_like.weights.expected_tensors import expected_tensors
from tests.parallel.assembly import stacked_experts, to_hugging_face
from tests.parallel.ranks import run_ranks
from tests.parallel.reference import Reference, ReferenceStep, adamw_steps
from tests.parallel.steps import RankResult, by_stage, scored_packs, train_rank
from tests.parallel.tiny import save_checkpoint, scored_sequences

LOGPROB_BOUND = 1e-5
LOSS_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
UPDATE_BOUND = 1e-4
STEPS = 2

# (prompt, response) lengths. An ordinary pack with a single-token response; a long prompt whose response lies in the
# slice of one context rank; one sequence that fills its pack; a fully masked sample next to another one.
PACKS = [[(5, 9), (3, 1), (11, 6), (2, 17)], [(60, 2)], [(8, 21)], [(7, 3), (4, 12)]]
MASKED = (7,)
TAIL = 5  # padding at the end of the first pack

OPTIMIZER = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 4.0}
ALGORITHM = {"kl": {"coef": 0.05}, "entropy_coef": 0.01, "reduction": "samples"}
BALANCE = dict.fromkeys(
    ("qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v3_direct", "glm4_moe", "qwen3_next", "qwen3_5_moe_text"), 0.2
)
"""Coefficient of the routers' balancing loss, chosen to make up about half of their gradients."""

RATES = dict.fromkeys(("deepseek_v3", "deepseek_v3_direct", "glm4_moe"), 0.02)
"""Moves of routers' biases, as large as their differences."""

Settings = dict[str, Any]
"""A layout: sizes in ``trainer.parallel``, some settings of the optimizer ("overlap", ...) and some of ``trainer``."""
RankFunction = Callable[..., RankResult]


@dataclass
class Case:
    """One family's checkpoint and sequences, with the reference's results for them.

    ``loads`` are of the last update, and ``biases`` after it, for each layer with experts.
    """

    checkpoint: Path
    sequences: list[ScoredTrajectory]
    expected: ReferenceStep
    algorithm: dict[str, Any] = field(default_factory=dict)
    updated: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    bias_rate: float = 0.0
    loads: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)

    @property
    def denominator(self) -> float:
        return samples_with_loss(self.sequences)

    def packs(self) -> list[PackedTrajectory]:
        packs, start = [], 0
        for index, lengths in enumerate(PACKS):
            part = self.sequences[start : start + len(lengths)]
            budget = sum(s.total_len for s in part) + TAIL if index == 0 else None
            packs.append(pack_sequences(part, target_tokens_per_batch=budget))
            start += len(lengths)
        return packs


def samples_with_loss(sequences: list[ScoredTrajectory]) -> float:
    """Return the step's denominator under the reduction in ``ALGORITHM``."""
    return float(sum(bool(s.loss_mask.any()) for s in sequences))


def layers_of(layout: Settings) -> int:
    """Return how many layers a model needs at least, so that the layout treats several of them differently."""
    divided = layout.get("pipeline", 1) > 2 or {"virtual_pipeline"} & layout.keys()
    return 4 if divided or isinstance(layout.get("recompute"), int) else 2


def make_case(family: str, directory: Path, steps: int = STEPS, layers: int = 4) -> Case:
    """Save a tiny checkpoint of ``family`` in ``directory`` and compute the float64 reference's step and updates."""
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    return case_of(sequences, family, directory, steps, BALANCE.get(family, 0.0), RATES.get(family, 0.0), layers)


def case_of(
    sequences: list[ScoredTrajectory],
    family: str,
    directory: Path,
    steps: int = STEPS,
    balance: float = 0.0,
    bias_rate: float = 0.0,
    layers: int = 4,
) -> Case:
    """Do the same for given sequences; ``balance`` is the coefficient of the routers' loss."""
    checkpoint, algorithm = save_checkpoint(family, directory, layers=layers), {"moe_aux_loss_coef": balance}
    reference = Reference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    case: Case = computed_case(Case, reference, checkpoint, sequences, algorithm, steps, bias_rate)
    if bias_rate:
        case.loads, case.biases = reference.loads, reference.biases
    return case


def computed_case(
    kind: type[Case],
    reference: Reference,
    checkpoint: Path,
    sequences: list[ScoredTrajectory],
    algorithm: dict[str, Any],
    steps: int,
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
    return kind(checkpoint, sequences, expected, algorithm, updated, initial, bias_rate, **more)


def parity_config(
    checkpoint: Path, run_dir: Path, layout: Settings, dtype: str = "float32", **algorithm: Any
) -> RunConfig:
    settings = dict(layout)
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


def fsdp_config(case: Case, run_dir: Path, layout: Settings, dtype: str = "float32", **algorithm: Any) -> RunConfig:
    """Return the case's configuration for FSDP."""
    backend = {"backend": "fsdp", "router_bias_rate": case.bias_rate, **layout}
    return parity_config(case.checkpoint, run_dir, backend, dtype, **{**case.algorithm, **algorithm})


def task_of(case: Case, layout: Settings, directory: Path, steps: int = STEPS) -> tuple[Any, ...]:
    """Return the arguments of a rank function for the case's step and ``steps`` updates under ``layout``."""
    settings = {"router_bias_rate": case.bias_rate, **layout}
    config = parity_config(case.checkpoint, directory, settings, **case.algorithm)
    return config, case.packs(), case.denominator, steps


def run_case(
    case: Case, layout: Settings, directory: Path, function: RankFunction = train_rank, steps: int = STEPS
) -> list[RankResult]:
    """Run the case's step and ``steps`` updates on every rank of ``layout``."""
    task = task_of(case, layout, directory, steps)
    return run_ranks(function, task[0].trainer.parallel.world_size, directory / "ranks", *task)


def check_everything(case: Case, results: list[RankResult]) -> None:
    """Compare logprobs, entropies, the loss, the gradients (in memory and exported) and the updates."""
    check_scores(case, results)
    check_loss(case, results)
    check_gradients(case, results)
    check_exported_gradients(case, results)
    check_updates(case, results)
    check_biases(case, results)


def check_scores(case: Case, results: list[RankResult]) -> None:
    found = scored_packs(results)
    start = 0
    for index, pack in enumerate(case.packs()):
        stop = start + pack.num_sequences
        for kind, name in (("logprobs", "old_logprobs"), ("entropy", "entropy")):
            expected = torch.cat(getattr(case.expected, kind)[start:stop])
            for scored in found[index]:
                torch.testing.assert_close(
                    scored[name].double(), expected, rtol=0, atol=LOGPROB_BOUND, msg=f"{kind} of pack {index}"
                )
        start = stop


def check_loss(case: Case, results: list[RankResult]) -> None:
    first = [result.stats[0] for result in results if result.stats[0] is not None]
    assert first, "no rank returned the step's statistics"
    for stats in first:
        for name, expected in (("loss", case.expected.loss), ("moe_aux_loss", case.expected.balance)):
            found = float(getattr(stats, name))
            assert found == pytest.approx(expected, abs=LOSS_BOUND), f"{name} is {found}, should be {expected}"
        assert float(stats.num_tokens) == sum(int(s.loss_mask.sum()) for s in case.sequences)


def check_gradients(case: Case, results: list[RankResult], bound: float = GRADIENT_BOUND) -> None:
    dimensions = ModelDimensions.from_checkpoint(case.checkpoint)
    check_tensors(to_hugging_face(by_stage(results, "gradients"), dimensions), case.expected.gradients, bound)


def check_exported_gradients(case: Case, results: list[RankResult]) -> None:
    """Check that each tensor comes from exactly one rank, under its name in the checkpoint's files."""
    exported: dict[str, Tensor] = {}
    for result in results:
        assert not exported.keys() & result.exported.keys()
        exported |= result.exported
    checkpoint = expected_tensors(case.checkpoint)
    trained = {name: shape for name, shape in checkpoint.items() if not name.endswith("e_score_correction_bias")}
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == trained
    found = stacked_experts(exported)
    for name in found.keys() - case.expected.gradients.keys():  # modules and files use different names
        (key,) = (o for o, t in case.expected.gradients.items() if o not in found and t.shape == found[name].shape)
        found[key] = found.pop(name)
    check_tensors(found, case.expected.gradients, GRADIENT_BOUND)


def check_updates(case: Case, results: list[RankResult]) -> None:
    check_changes(case, to_hugging_face(by_stage(results, "weights"), ModelDimensions.from_checkpoint(case.checkpoint)))


def check_changes(case: Case, weights: dict[str, Tensor]) -> None:
    """Compare how the updates changed the weights, given by Hugging Face name."""
    changes = {name: weights[name].double() - case.initial[name] for name in case.initial}
    expected = {name: case.updated[name] - case.initial[name] for name in case.initial}
    check_tensors(changes, expected, UPDATE_BOUND)


def check_biases(case: Case, results: list[RankResult]) -> None:
    """Compare the loads of the last step, summed over all ranks, and every rank's biases, bit for bit."""
    if not case.bias_rate:
        return
    first = ModelDimensions.from_checkpoint(case.checkpoint).dense_layers
    for result in results:
        assert result.loads is not None and torch.equal(result.loads[first:], torch.stack(case.loads))
        for layer, bias in result.biases.items():
            assert torch.equal(bias, case.biases[layer - first]), f"layer {layer}: {bias}, {case.biases[layer - first]}"
    assert {layer - first for result in results for layer in result.biases} == set(range(len(case.biases)))


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Compare tensor by tensor; ``bound`` is relative, by norm."""
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name].double() - value).norm() / value.norm().clamp_min(1e-12))
        for name, value in expected.items()
    }
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert worst[0][1] <= bound, "\n".join(f"{name}: relative error {error:.2e}" for name, error in worst)
