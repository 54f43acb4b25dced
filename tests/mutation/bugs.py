"""Known bugs of parallel training, each with the rows of the parity tests that it must fail."""

import importlib
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.parallel import checks
from tests.parallel.harness import Row
from tests.support.planted import Bug, Edit, Patch

SCORES, GRADIENTS, NORM, BIASES = checks.check_scores, checks.check_gradients, checks.check_norm, checks.check_biases
REFERENCE, FACTORS = checks.check_reference, checks.check_factor_gradients
MERGED, BASE, VALUES, KLS = checks.check_merged, checks.check_base, checks.check_values, checks.check_kls
EXPORTED = checks.check_exported_gradients


def rows_of(bug: Bug | None, *cases: tuple[Any, ...]) -> list[Row]:
    """Return rows of features, families, layouts, and the comparisons that must fail; then options of the case."""
    rows = []
    for feature, family, layout, caught_by, *options in cases:
        steps = int(feature in ("lora", "distilled") or caught_by in (NORM, BIASES))
        rows.append(Row(feature, family, layout, tuple(options), bug=bug, caught_by=caught_by, steps=steps))
    return rows


def planted(name: str, module: str, old: str, new: str, *cases: tuple[Any, ...]) -> list[Row]:
    return rows_of(Edit(name, module, old, new), *cases)


# ------------------------------------------------------------------------------------------------ in other libraries
finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")
"""By name, because the package has a function of the same name."""


def tied_embedding_is_not_reduced(patch: Patch) -> None:
    patch.setattr(finalization, "_allreduce_word_embedding_grads", lambda *arguments: None)


def query_and_key_norms_are_not_reduced(patch: Patch) -> None:
    correct = finalization._allreduce_non_tensor_model_parallel_grads

    def reduce(model: Any, *arguments: Any) -> None:
        named = [(name.split(".")[-2], each) for chunk in model for name, each in chunk.named_parameters()]
        norms = [(each, each.main_grad.clone()) for name, each in named if name in ("q_layernorm", "k_layernorm")]
        correct(model, *arguments)
        for parameter, gradient in norms:
            parameter.main_grad.copy_(gradient)

    patch.setattr(finalization, "_allreduce_non_tensor_model_parallel_grads", reduce)


