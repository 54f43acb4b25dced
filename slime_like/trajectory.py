"""One dataclass per stage of a sample's life.

An engine returns an ``UnscoredTrajectory``, the replay buffer holds a ``ScoredTrajectory``, and a trainer receives a
``PackedTrajectory``. Nothing is inferred from a token's value: a pad id may equal EOS, and 0 is an ordinary token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorField:
    """Description of a trajectory's tensor. Packing, unpacking, checks, dumps and tables are derived from it.

    Attributes:
        dtype: dtype of the packed and unpacked tensor. A float dtype accepts any number, an integer dtype any integer.
        over: what the first dimension counts: tokens of the prompt, of the response or of its supports, "inputs" (all
            tokens but the last, which no pass reads), or reward functions.
        optional: whether the tensor may be ``None``, in all sequences of a pack or in none.
        entry_ndim: number of further dimensions, with the same size in every sequence of a pack.
    """

    dtype: torch.dtype
    over: Literal["prompt", "response", "supports", "inputs", "functions"] = "response"
    optional: bool = False
    entry_ndim: int = 0

    @property
    def is_per_token(self) -> bool:
        """True if the field has one number per response token."""
        return self.over == "response" and not self.entry_ndim


def _tensor(dtype: torch.dtype, **description: Any) -> dict[str, TensorField]:
    """Return the metadata of a dataclass field. The arguments are the attributes of ``TensorField``."""
    return {"tensor": TensorField(dtype, **description)}


def tensor_fields(cls: type) -> Mapping[str, TensorField]:
    """Return the descriptions of a trajectory's tensors by name; for a pack, of its tensors per response token."""
    return {each.name: each.metadata["tensor"] for each in fields(cls) if "tensor" in each.metadata}


@dataclass(kw_only=True)
class SampledFields:
    """Response tensors of every trajectory, (response_len,), and of its pack, (R,). A new tensor needs one line here.

    Attributes:
        loss_mask: True if the token carries loss; False on tool output and observations.
        logprobs: the behavior policy's log-softmax of the temperature-scaled logits over the whole vocabulary, 0 where
            ``loss_mask`` is False. ``None`` for supervised demonstrations, which no policy sampled.
        weight_versions: weight version that sampled each token; observations have the version of the turn before.
            ``None`` for demonstrations.
        support_ids, support_sizes: ids that each token was drawn from, concatenated, and their number per token (0: the
            whole vocabulary). Set if sampling is truncated: all logprobs are then over these ids. Otherwise ``None``.
        routes: (prompt_len + response_len - 1, layers with experts, choices) experts of each token that was read, in
            the router's order; -1: unknown. For ``algorithm.routing_replay``.
    """

    __slots__ = ()
    loss_mask: Tensor = field(metadata=_tensor(torch.bool))
    logprobs: Tensor | None = field(metadata=_tensor(torch.float32, optional=True))
    weight_versions: Tensor | None = field(default=None, metadata=_tensor(torch.int64, optional=True))
    support_ids: Tensor | None = field(default=None, metadata=_tensor(torch.int32, optional=True, over="supports"))
    support_sizes: Tensor | None = field(default=None, metadata=_tensor(torch.int32, optional=True))
    routes: Tensor | None = field(
        default=None, metadata=_tensor(torch.int16, optional=True, over="inputs", entry_ndim=2)
    )


