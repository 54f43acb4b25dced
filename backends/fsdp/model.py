"""A Hugging Face causal language model that returns response logprobs instead of logits: [T, V] never exists."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface

from backends.common.step.balance import RoutedTokens
from backends.common.step.packs import ResponseRows
from backends.common.trainer.state import is_added
from backends.fsdp import attention, experts
from backends.fsdp.attention import replace_recurrence
from backends.fsdp.lora import add_lora
from backends.fsdp.names import TensorRows, checkpoint_names, pieces
from backends.fsdp.output import Output
from backends.fsdp.parallel import FsdpGroups, parameters_on_meta, recompute_layers, shard_layers, shard_of
from slime_like.algorithms.head import fused_logprobs, values_of
from slime_like.config import ModelConfig, TrainerConfig
from slime_like.errors import ConfigError
from slime_like.models.dimensions import HEADS, VALUE_HEAD
from slime_like.models.tower import transformers_config
from slime_like.models.weight_files import keeps_type
from slime_like.system.words import pluralize

_PREFIX, _SCORE = "hugging_face.", VALUE_HEAD.partition(".")[0]
_SAYS_NOTHING = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Configuration settings that change no logprob."""


class FsdpModel(nn.Module):
    """The root module of sharding. Its forward pass returns logprobs and entropies of response tokens.

    Attributes:
        names: its parameters' names in checkpoints, by module name.
        lora_weights: low-rank factors by their parameter's name in checkpoints; only they are trained, if any.
        routed: what routers need in the next forward pass and its backward pass.
        routed_layers: layers whose routers follow it.
        chunk_tokens: tokens whose logits exist at the same time.
        recurs: some layers have linear attention.
        values: a value model, whose ``score`` takes the place of the logits' head.
        entropy_gradient: the loss has an entropy term. A merely reported entropy must cost no gradient.
        scores_hidden: outside of training, it returns hidden states instead.
        teachers: ``Teachers`` to which training needs the exact KL.
    """

    def __init__(
        self, hugging_face: Any, names: dict[str, str], chunk_tokens: int | None, entropy_gradient: bool
    ) -> None:
        super().__init__()
        self.hugging_face = hugging_face
        self.names = names
        self.lora_weights: dict[str, Any] = {}
        self.layers_name = _layers_name(hugging_face)
        self.recurs = False
        for layer in self.layers:
            attention.hand_on(layer)
            self.recurs |= replace_recurrence(layer)
        self.routed: RoutedTokens | None = None
        follows = [experts.follow_routes(layer, index, lambda: self.routed) for index, layer in enumerate(self.layers)]
        self.routed_layers = [index for index, follow in enumerate(follows) if follow]
        self.values = hasattr(hugging_face, _SCORE)
        self.output = Output.of(hugging_face.config)
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient
        self.scores_hidden = False
        self.teachers: Any = None

    def teacher_rows(self, path: Path, own: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        """Return which rows of a teacher's output projection to read, all, and how its logits are computed."""
        output = Output.of(transformers_config(path, own.trust_remote_code))
        rows = len(self.hugging_face.get_output_embeddings().weight)
        like = torch.empty(0, dtype=getattr(torch, own.dtype), device=device)
        return range(rows), rows, like, output.factor, output.cap

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        layers: nn.ModuleList = self.hugging_face.get_submodule(self.layers_name)
        return layers

    def forward(self, tokens: Tensor, *part: Any) -> Tensor:
        """Return ``score_part`` of one rank's part of a pack or, given only ``tokens``, the model's logits or values.

        FSDP gathers the root's weights only around this method.
        """
        if part:
            return self.score_part(tokens, *part)
        self.routed = None
        if self.values:
            output = self.hugging_face.base_model(input_ids=tokens[None], use_cache=False)
            return values_of(output.last_hidden_state[0], self.hugging_face.score.weight).T
        logits: Tensor = self.hugging_face(input_ids=tokens[None], use_cache=False).logits[0]
        return logits

    def score_part(
        self, tokens: Tensor, positions: Tensor, mixers: attention.TokenMixers, rows: ResponseRows
    ) -> Tensor:
        """Return (2, r) logprobs and entropies (nats) of one rank's part of a pack.

        Args:
            tokens, positions: (T_local,) ids, and positions that begin at 0 in every sequence.
            mixers: attention and recurrence within the pack.
            rows: the local positions that predict the r response tokens.
        """
        output = self.hugging_face.base_model(
            input_ids=tokens[None], position_ids=positions[None].long(), use_cache=False, packed=mixers
        )
        return self.outputs(rows.spread(output.last_hidden_state[0].index_select(0, rows.index)), rows)

    def outputs(self, selected: Tensor, rows: ResponseRows) -> Tensor:
        """Return (2, r) logprobs and entropies (nats) from (r, H) hidden states, in training with a teacher also the KL
        to it; or (1, r) values; or (1, r, H) hidden states."""
        if self.scores_hidden and not torch.is_grad_enabled():
            return selected[None]
        if self.values:
            return values_of(selected, self.hugging_face.score.weight)
        hidden, weight = self.output.projection(self.hugging_face.get_output_embeddings(), selected)
        logprobs, entropy = fused_logprobs(
            hidden,
            weight,
            rows.targets,
            rows.temperatures / self.output.factor,
            vocab_size=weight.shape[0],
            chunk_tokens=self.chunk_tokens,
            softcap=self.output.cap,
            supports=rows.supports,
            check_values=False,  # `require_computable` checks them
        )
        found = [logprobs, entropy if self.entropy_gradient else entropy.detach()]
        if self.teachers and torch.is_grad_enabled():
            own = hidden, weight, rows.temperatures / self.output.factor, self.output.cap
            shard = {"vocab_size": weight.shape[0], "chunk_tokens": self.chunk_tokens}
            found.append(self.teachers.divergence(own, rows, **shard))
        return torch.stack(found)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return every sharded parameter by its name in checkpoints. A tied head is not named twice."""
        self.shard_weights()
        short = {name.removeprefix(_PREFIX): parameter for name, parameter in self.named_parameters()}
        return {name if is_added(name) else self.names[name]: parameter for name, parameter in short.items()}

    def own_by_name(self) -> dict[str, nn.Parameter]:
        """Return the parameters that a Hugging Face checkpoint of the model has."""
        return {name: each for name, each in self.parameters_by_name().items() if not is_added(name)}

    def stored_by_name(self) -> dict[str, Tensor]:
        """Return the tensors of a training checkpoint, which has no frozen base."""
        every = self.parameters_by_name()
        if self.lora_weights:
            return {name: each for name, each in every.items() if is_added(name)}
        return every | self.kept_by_name()

    def kept_by_name(self) -> dict[str, Tensor]:
        """Return routers' biases and layers' scalars by their names in checkpoints: whole on every rank, float32, never
        trained.

        ``build`` ensures that a checkpoint has no other tensors besides parameters.
        """
        return {self.names[name]: buffer for name, buffer in kept_buffers(self.hugging_face).items()}

    def pieces(self, name: str, values: Tensor, start: int = 0) -> list[TensorRows]:
        """List the tensors, of a Hugging Face checkpoint or an adapter, in ``values``; see ``names.pieces``."""
        if not is_added(name):
            return pieces(name, values, start)
        found: list[TensorRows] = self.hugging_face.get_submodule(name.rpartition(".")[0]).pieces(name, values, start)
        return found

    def own_logits(self, tokens: Tensor) -> Tensor:
        """Compute (T, V) logits or (T, 1) values of a sequence with transformers' attention and experts. Collective."""
        self.hugging_face.set_attn_implementation("eager")
        self.hugging_face.set_experts_implementation("eager")
        try:
            logits: Tensor = self(tokens)
            return logits
        finally:
            self.hugging_face.set_attn_implementation(attention.NAME)
            self.hugging_face.set_experts_implementation(experts.NAME)

    @contextlib.contextmanager
    def even_head(self) -> Iterator[None]:
        """Inside, a value model's head weighs all hidden units alike, so that its values tell of them."""
        if not self.values:
            yield
            return
        head = shard_of(self.hugging_face.score.weight).detach()
        before = head.clone()
        head.fill_(self.hugging_face.score.in_features**-0.5)
        yield
        self.shard_weights()
        head.copy_(before)

    def tied_names(self) -> set[str]:
        """Return names of parameters that share another one's memory. A checkpoint may have them, but needn't."""
        every = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        tied = {name.removeprefix(_PREFIX) for name in every - {name for name, _ in self.named_parameters()}}
        return tied | set(HEADS) if tied & set(HEADS) else tied

    def shard_weights(self) -> None:
        """Free all gathered weights that a forward pass left behind, in every layer.

        Not named reshard, because FSDP gives the root's class a method of that name, which frees only the root.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum_gradients(self, now: bool) -> None:
        """Choose whether the next backward pass sums gradients over ranks or accumulates them locally."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(now, recurse=False)
                module.set_is_last_backward(now)


def build(
    settings: ModelConfig,
    trainer: TrainerConfig,
    groups: FsdpGroups,
    device: torch.device,
    entropy_gradient: bool = False,
    values: bool = False,
) -> FsdpModel:
    """Build the model of ``settings.path``, sharded over all ranks, without weights.

    No rank ever holds the whole model: it is created without memory, sharded, and then allocated. Master weights and
    their gradients are float32; weights are gathered, and computed with, in ``model.dtype``.

    Raises:
        ConfigError: the model cannot be sharded, read or written.
    """
    with parameters_on_meta():
        model = _model(settings, torch.float32, trainer.head_chunk_tokens, entropy_gradient, values)
    _require_nothing_else(model.hugging_face)
    # Buffers follow from the configuration, except routers' biases, which are read from the checkpoint later.
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    recompute_layers(model, trainer)
    shard_layers(model, getattr(torch, settings.dtype), trainer, groups)
    model.to_empty(device=torch.device("cpu") if trainer.optimizer.offload else device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model


def meta_model(
    settings: ModelConfig,
    dtype: torch.dtype,
    chunk_tokens: int | None = None,
    entropy_gradient: bool = False,
    values: bool = False,
) -> FsdpModel:
    """Build the model of ``config.json`` as shapes only."""
    with torch.device("meta"):
        return _model(settings, dtype, chunk_tokens, entropy_gradient, values)


def sharded_meta_model(
    settings: ModelConfig,
    trainer: TrainerConfig,
    groups: FsdpGroups,
    entropy_gradient: bool = False,
    values: bool = False,
) -> FsdpModel:
    """Build the model of ``build`` as sharded shapes only. Offloaded state stays with everything else."""
    optimizer = trainer.optimizer.model_copy(update={"offload": False})
    trainer = trainer.model_copy(update={"optimizer": optimizer})
    model = meta_model(settings, torch.float32, trainer.head_chunk_tokens, entropy_gradient, values)
    recompute_layers(model, trainer)
    shard_layers(model, getattr(torch, settings.dtype), trainer, groups)
    return model


def _model(
    settings: ModelConfig, dtype: torch.dtype, chunk_tokens: int | None, entropy_gradient: bool, values: bool
) -> FsdpModel:
    """Create the model with transformers from ``config.json``, on the context's device."""
    AttentionInterface.register(attention.NAME, attention.forward)
    ExpertsInterface.register(experts.NAME, experts.forward)
    path, remote = settings.path, settings.trust_remote_code
    try:
        hugging_face = AutoModelForCausalLM.from_config(
            transformers_config(path, remote),
            dtype=dtype,
            attn_implementation=attention.NAME,
            experts_implementation=experts.NAME,
            trust_remote_code=remote,
        )
    except (ValueError, ImportError, KeyError) as error:
        # A model with one class per kind of attention looks the name up in its table.
        unknown_attention = isinstance(error, KeyError) and error.args == (attention.NAME,)
        reason = "its attention has another class" if unknown_attention else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"model.path={path}: transformers has no causal language model for it whose attention can be replaced "
            f"({reason}); use another one, with model.trust_remote_code if it has custom code"
        ) from error
    # transformers leaves a padding token's embedding without gradient; here, padding is not marked by a token id.
    hugging_face.get_input_embeddings().padding_idx = None
    _keep_router_biases(hugging_face)
    hugging_face.eval()  # no dropout: old and current logprobs must be comparable
    if hugging_face.base_model is hugging_face:
        raise ConfigError(
            f"model.path={path}: {type(hugging_face).__name__} has no part without its head; use another model"
        )
    if values:
        hugging_face.score = nn.Linear(hugging_face.config.get_text_config().hidden_size, 1, bias=False, dtype=dtype)
        hugging_face.set_output_embeddings(nn.Identity())
    names = checkpoint_names(hugging_face, kept_buffers(hugging_face), path)
    model = FsdpModel(hugging_face, names, chunk_tokens, entropy_gradient)
    add_lora(settings, model)
    return model


def computes_alike(other: Path, model: ModelConfig) -> bool:
    """Return whether another checkpoint's configuration computes the same function as ``model.path``'s."""
    ours, theirs = (transformers_config(path, model.trust_remote_code).to_dict() for path in (model.path, other))
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    return all(name in _SAYS_NOTHING or name.endswith("_token_id") for name in differing)


def kept_buffers(hugging_face: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a checkpoint (``keeps_type``), by module name, in layer order."""
    return {name: buffer for name, buffer in hugging_face.named_buffers() if keeps_type(name)}


def _keep_router_biases(hugging_face: nn.Module) -> None:
    """Make buffers of routers' biases that a family holds as parameters, which would be gathered in ``model.dtype``."""
    for name, parameter in [*hugging_face.named_parameters()]:
        if keeps_type(name):
            owner, _, leaf = name.rpartition(".")
            module = hugging_face.get_submodule(owner)
            delattr(module, leaf)
            module.register_buffer(leaf, torch.zeros(parameter.shape, dtype=torch.float32))  # read from the file later


def _require_nothing_else(hugging_face: nn.Module) -> None:
    """Reject checkpoint tensors that would neither be loaded nor reach engines."""
    known = {name for name, _ in hugging_face.named_parameters(remove_duplicate=False)}
    others = [name for name in hugging_face.state_dict() if name not in known | set(kept_buffers(hugging_face))]
    if others:
        raise ConfigError(
            f"model.path: its checkpoint has {pluralize(len(others), 'tensor')} ({others[0]}, ...) besides parameters, "
            "routers' biases and layers' scalars, which trainer.backend=fsdp does not keep; use another model"
        )


def _layers_name(hugging_face: Any) -> str:
    """Find the decoder's layers: the outermost module list with as many entries as the configuration has layers."""
    count = hugging_face.config.get_text_config().num_hidden_layers
    for name, module in hugging_face.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return str(name)
    raise ConfigError(
        f"model.path: {type(hugging_face).__name__} has no list of its {count} layers to shard; use another model"
    )
