"""A Hugging Face causal language model that ends in response logprobs instead of logits: [T, V] never exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from backends.common.packs import ResponseRows
from backends.fsdp import attention
from backends.fsdp.parallel import Groups
from slime_like.algorithms.head import fused_logprobs
from slime_like.config import RunConfig
from slime_like.errors import ConfigError

_PREFIX = "hugging_face."


class LogprobModel(nn.Module):
    """The root of what is sharded. Its forward pass returns logprobs and entropies of response tokens.

    Attributes:
        hugging_face: the model itself; names of its parameters are Hugging Face's module names.
        chunk_tokens: tokens whose logits exist at once.
        entropy_gradient: the loss has an entropy term. An entropy that only is reported must cost no gradient.
    """

    def __init__(self, hugging_face: Any, chunk_tokens: int | None, entropy_gradient: bool) -> None:
        super().__init__()
        self.hugging_face = hugging_face
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        layers: nn.ModuleList = self.hugging_face.base_model.layers
        return layers

    def forward(
        self, tokens: Tensor, positions: Tensor, boundaries: attention.Boundaries, rows: ResponseRows, routers: bool
    ) -> tuple[Tensor, ...]:
        """One rank's part of a pack.

        Args:
            tokens, positions: (T_local,) ids, and positions that begin at 0 in every sequence.
            boundaries: what attention reads.
            rows: the r local positions that predict a response token.
            routers: also return router logits.

        Returns:
            (2, r) logprobs and entropies (nats); behind it, if asked for, (T_local, E) router logits of every layer.
        """
        options = {"output_router_logits": True} if routers else {}
        output = self.hugging_face.base_model(
            input_ids=tokens[None], position_ids=positions[None].long(), use_cache=False, packed=boundaries, **options
        )
        weight: Tensor = self.hugging_face.get_output_embeddings().weight
        selected = output.last_hidden_state[0].index_select(0, rows.index)
        logprobs, entropy = fused_logprobs(
            selected,
            weight,
            rows.targets,
            rows.temperatures,
            vocab_size=weight.shape[0],
            chunk_tokens=self.chunk_tokens,
        )
        scored = torch.stack([logprobs, entropy if self.entropy_gradient else entropy.detach()])
        return (scored, *output.router_logits) if routers else (scored,)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Every parameter, sharded, under Hugging Face's module name; a tied head is not named twice."""
        self.shard_weights()
        return {name.removeprefix(_PREFIX): parameter for name, parameter in self.named_parameters()}

    def shard_weights(self) -> None:
        """Free whatever gathered weights a forward pass has left behind, of every layer.

        Not called reshard: FSDP makes the root a class with a method of that name, which frees the root alone.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum_gradients(self, now: bool) -> None:
        """Whether the next backward pass sums gradients over ranks, or adds them up where they are."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(now, recurse=False)
                module.set_is_last_backward(now)


def build(config: RunConfig, groups: Groups, device: torch.device) -> LogprobModel:
    """The model of ``config.model.path``, sharded over all ranks, its weights still unset.

    Nobody ever holds it whole: it is made without memory, cut, and only then given some. Master weights and their
    gradients are float32; they are gathered, and computed with, in ``model.dtype``.

    Raises:
        ConfigError: the model keeps buffers that cannot be made anew.
    """
    model = meta_model(config, torch.float32)
    recompute_layers(model, config.trainer.recompute)
    _shard(model, config, groups)
    model.to_empty(device=torch.device("cpu") if config.trainer.optimizer.offload else device)
    _restore_buffers(model.hugging_face, device)
    return model


def meta_model(config: RunConfig, dtype: torch.dtype) -> LogprobModel:
    """The model of ``config.json`` as shapes alone."""
    attention.register()
    remote = config.model.trust_remote_code
    hf_config = AutoConfig.from_pretrained(config.model.path, trust_remote_code=remote)
    with torch.device("meta"):
        hugging_face = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=remote
        )
    # transformers leaves a padding token's embedding without gradient; here a token's id says nothing about it.
    hugging_face.get_input_embeddings().padding_idx = None
    hugging_face.eval()  # no dropout: old and current logprobs mean the same
    return LogprobModel(hugging_face, config.trainer.head_chunk_tokens, config.algorithm.entropy_coef > 0)


def recompute_layers(model: LogprobModel, what: str) -> None:
    """Recompute whole layers in backward, or their MLPs alone, whose activations are the widest."""
    for layer in model.layers:
        if what == "full":
            recompute(layer)
        elif what == "selective":
            recompute(layer.get_submodule("mlp"))


def _shard(model: LogprobModel, config: RunConfig, groups: Groups) -> None:
    """Every layer is gathered by itself; embedding, last norm and head together, by the root."""
    dtype = getattr(torch, config.model.dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    on_host = config.trainer.optimizer.offload
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": groups.mesh, "mp_policy": precision, "offload_policy": offload}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=config.trainer.fsdp.reshard_after_forward, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP takes means over ranks. A step's gradients are sums, divided once, by the step's own denominator.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _restore_buffers(hugging_face: nn.Module, device: torch.device) -> None:
    """Values that follow from the configuration alone are in no checkpoint: make their modules anew and copy."""
    for name, module in hugging_face.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        config = getattr(module, "config", None)
        if not type(module).__name__.endswith("RotaryEmbedding") or config is None:
            raise ConfigError(
                [f"model.path: its module {name} keeps {', '.join(own)}, which this backend cannot set; use megatron"]
            )
        fresh: nn.Module = type(module)(config=config)
        for key, value in fresh.named_buffers(recurse=False):
            setattr(module, key, value.to(device))