@dataclass(kw_only=True)
class ScoredFields:
    """Additional response tensors of scored trajectories and their packs. A new tensor needs one line here.

    Attributes:
        ref_logprobs, teacher_logprobs: logprobs under the reference and the teacher; ``None`` without one.
        teacher_hidden: (response_len, H) the teacher's last hidden state, which predicts each token; ``None`` without
            exact distillation.
        values, returns: the critic's value of the state in which each token is chosen, at the start of the step, and
            the target of that value; ``None`` without a critic.
        chosen_tokens: tokens that the loss has chosen from a whole optimizer step; ``None`` if it chooses none.
        mean_weights: the batch's mean importance weight; ``None`` if weights are not divided by it.
        old_logprobs, entropy: logprobs, and entropies in nats, under the trainer's weights at the start of the step;
            ``None`` until the batch is scored.
    """

    __slots__ = ()
    ref_logprobs: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))
    teacher_logprobs: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))
    teacher_hidden: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True, entry_ndim=1))
    old_logprobs: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))
    entropy: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))
    values: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))
    returns: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))
    chosen_tokens: Tensor | None = field(default=None, metadata=_tensor(torch.bool, optional=True))
    mean_weights: Tensor | None = field(default=None, metadata=_tensor(torch.float32, optional=True))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a conversation's response.

    Attributes:
        turns: ``[start, end)`` of every sampled turn in the response's tokens. The other tokens are observations.
        reward, success, metadata: sum over the environment's steps; success of the last one; metadata of each.
        rewards: of every step, one per turn from the first; empty if only their sum is known. An agent's are those of
            the turns that its rows train, row after row.
        calls: number of each of these turns, in the order of sampling; empty if they follow each other.
        failure: ``reason``, ``function`` and ``detail`` of the step that had no outcome; ``None`` if all had one.
        judged: index in ``turns`` of the one that reward functions get.
        answer: what they get instead of it, if an agent says so.
    """

    turns: tuple[tuple[int, int], ...]
    reward: float = 0.0
    success: bool = False
    failure: Mapping[str, str] | None = None
    metadata: tuple[Mapping[str, Any], ...] = ()
    rewards: tuple[float, ...] = ()
    calls: tuple[int, ...] = ()
    judged: int = -1
    answer: str | None = None


class TensorsAsArrays:
    """Dataclass that pickles CPU tensors as NumPy arrays, for Ray's shared memory. Torch's archives take 0.2 ms."""

    __slots__ = ()

    def __getstate__(self) -> list[Any]:
        values = (getattr(self, each.name) for each in fields(cast(Any, self)))
        return [value.numpy() if isinstance(value, Tensor) else value for value in values]

    def __setstate__(self, state: list[Any]) -> None:
        for each, value in zip(fields(cast(Any, self)), state, strict=True):
            # Copy: data that came through Ray is read-only shared memory.
            setattr(self, each.name, torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value)


@dataclass(slots=True, kw_only=True)
class UnscoredTrajectory(SampledFields):
    """One row of a rollout, as an engine returned it. Most rollouts have one row. Tensors are on the CPU, never padded.

    Attributes:
        prompt_tokens, response_tokens: int64, exactly the ids that the model saw and sampled, EOS included.
        prompt_len, response_len: number of tokens, at least 1 each.
        answer: ground-truth answer.
        source: name of its prompt's source in a mixture.
        sequence_id: unique in the run: "GROUP-SAMPLE", or "GROUP-SAMPLE.ROW" if a rollout has several rows.
        rollout_id: shared by a rollout's rows, which have one reward; defaults to the row's ``sequence_id``.
        group_id: shared by the rollouts of one prompt.
        policy_version: weight version of the first response token.
        temperature: sampling temperature; all logprobs of this sequence are scored with it.
        finish_reason: "stop", "length", "abort" or "turns".
        conversation: turns of the conversation, if an environment took part.
        greedy_reward: reward of the greedy response to the prompt, with all penalties, if the advantage needs it.
    """

    prompt_tokens: Tensor = field(metadata=_tensor(torch.int64, over="prompt"))
    response_tokens: Tensor = field(metadata=_tensor(torch.int64))
    prompt_len: int
    response_len: int
    answer: str
    sequence_id: str
    policy_version: int
    group_id: int
    temperature: float = 1.0
    finish_reason: str = "stop"
    conversation: Conversation | None = None
    rollout_id: str = ""
    greedy_reward: float | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        self.rollout_id = self.rollout_id or self.sequence_id

    @classmethod
    def unsampled(cls, sequence_id: str, prompt_tokens: Tensor, response_tokens: Tensor, **others: Any) -> Self:
        """Build a row that no policy sampled, such as a demonstration. By default, all response tokens carry loss."""
        every = torch.ones(len(response_tokens), dtype=torch.bool)
        absent = {"logprobs": None, "answer": "", "policy_version": 0, "group_id": 0, "loss_mask": every}
        tokens: dict[str, Any] = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
        lengths: dict[str, Any] = {"prompt_len": len(prompt_tokens), "response_len": len(response_tokens)}
        return cls(sequence_id=sequence_id, **tokens, **lengths, **absent | others)

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.response_len

    @property
    def sampled_len(self) -> int:
        """Number of response tokens that the model sampled; in a demonstration, of all tokens that carry loss."""
        return int(self.loss_mask.sum())


@dataclass(slots=True)
class GroupedUnscoredTrajectories:
    """All samples of one prompt: the unit for rewards and group advantages.

    ``trajectories`` holds the rows of its rollouts, one rollout after the other. ``total_tokens`` sums ``total_len``.
    ``greedy`` holds the rows of a greedy rollout that is only rewarded.
    Reward functions get ``prompt_tokens``, since rows may have other prompts, and ``whole_row``, the prompt's row of
    the data as JSON, if one of them may read it.
    """

    trajectories: list[UnscoredTrajectory]
    group_id: int
    total_tokens: int
    prompt_tokens: Tensor
    whole_row: str | None = None
    greedy: list[UnscoredTrajectory] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ScoredTrajectory(UnscoredTrajectory, ScoredFields):
    """One sequence with everything the loss needs; unpacked, on the CPU.

    Attributes:
        rewards: (num_funcs,) float32, one entry per reward function, unweighted.
        successes: (num_funcs,) float32, 1 if the function counts the sample as solved.
        advantages: (response_len,) float32, the advantage of every response token. A scalar given is spread over them.
        token_weight: weight of every unmasked response token in the loss sum (``reduction`` in ``AlgorithmConfig``).
            The sum is divided once per optimizer step by one denominator.
        reward_metadata: ``{"func_names": [...], ...}``. With an environment also ``conversation``: ``turns``, as in
            ``Conversation``, and what the steps reported.
    """

    rewards: Tensor = field(metadata=_tensor(torch.float32, over="functions"))
    successes: Tensor = field(metadata=_tensor(torch.float32, over="functions"))
    advantages: Tensor = field(metadata=_tensor(torch.float32))
    reward_metadata: dict[str, Any]
    token_weight: float = 1.0
    conversation: None = field(default=None, init=False)  # its turns are in ``reward_metadata``

    def __post_init__(self) -> None:
        UnscoredTrajectory.__post_init__(self)
        if self.advantages.ndim == 0:
            self.advantages = self.advantages.expand(self.response_len)

    @classmethod
    def of(cls, sample: UnscoredTrajectory, **scores: Any) -> Self:
        """Add scores to ``sample``: the fields that only scored trajectories have, by name."""
        shared = (each.name for each in fields(UnscoredTrajectory) if each.name != "conversation")
        return cls(**{name: getattr(sample, name) for name in shared}, **scores)

    @classmethod
    def unrewarded(cls, sequence_id: str, prompt_tokens: Tensor, response_tokens: Tensor, **others: Any) -> Self:
        """Like ``unsampled``, and without a reward."""
        scores: dict[str, Any] = {"rewards": torch.zeros(0), "successes": torch.zeros(0)}
        scores |= {"advantages": torch.tensor(0.0), "reward_metadata": {"func_names": []}}
        return cls.unsampled(sequence_id, prompt_tokens, response_tokens, **scores, **others)


@dataclass(slots=True, kw_only=True)
class PackedTrajectory(TensorsAsArrays, SampledFields, ScoredFields):
    """One THD micro-batch: sequences concatenated along one token axis, with any padding as a separate segment.

    T is ``packed_seq_len``, S the number of real sequences, R = ``sum(response_lens)``. ``cu_seqlens``,
    ``sequence_map``, ``prompt_lens`` and ``response_lens`` describe only the real sequences. Trailing padding has
    ``sequence_mask == -1``, position ids from 0, and attends only to itself. Fields of ``SampledFields`` and
    ``ScoredFields`` concatenate all sequences, (R,); they are ``None`` if the sequences have none.

    Attributes:
        tokens: (T,) int64, ``[P1, R1, P2, R2, ..., PAD...]``.
        position_ids: (T,) int32, from 0 in every sequence and in the padding.
        response_mask: (T,) bool, True if the token belongs to a response.
        sequence_mask: (T,) int32, index of the sequence, or -1 in the padding.
        cu_seqlens: (S+1,) int32, boundaries of the real sequences.
        max_seqlen, prompt_lens, response_lens: length of the longest real sequence; (S,) int64 lengths of each.
        sequence_map: (S, 2) int64, ``[start, end)`` in ``tokens``.
        packed_seq_len, actual_total_tokens: T with padding, and without.
        targets: (R,) int64, the response tokens, aligned with the logits at ``[start+prompt_len-1, end-1)`` of each
            sequence; ``ignore_index`` where ``loss_mask`` is False.
        token_weights: (R,) float64, 0 where ``loss_mask`` is False. Rounding 1/3 to float32 would cost a loss 1e-8.
        temperatures: (S,) float64.
        advantages: (R,) float32; ``None`` if unscored.
        rewards, successes, reward_metadata: per sequence, (S, num_funcs) float32; ``None`` if unscored.
        conversations: per sequence; ``None`` if scored, since ``reward_metadata`` then has their turns.
        sequence_weights, sequence_temperatures: Python floats as given, also for fully masked sequences.
        is_filler: whether the pack only evens out micro-batch counts; its tokens belong to no sample of the step.
        segment_parents, segment_lengths: (N,) int64, set if sequences share prefixes (``packing.prefixes``): the pack
            as segments that continue their parents (-1: none). All other fields describe whole sequences.
        segment_places: (actual_total_tokens,) int64, position of every token among the tokens of the segments.
    """

    tokens: Tensor
    position_ids: Tensor
    response_mask: Tensor
    sequence_mask: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    prompt_lens: Tensor
    response_lens: Tensor
    sequence_map: Tensor
    packed_seq_len: int
    actual_total_tokens: int
    targets: Tensor
    token_weights: Tensor
    temperatures: Tensor
    sequence_ids: list[str]
    rollout_ids: list[str]
    group_ids: list[int]
    policy_versions: list[int]
    answers: list[str]
    finish_reasons: list[str]
    advantages: Tensor | None = field(default=None, metadata=_tensor(torch.float32))
    rewards: Tensor | None = None
    successes: Tensor | None = None
    reward_metadata: list[dict[str, Any]] | None = None
    conversations: list[Conversation | None] | None = None
    ignore_index: int = -100
    sequence_weights: list[float] = field(default_factory=list)
    sequence_temperatures: list[float] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    is_filler: bool = False
    segment_parents: Tensor | None = None
    segment_lengths: Tensor | None = None
    segment_places: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    @property
    def source(self) -> str | None:
        """Source of all sequences; ``None`` if they have several."""
        return self.sources[0] if len(set(self.sources)) == 1 else None

    @property
    def shared_tokens(self) -> int:
        """Number of prefix tokens that are not computed again."""
        return 0 if self.segment_lengths is None else self.actual_total_tokens - int(self.segment_lengths.sum())


Trajectory = UnscoredTrajectory | ScoredTrajectory
