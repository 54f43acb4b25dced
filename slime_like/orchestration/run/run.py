"""Run: everything that the training loop keeps open."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slime_like.config import RunConfig
from slime_like.config.roles import POLICY
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.progress import Progress
from slime_like.orchestration.reference.refresh import Reference
from slime_like.orchestration.rollout.colocation import DeviceSwitch
from slime_like.orchestration.rollout.kl_coefficient import KLCoefficient
from slime_like.orchestration.run.sources import Source
from slime_like.orchestration.trainer.checkpoint import CheckpointStore
from slime_like.orchestration.trainer.model_ranks import ModelRanks


@dataclass(frozen=True, slots=True)
class Run:
    """An opened run. See ``slime_like.orchestration.run.opening``.

    Attributes:
        finished_steps: number of steps before the resumed checkpoint; 0 in a new run.
        decode: function from token ids to text, by the model's tokenizer.
        source: yields a step's trajectories; with engines, also syncs and evaluates.
        models: models on ranks: the policy, perhaps its critic, and the workers of frozen roles ("reference worker 0").
        devices: moves trainers and engines on and off shared devices.
        reference: refreshes the reference's weights if ``reference.update_interval`` is set.
        kl_reward: coefficient of the KL in the reward.
    """

    config: RunConfig
    finished_steps: int
    decode: Callable[[Sequence[int]], str]
    source: Source
    models: Mapping[str, ModelRanks]
    devices: DeviceSwitch
    reference: Reference
    kl_reward: KLCoefficient
    checkpoints: CheckpointStore
    metrics: MetricLogger
    progress: Progress

    @property
    def policy(self) -> ModelRanks:
        return self.models[POLICY]
