"""GroupPipeline: from prompts through engines, reward functions and reference workers."""

from collections.abc import Sequence

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt
from slime_like.orchestration.rollout.advantages import weighted_rewards
from slime_like.orchestration.rollout.group_store import GroupStore
from slime_like.orchestration.rollout.manager import EngineClient
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling
from slime_like.orchestration.rollout.scoring import RewardedGroup, Scorer
from slime_like.trajectory import GroupedUnscoredTrajectories


class GroupPipeline:
    """The stages of a group up to training, which is the caller's part. Use from one thread.

    Args:
        references: score groups before they are ready; ``None`` if trainers do it.
    """

    def __init__(
        self,
        config: RunConfig,
        store: GroupStore,
        client: EngineClient,
        scorer: Scorer,
        references: ReferencePool | None,
    ) -> None:
        self._config = config
        self._store = store
        self._client = client
        self._scorer = scorer
        self._references = references
        self._sampling = training_sampling(config)
        self._requested: dict[str, Prompt] = {}

    @property
    def num_sampling(self) -> int:
        """Number of groups at the engines."""
        return len(self._client)

    @property
    def has_references(self) -> bool:
        """True if reference workers score the groups before they are ready."""
        return self._references is not None

    @property
    def num_referred(self) -> int:
        """Number of groups at the reference workers."""
        return len(self._references) if self._references is not None else 0

    def issue(self) -> None:
        """Queue a request for every prompt that the store issues."""
        prompts, samples = self._store.issue(), self._config.rollout.samples_per_prompt
        requests = build_requests(prompts, self._sampling, samples, self._config.seed, "train")
        for prompt, request in zip(prompts, requests, strict=True):
            self._requested[request.request_id] = prompt
            self._client.submit(request)

    def collect(self, timeout_s: float) -> list[GroupedUnscoredTrajectories]:
        """Return the next samples from the engines, or nothing after ``timeout_s``.

        Raises:
            NoEngineLeft: a later call continues when there is an engine.
            EngineError: see ``EngineClient.poll``.
        """
        answers = self._client.poll(timeout_s)
        self._record_resent()
        groups = [
            to_group(self._requested.pop(request.request_id), generations, self._sampling.temperature)
            for request, generations in answers
        ]
        self._store.generated([group.group_id for group in groups])
        return groups

    def reward(self, groups: Sequence[GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        return self._scorer.rewards(groups) if groups else []

    def accept(self, rewarded: Sequence[RewardedGroup], timeout_s: float) -> None:
        """Pass groups that are ready for training to the store; with reference workers, groups that they have scored.

        Args:
            rewarded: new groups; groups without a training signal are dropped.
            timeout_s: longest wait for the reference workers.
        """
        ready = [group for group in rewarded if self._is_useful(group)]
        self._store.drop_without_spread([group.group.group_id for group in rewarded if not self._is_useful(group)])
        if self._references is not None:
            for group in ready:
                self._references.submit(group)
            ready = self._references.poll(timeout_s)
        self._store.add_ready(ready)

    def abort(self) -> None:
        """Abort and drop all groups, wherever they are."""
        self._record_resent()  # an engine may have died since the last answer
        self._client.abort(self._requested.keys())
        if self._references is not None:
            self._references.discard()
        self._requested.clear()
        self._store.drop_oversampled()

    def _record_resent(self) -> None:
        self._store.resent([self._requested[request_id].group_id for request_id in self._client.resent])
        self._client.resent.clear()

    def _is_useful(self, rewarded: RewardedGroup) -> bool:
        """Return whether the group's rewards differ, if ``rollout.drop_zero_spread`` requires it."""
        rewards = weighted_rewards(self._config, rewarded.rewards)  # differing lengths don't make a group useful
        spread = float(rewards.max() - rewards.min())
        return not self._config.rollout.drop_zero_spread or spread > self._config.algorithm.advantage_eps
