"""Megatron's GPT model, whose last stage returns response logprobs instead of logits: [T, V] never exists."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from backends.common.step.packs import ResponseRows
from backends.megatron.attention import PackedLayout
from slime_like.algorithms.head import fused_logprobs, values_of


class ScoredLayer(TransformerLayer):
    """A dense layer that, as the model's last one, skips the MLP for tokens that the head does not score.

    Attributes:
        scores: this is the last layer. With sequence parallelism it skips none: a rank lacks the head's rows.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.scores = self.layer_number == config.num_layers and not config.sequence_parallel

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return (T, 1, H), or in the last layer (r, 1, H) if r is not 0, and no context."""
        responses = PackedLayout.require(options["packed_seq_params"]).responses
        if not self.scores or responses is None or len(responses.index) == 0:
            return super().forward(*arguments, **options)
        options.pop("dynamic_inference_decode_only", None)
        hidden, context = self._forward_attention(*arguments, **options)
        return self._forward_mlp(hidden.index_select(0, responses.index)), context


class LogprobModel(GPTModel):
    """GPTModel whose forward returns (2, r) on the last pipeline stage: logprobs and entropies (nats).

    r is the number of response tokens that this context-parallel rank scores; the rows come with the micro-batch
    (``PackedLayout.responses``). Earlier stages return hidden states as usual.

    Attributes:
        true_vocab_size: the vocabulary without padding.
        chunk_tokens: tokens whose logits exist at the same time.
        entropy_gradient: the loss has an entropy term.
        score: the head of a value model, on the last stage; the same on every rank.
        scores_hidden: outside of training, the last stage returns hidden states instead.
        teachers: ``Teachers`` to which training needs the exact KL, on the last stage.
        gather_weight: called before the output weight is read, which may still be arriving from other ranks.
    """

    true_vocab_size: int
    chunk_tokens: int | None
    entropy_gradient: bool
    score: torch.nn.Linear | None
    scores_hidden: bool = False
    teachers: Any = None
    gather_weight: Callable[[], None] | None = None

    def teacher_rows(self, *unused: Any) -> tuple[range, int, Tensor] | None:
        """Return this rank's rows of a teacher's output projection, all rows, and a tensor like it, on the last
        stage."""
        if not self.post_process:
            return None
        weight, rank = self.output_weight(), self.pg_collection.tp.rank()
        return range(rank * len(weight), (rank + 1) * len(weight)), self.true_vocab_size, weight.detach()

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> Any:
        if self.score is None:
            return super().sharded_state_dict(*arguments, **options)
        # Megatron's language model looks for the output layer.
        return super(LanguageModule, self).sharded_state_dict(*arguments, **options)

    def _postprocess(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        responses = PackedLayout.require(packed_seq_params).responses
        assert responses is not None
        if self.config.sequence_parallel:
            # The head returns the whole gradient of its input on every rank; each rank takes back its part.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        selected = hidden_states.squeeze(1)
        if not (getattr(self.decoder.layers[-1], "scores", False) and len(responses.index)):
            selected = selected.index_select(0, responses.index)
        return self.outputs(responses.spread(selected), responses)

    def outputs(self, selected: Tensor, rows: ResponseRows) -> Tensor:
        """Return (2, r) logprobs and entropies (nats) from (r, H) hidden states, in training with a teacher also the KL
        to it; or (1, r) values; or (1, r, H) hidden states."""
        if self.scores_hidden and not torch.is_grad_enabled():
            return selected[None]
        if self.gather_weight is not None:
            self.gather_weight()
        weight = self.output_weight()
        if self.score is not None:
            return values_of(selected, weight)
        group = self.pg_collection.tp
        shard: dict[str, Any] = {
            "vocab_start": group.rank() * weight.shape[0],
            "vocab_size": self.true_vocab_size,
            "all_reduce_max": partial(_all_reduce, group, dist.ReduceOp.MAX),
            "all_reduce_sum": partial(_all_reduce, group, dist.ReduceOp.SUM),
            "chunk_tokens": self.chunk_tokens,
        }
        logprobs, entropy = fused_logprobs(
            selected,
            weight,
            rows.targets,
            rows.temperatures,
            supports=rows.supports,
            check_values=False,  # `require_computable` checks them
            **shard,
        )
        # A merely reported entropy must not cost a gradient.
        found = [logprobs, entropy if self.entropy_gradient else entropy.detach()]
        if self.teachers and torch.is_grad_enabled():
            found.append(self.teachers.divergence((selected, weight, rows.temperatures), rows, **shard))
        return torch.stack(found)

    def output_weight(self) -> Tensor:
        """Return (V_local, H), the head's weight or the embedding's, or a value head's (1, H)."""
        if self.score is not None:
            return self.score.weight
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def _all_reduce(group: dist.ProcessGroup, operation: Any, tensor: Tensor) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
