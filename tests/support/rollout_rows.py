"""Rollouts cut into training rows: an append-only response, each row with everything before it as its prompt."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from slime_like.config import RunConfig
from slime_like.orchestration.trainer.batcher import ExperienceBatcher
from slime_like.trajectory import ScoredTrajectory, tensor_fields


def batcher_of(config: RunConfig, replicas: int) -> ExperienceBatcher:
    return ExperienceBatcher(config.algorithm, config.trainer, config.model, replicas, pad_token_id=0)


def cut_into_rows(rollout: ScoredTrajectory, cuts: Sequence[int]) -> list[ScoredTrajectory]:
    """Rows that begin at 0 and at every one of ``cuts``, positions of the response."""
    every = torch.cat([rollout.prompt_tokens, rollout.response_tokens])
    described = tensor_fields(ScoredTrajectory).items()
    names = [name for name, each in described if each.over == "response" and each.entry_ndim == 0]
    rows = []
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, rollout.response_len], strict=True)):
        parts = {name: value[start:end] for name in names if (value := getattr(rollout, name)) is not None}
        rows.append(
            replace(
                rollout,
                sequence_id=f"{rollout.sequence_id}.{number}",
                prompt_tokens=every[: rollout.prompt_len + start],
                prompt_len=rollout.prompt_len + start,
                response_len=end - start,
                **parts,
            )
        )
    return rows


def random_cuts(rollout: ScoredTrajectory, pick: random.Random, most: int = 4) -> list[int]:
    """Up to ``most`` places to cut, in order."""
    places = range(1, rollout.response_len)
    return sorted(pick.sample(places, min(len(places), pick.randint(0, most))))