def gradients_are_not_synchronised(patch: Patch) -> None:
    """Every rank of FSDP continues with its rows of its own unreduced gradient."""

    def reduce(params: Any, grads: Any, group: Any, stream: Any, *rest: Any) -> Any:
        for parameter, gradient in zip(params, grads, strict=True):
            rows = -(-gradient.shape[0] // group.size())
            part = gradient[group.rank() * rows : (group.rank() + 1) * rows].contiguous()
            shard = parameter.to_sharded_dtensor(part)
            known = parameter.sharded_param.grad
            parameter.sharded_param.grad = shard if known is None else known + shard
        grads.clear()
        return grads, None, stream, None, None, None, None

    patch.setattr(_fsdp_param_group, "foreach_reduce", reduce)


# ---------------------------------------------------------------------------------------------------------- the table
CONTEXT, PACKS, BALANCE = "slime_like.algorithms.context", "backends.common.step.packs", "backends.common.step.balance"
ATTENTION, PREFIXES = "backends.common.attention", "backends.common.attention.prefixes"
RECURRENCE, TEACHER = "backends.common.linear_attention", "backends.common.step.teacher"
ROUTES, OBJECTIVE = "backends.common.step.routes", "backends.common.step.objective"
MICRO_BATCH, MEGATRON, FSDP = "backends.megatron.micro_batch", "backends.megatron.trainer", "backends.fsdp.trainer"
LORA, HEAD = "backends.megatron.lora", "backends.megatron.head"
KL = "return fused_reverse_kl(Head(*student), Head(hidden, head.weight, temperatures, head.softcap), **shard)"

BEGIN = Edit(
    "sequences begin where the rank begins",
    ATTENTION,
    'load_option("gathered-attention").of(boundaries, shard.parents, part, group)',
    'load_option("gathered-attention").of(\n'
    "        (boundaries - group.rank() * length).clamp(0, length), None, range(length), group)",
)
ANEW = Edit(
    "positions begin anew on every rank",
    FSDP,
    "self.model(shard.tokens, shard.position_ids,",
    "self.model(shard.tokens, torch.arange(shard.tokens.numel(), dtype=torch.int32),",
)
OF_TRAINING = [
    *planted(
        "logits are read at the token itself",
        CONTEXT,
        "scoring = response_logit_index(packed)\n",
        "scoring = response_logit_index(packed) + 1\n",
        ("plain", "qwen3", "single", SCORES),
        ("values", "qwen2", "single", VALUES),
    ),
    *planted(
        "positions stay behind the zigzag",
        MICRO_BATCH,
        "rotary_table(rotary.inv_freq, shard.position_ids,",
        "rotary_table(rotary.inv_freq, torch.arange(shard.position_ids.numel()),",
        ("plain", "qwen3", "cp2", SCORES),
    ),
    *planted(
        "ring gets contiguous chunks",
        CONTEXT,
        "return segment, torch.where(local_offset < chunk, front, back)",
        "return segment, cp_rank * local_lengths[segment] + local_offset",
        ("plain", "qwen3", "cp2", SCORES),
    ),
    *rows_of(BEGIN, ("plain", "qwen3", "cp2-allgather", SCORES), ("plain", "qwen3", "fsdp-cp2", SCORES)),
    *rows_of(ANEW, ("plain", "qwen3", "fsdp-cp2", SCORES)),
    *planted(
        "a prefix is seen by the rank that holds it",
        PREFIXES,
        "        # The segment that the part begins inside",
        "        held = (boundaries[:-1] >= part.start) & (boundaries[1:] <= part.stop)\n"
        "        parents = None if parents is None else torch.where(held[parents.clamp_min(0)], parents, -1)\n"
        "        # The segment that the part begins inside",
        ("shared", "qwen3", "cp2", SCORES),
    ),
    *planted(
        "the package is given the ranks own boundaries",
        ATTENTION,
        'found: AnyAttention = load_option("ring-flash-attention").of(boundaries, group)',
        'kind = load_option("ring-flash-attention")\n'
        "        own = (boundaries - group.rank() * length).clamp(0, length)\n"
        "        found: AnyAttention = kind(kind.of(boundaries, group).segments.of(own, 0, 1), group)",
        ("plain", "qwen3", "cp2-ring_flash_attn", SCORES),
    ),
    *planted(
        "the package is given zigzag chunks",
        MICRO_BATCH,
        "layout = context_layout_of(self._attention)",
        'layout = "zigzag"',
        ("plain", "qwen3", "cp2-ring_flash_attn", SCORES),
    ),
    *planted(
        "padding is routed like the last sequence",
        BALANCE,
        "torch.where(is_real, sequence, len(lengths))",
        "torch.where(is_real, sequence, len(lengths) - 1)",
        ("plain", "qwen3_moe", "single", GRADIENTS),
        ("plain", "deepseek_v3_direct", "single", BIASES),
    ),
    *planted(
        "fillers are routed like samples",
        BALANCE,
        " & (not pack.is_filler)",
        "",
        ("plain", "qwen3_moe", "pp2-vpp2", GRADIENTS),
    ),
    *planted(
        "every micro-batch takes its own mean",
        MEGATRON,
        "return loss, torch.zeros((),",
        "return loss / batch.pack.token_weights.sum().clamp_min(1e-6), torch.zeros((),",
        ("plain", "qwen3", "single", GRADIENTS),
    ),
    *planted(
        "replicas are averaged",
        MEGATRON,
        "chunk.scale_gradients(1.0 / denominator)",
        "chunk.scale_gradients(1.0 / denominator / self.coordinates.data_size)",
        ("plain", "qwen3", "dp2", GRADIENTS),
    ),
    *planted(
        "ranks are averaged",
        "backends.fsdp.parallel",
        "module.set_gradient_divide_factor(1.0)",
        "pass",
        ("plain", "qwen3", "fsdp-dp2", GRADIENTS),
    ),
    *planted(
        "the denominator is multiplied by the replicas",
        FSDP,
        "self.optimizer.scale(1.0 / denominator)",
        "self.optimizer.scale(1.0 / denominator / self.groups.replicas.size())",
        ("plain", "qwen3", "fsdp-dp2", GRADIENTS),
    ),
    *planted(
        "loss is scaled by the context size",
        PACKS,
        "else _SumForward.apply(part, group)",
        "else _SumForward.apply(part, group) + (group.size() - 1) * (part - part.detach())",
        ("plain", "qwen3", "cp2", GRADIENTS),
        ("plain", "qwen3", "fsdp-cp2", GRADIENTS),
        ("values", "qwen2", "cp2", EXPORTED),
        ("distilled", "qwen3", "cp2", EXPORTED),
    ),
    *planted(
        "only the last micro-batch is summed",
        "backends.fsdp.model",
        "                module.set_is_last_backward(now)\n",
        "                module.set_is_last_backward(now)\n"
        "                groups = module._get_fsdp_state()._fsdp_param_groups if now else []\n"
        "                for parameter in [each for group in groups for each in group.fsdp_params]:\n"
        "                    parameter.unsharded_accumulated_grad = None\n"
        '                    if hasattr(parameter, "_unsharded_param"):\n'
        "                        parameter._unsharded_param.grad = None\n",
        ("plain", "qwen3", "fsdp-cp2", GRADIENTS),
    ),
    *planted(
        "the norm is the ranks own",
        "backends.fsdp.optimizer",
        "dist.all_reduce(total)",
        "pass",
        ("plain", "qwen3", "fsdp-dp2", NORM),
    ),
    *rows_of(tied_embedding_is_not_reduced, ("plain", "qwen2", "pp2", GRADIENTS)),
    *rows_of(query_and_key_norms_are_not_reduced, ("plain", "qwen3", "tp2-sp", GRADIENTS)),
    *rows_of(
        gradients_are_not_synchronised,
        ("plain", "qwen3", "fsdp-dp2", GRADIENTS),
        ("lora", "qwen3_moe", "fsdp-dp2", FACTORS),
    ),
    *planted(
        "norms of value heads are not reduced",
        "backends.megatron.families.gated_delta",
        "copy_to_tensor_model_parallel_region(self.norm_weight)",
        "self.norm_weight",
        ("plain", "qwen3_5_text", "tp2", GRADIENTS),
    ),
    *planted(
        "states begin where the rank begins",
        RECURRENCE,
        "        return cls(Boundaries.of(padded), back.argsort(), back, group if size > 1 else None)",
        "        here, length = torch.arange(shard.tokens.numel()), shard.tokens.numel()\n"
        "        part = (padded - group.rank() * length).clamp(0, length)\n"
        '        return cls(Boundaries.of(padded // size if shard.layout == "zigzag" else part), here, here, None)',
        ("plain", "qwen3_5_text", "cp2", SCORES),
        ("plain", "qwen3_5_text", "fsdp-cp2", SCORES),
    ),
    *planted(
        "the convolution sees the sequence before",
        RECURRENCE,
        "conv.flatten(0, 1), self.boundaries)",
        "conv.flatten(0, 1), Boundaries.of(self.boundaries.cu_seqlens[[0, -1]]))",
        ("plain", "qwen3_5_text", "fsdp", SCORES),
    ),
    *planted(
        "a pack has one state",
        RECURRENCE,
        "b.sigmoid().flatten(1), self.boundaries)",
        "b.sigmoid().flatten(1), Boundaries.of(self.boundaries.cu_seqlens[[0, -1]]))",
        ("plain", "qwen3_5_text", "fsdp", SCORES),
    ),
    *planted(
        "routers loss is divided by the denominator",
        BALANCE,
        "return cls(coefficient * denominator / int(total), int(total))",
        "return cls(coefficient / int(total), int(total))",
        ("plain", "qwen3_moe", "single", GRADIENTS),
    ),
    *planted(
        "experts shares stay in the order of tokens",
        "backends.megatron.router",
        "probs.mT.flatten().index_select(0, routes)",
        "probs[routing_map]",
        ("plain", "qwen3_moe", "single", SCORES),
    ),
    *planted(
        "biases move towards the load",
        BALANCE,
        "bias += self.rate",
        "bias -= self.rate",
        ("plain", "deepseek_v3_direct", "single", BIASES),
    ),
    *planted(
        "recomputed layers count twice",
        BALANCE,
        "if layer not in self.counted:",
        "if True:",
        ("plain", "deepseek_v3_direct", "recompute", BIASES),
    ),
    *planted(
        "sinks are left out",
        "backends.common.attention.packed_attention",
        "_Attend.apply(q, k, v, sinks,",
        "_Attend.apply(q, k, v, None if sinks is None else sinks - 1e4,",
        ("plain", "gpt_oss", "single", SCORES),
        ("plain", "gpt_oss", "fsdp", SCORES),
    ),
    *planted(
        "windows have one more key",
        "backends.common.attention.packed_attention",
        "return self.window if",
        "return self.window + 1 if",
        ("plain", "mistral", "single", SCORES),
        ("plain", "gemma3", "single", SCORES),
        ("plain", "gpt_oss", "fsdp", SCORES),
    ),
    *planted(
        "windows end where the rank begins",
        PREFIXES,
        "else slice(max(self.far.start, self.far.stop - window + 1), self.far.stop)",
        "else slice(self.far.stop, self.far.stop)",
        ("plain", "gpt_oss", "fsdp-cp2", SCORES),
    ),
    *planted(
        "norms multiply by the weight alone",
        "backends.megatron.norm",
        "1 + self.weight.float() if self.is_centered else self.weight",
        "self.weight",
        ("plain", "gemma3", "single", SCORES),
    ),
    *planted(
        "the supports are forgotten",
        PACKS,
        "supports = pad_supports(pack.support_ids, pack.support_sizes, shard.response_slot)",
        "pass",
        ("supports", "qwen3", "single", SCORES),
    ),
    *planted(
        "supports belong to the row before",
        PACKS,
        "pad_supports(pack.support_ids, pack.support_sizes, shard.response_slot)",
        "pad_supports(pack.support_ids, pack.support_sizes, shard.response_slot).roll(1, 0)",
        ("supports", "qwen3", "single", SCORES),
    ),
    *planted(
        "every rank counts columns from zero",
        "slime_like.algorithms.head",
        "forbid_outside(x, supports[part], shard.start)",
        "forbid_outside(x, supports[part], 0)",
        ("supports", "qwen3", "tp2-sp", SCORES),
    ),
    *planted(
        "the trainer truncates its own logits",
        "slime_like.algorithms.softmax",
        "x.masked_fill_(~(allowed[:, :-1] | is_whole),",
        "x.masked_fill_((x.argsort(1, descending=True).argsort(1) >= (supports >= 0).sum(1)[:, None]) & ~is_whole,",
        ("supports", "qwen3", "single", SCORES),
    ),
    *rows_of(
        None,
        *(("plain", family, "single", GRADIENTS) for family in ("qwen3_moe", "gpt_oss", "mistral", "gemma3")),
        ("plain", "qwen3_moe", "pp2-vpp2", GRADIENTS),
        ("plain", "deepseek_v3_direct", "single", BIASES),
        ("plain", "gpt_oss", "fsdp", NORM),
        ("plain", "qwen3", "fsdp-dp2", NORM),
        ("supports", "qwen3", "single", SCORES),
    ),
]
