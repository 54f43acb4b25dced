"""A language model with a tower trains like transformers' whole model on text, and the tower stays as it came."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.models.tower import language_settings
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.expected_tensors import expected_tensors
from tests.parallel.assembly import stacked_experts
from tests.parallel.parity import (
    BALANCE,
    GRADIENT_BOUND,
    MASKED,
    OPTIMIZER,
    PACKS,
    STEPS,
    Case,
    check_changes,
    check_loss,
    check_scores,
    check_tensors,
    fsdp_config,
    parity_config,
    samples_with_loss,
)
from tests.parallel.ranks import run_each
from tests.parallel.reference import adamw_steps
from tests.parallel.steps import RankResult, exported_from, running, same_bits, take_step, train_rank
from tests.parallel.tiny import scored_sequences
from tests.parallel.towers import KINDS, WholeReference, is_language, save_tower, tensors_of, tower_of


def _case(kind: str, directory: Path) -> Case:
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    checkpoint, algorithm = save_tower(kind, directory), {"moe_aux_loss_coef": BALANCE.get(f"{kind}_text", 0.0)}
    reference = WholeReference(checkpoint, parity_config(checkpoint, directory, {}, **algorithm).algorithm)
    initial = {name: each.detach().clone() for name, each in reference.trained().items()}
    denominator = samples_with_loss(sequences)
    expected = reference.step(sequences, denominator)
    lr, eps = OPTIMIZER["lr"], OPTIMIZER["eps"]
    updated = adamw_steps(reference, sequences, denominator, STEPS, OPTIMIZER["clip_grad"], lr, eps)
    return Case(checkpoint, sequences, expected, algorithm, updated, initial)


def _run(
    placement: RankPlacement,
    config: RunConfig,
    packs: list[PackedTrajectory],
    denominator: float,
    directory: Path | None = None,
) -> RankResult | dict[str, Tensor]:
    """Train, or take a step and export; return the weights that engines would get."""
    if directory is None:
        return train_rank(placement, config, packs, denominator, STEPS)
    with running(placement, config) as trainer:
        take_step(trainer, packs[:1], denominator, last=True)
        trainer.export_hf(directory)
        return exported_from(trainer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, list[RankResult], dict[str, Tensor]]]:
    """Run every kind in one fork of two ranks. An export is next to its checkpoint."""
    root = tmp_path_factory.mktemp("towers")
    cases = [_case(kind, root / kind) for kind in KINDS]
    tasks = [(fsdp_config(case, root, {"data": 2}), case.packs(), case.denominator) for case in cases]
    exports = [(*task, _exported(case)) for task, case in zip(tasks, cases, strict=True)]
    results = run_each(_run, 2, root / "ranks", [*tasks, *exports])
    found = zip(cases, results[: len(cases)], results[len(cases) :], strict=True)
    return {kind: (case, list(ranks), sent[0]) for kind, (case, ranks, sent) in zip(KINDS, found, strict=True)}


def _exported(case: Case) -> Path:
    return case.checkpoint.with_name(f"{case.checkpoint.name}-exported")


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_the_whole_model_computes(kind: str, trained: Any) -> None:
    case, results, _ = trained[kind]
    check_scores(case, results)
    check_loss(case, results)
    for result in results:
        check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)
        check_changes(case, result.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_trained_weights_and_the_tower_as_it_came(kind: str, trained: Any) -> None:
    case, _, sent = trained[kind]
    source, exported = case.checkpoint, _exported(case)
    same_bits(tower_of(exported), tower_of(source))
    before, after = tensors_of(source), tensors_of(exported)
    assert after.keys() == before.keys()
    stored = stacked_experts(sent)
    assert stored.keys() == set(filter(is_language, before))
    same_bits({name: after[name] for name in stored}, stored)
    assert all(not torch.equal(stored[name], before[name]) for name in stored)
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == expected_tensors(source)
    assert _config(exported) == _config(source)
    _, problems = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(problems.values())


def _config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def test_the_settings_of_a_language_model_are_those_of_its_publisher() -> None:
    """Multimodal rotary embedding becomes plain, and either place may tie the embeddings."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    flat = {"model_type": "qwen2_5_vl", "vision_config": {}, "rope_scaling": rope, "tie_word_embeddings": True}
    found = language_settings(flat)
    assert found is not None and found["rope_scaling"] == {"type": "default"}
    assert (found["model_type"], found["tie_word_embeddings"]) == ("qwen2", True)
    inner = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}}
    assert (language_settings(inner) or {})["tie_word_embeddings"] is True
    assert language_settings({"model_type": "qwen2"}) is None
