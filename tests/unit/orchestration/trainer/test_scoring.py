"""Scores of sequences that went through packs and replicas, and the temporary directory of a command that scores."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slime_like.algorithms.packing.pack import response_tokens
from slime_like.config import TrainerConfig
from slime_like.errors import ConfigError, DataError, TrainerError
from slime_like.interfaces import Scores
from slime_like.orchestration.run.directory import run_directory
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.trajectory import PackedTrajectory, UnscoredTrajectory
from tests.support.pending import Later
from tests.support.rejections import Rejects


class TokenScorer(ModelRanks):
    """Ranks for which a token's logprob is minus its id, and its entropy is the length of its sequence's prompt."""

    def __init__(self, settings: TrainerConfig) -> None:
        self.config = cast(Any, SimpleNamespace(algorithm=None, trainer=settings, model=None))
        self._pad_token_id = 0
        self._replicas = list(range(settings.parallel.data))

    def scatter(self, phase: str, method: Any, replicas: Sequence[Any], *more: Any) -> Any:
        assert phase and method is TrainerRank.score
        self.seen = list(replicas)
        return Later(lambda: [[self.scored(pack) for pack in packs] for packs in replicas])

    def scored(self, pack: PackedTrajectory) -> Scores:
        prompts = pack.prompt_lens.repeat_interleave(pack.response_lens)
        return {"old_logprobs": -response_tokens(pack).float(), "entropy": prompts.float()}


def sequence(index: int, prompt: int, response: int) -> UnscoredTrajectory:
    tokens = torch.arange(1000 * index, 1000 * index + prompt + response)
    return UnscoredTrajectory.unsampled(f"s{index}", tokens[:prompt], tokens[prompt:], group_id=index)


def trainer(budget: int = 16, **parallel: int) -> TrainerConfig:
    return TrainerConfig(target_tokens_per_batch=budget, parallel=parallel)  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [1, 2, 3, 12])
def test_scores_belong_to_their_sequences(replicas: int) -> None:
    """Every replica runs the same number of packs, even with fewer sequences than replicas."""
    lengths = [(3, 9), (1, 1), (10, 6), (2, 5), (4, 4), (1, 15), (7, 2)]
    sequences = [sequence(index, *pair) for index, pair in enumerate(lengths)]
    scorer = TokenScorer(trainer(data=replicas))
    assert scorer.score([]) == []
    scores = scorer.score(sequences)
    for sent, score in zip(sequences, scores, strict=True):
        assert torch.equal(score["old_logprobs"], -sent.response_tokens.float())
        assert score["entropy"].tolist() == [sent.prompt_len] * sent.response_len
    assert len({len(packs) for packs in scorer.seen}) == 1 and len(scorer.seen) == replicas
    assert all(pack.packed_seq_len <= 16 for packs in scorer.seen for pack in packs)


def test_a_sequence_over_the_budget_is_rejected(rejects: Rejects) -> None:
    """With padding for context parallelism, nine tokens take sixteen."""
    scorer = TokenScorer(trainer(16, context=4))
    assert len(scorer.score([sequence(0, 4, 5)])) == 1
    with rejects(DataError, "over-token-budget"):
        scorer.score([sequence(0, 4, 5), sequence(1, 4, 13)])


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_value_that_is_not_finite_is_rejected(value: float, rejects: Rejects) -> None:
    class Broken(TokenScorer):
        def scored(self, pack: PackedTrajectory) -> Scores:
            answer = super().scored(pack)
            answer["old_logprobs"][-1] = value
            return answer

    with rejects(TrainerError, "not-finite"):
        Broken(trainer()).score([sequence(0, 4, 5)])


def test_a_temporary_directory_stays_only_for_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    with run_directory(path, temporary=True):
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
    with pytest.raises(ConfigError), run_directory(path, temporary=True):
        raise ConfigError(["too few devices"])
    assert not path.exists()
    with pytest.raises(TrainerError) as failed, run_directory(path, temporary=True):
        raise TrainerError("rank 1 died")
    assert path.is_dir() and [str(path) in note for note in failed.value.__notes__] == [True]
    with pytest.raises(FileExistsError), run_directory(path, temporary=True):  # another command's directory
        pass
    assert path.is_dir()
    with pytest.raises(TrainerError) as failed, run_directory(path, temporary=False):  # the user's directory stays
        raise TrainerError("rank 1 died")
    assert not hasattr(failed.value, "__notes__")
    assert path.is_dir()
