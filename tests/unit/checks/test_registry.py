"""Which checks there are, and which command runs which."""

import ast
from pathlib import Path

import pytest

from slime_like import checks
from slime_like.checks.check import CHECKS, selected
from slime_like.checks.definition import (
    CONVERSION,
    RANKS,
    Needs,
    NeedsOf,
    evaluation_needs,
    loading_needs,
    training_needs,
)
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from tests.unit.checks.checkpoint import sound_flags

_CONVERSION = """
    model.path model.weights model.weights-backend model.converted trainer.attention trainer.backend
    trainer.backend-args trainer.fsdp trainer.share-prefixes model.family trainer.layout trainer.latent-attention
    algorithm.balancing
"""
_RANKS = f"{_CONVERSION} run_dir trainer.cpu-kernels cluster.visible-devices"
_SUPERVISED = f"""
    {_RANKS} reference.model debug.save-rollouts data.train evaluation.files logging.packages resume debug.load-rollouts
    data.messages-key data.prompts data.mixture data.mixture-files
    reference.weight-files algorithm.loss algorithm.kl-estimator algorithm.importance-correction algorithm.minibatches
    trainer.schedule rollout.stream trainer.offload rollout.stop-tokens cluster.gpus-idle
"""
_ENGINES = """
    model.weight-files rollout.python rollout.engine rollout.engine-args evaluation.sampling reward.functions
    rollout.engine-installed
    rollout.environment rollout.tensor rollout.length evaluation.length rollout.max-model-len reward.custom
    rollout.environment-custom custom.code rollout.agent rollout.agent-server rollout.agent-custom
"""
_TRAINING = f"""
    {_SUPERVISED} {_ENGINES} sync.directory algorithm.advantage cluster.placement sync.transport rollout.sampling
    reference.unused evaluation.every trainer.token-budget rollout.agent-length rollout.agent-rows
"""
_EVALUATION = f"""
    {_ENGINES} evaluation.no-files evaluation.weights model.path run_dir evaluation.files model.weights model.converted
    trainer.cpu-kernels cluster.visible-devices rollout.stop-tokens
"""
_SFT = ["--algorithm.loss", "sft"]
_WEIGHTS = ["--model.weights", "converted"]


def _of_ranks(config: RunConfig) -> Needs:
    return loading_needs(config, RANKS)


COMMANDS: list[tuple[str, NeedsOf, list[str], str]] = [
    ("train", training_needs, [], _TRAINING),
    ("train from a checkpoint", training_needs, _WEIGHTS, _TRAINING),
    ("train, supervised", training_needs, _SFT, f"{_SUPERVISED} model.weight-files"),
    ("train, supervised, from a checkpoint", training_needs, [*_SFT, *_WEIGHTS], _SUPERVISED),
    ("eval", evaluation_needs, [], _EVALUATION),
    ("eval with the file of a supervised run", evaluation_needs, _SFT, _EVALUATION),
    ("score and verify", _of_ranks, [], f"{_RANKS} model.weight-files"),
    ("score and verify a checkpoint", _of_ranks, _WEIGHTS, _RANKS),
    ("convert", lambda config: CONVERSION, [], _CONVERSION),
    ("plan with a tokenizer and rows", lambda config: training_needs(config) | {"rows"}, [],
     f"{_TRAINING} model.tokenizer data.rows evaluation.rows"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("needs_of", "flags", "codes"), [own[1:] for own in COMMANDS], ids=[own[0] for own in COMMANDS]
)
def test_a_command_runs_the_checks_it_needs(tmp_path: Path, needs_of: NeedsOf, flags: list[str], codes: str) -> None:
    config = load_config(None, [*sound_flags(tmp_path), *flags])
    assert sorted(own.code for own in selected(needs_of(config))) == sorted(codes.split())


def test_codes_are_unique_and_every_check_is_run_by_a_command() -> None:
    codes = [own.code for own in CHECKS]
    assert len(codes) == len(set(codes))
    assert set(codes) == {code for own in COMMANDS for code in own[3].split()}


def test_no_check_is_left_out_of_the_registry() -> None:
    """Every public ``*_problems`` of the package is registered, or is part of one that is."""
    (folder,) = map(Path, checks.__path__)
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in folder.glob("*.py")]
    functions = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    defined = [name for name in functions if name.endswith("_problems") and name[0] != "_"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert len(defined) == len(set(defined)) > 40
    assert set(defined) <= used
