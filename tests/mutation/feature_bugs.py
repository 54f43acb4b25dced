"""Known bugs of low-rank factors, replayed routes, critics and exact distillation, as in ``bugs``."""

from tests.mutation.bugs import (
    BASE,
    EXPORTED,
    FACTORS,
    GRADIENTS,
    HEAD,
    KL,
    KLS,
    LORA,
    MEGATRON,
    MERGED,
    MICRO_BATCH,
    NORM,
    OBJECTIVE,
    PACKS,
    REFERENCE,
    ROUTES,
    SCORES,
    TEACHER,
    VALUES,
    planted,
    rows_of,
)

OF_FACTORS = [
    *planted(
        "gradients of a are not summed",
        LORA,
        "exchanged = copy_to_tensor_model_parallel_region if by_column",
        "exchanged = (lambda h, group: h) if by_column",
        ("lora", "qwen3", "tp2", FACTORS),
    ),
    *planted(
        "replicated factors are not marked",
        LORA,
        "factor.sequence_parallel = sequence_parallel and not (is_split or is_alone)",
        "factor.sequence_parallel = False",
        ("lora", "qwen3", "tp2-sp", FACTORS),
        ("lora", "qwen3_moe", "tp2-sp", FACTORS),
    ),
    *planted(
        "replicated factors count on every rank",
        LORA,
        "set_tensor_model_parallel_attributes(factor, is_split or is_alone,",
        "set_tensor_model_parallel_attributes(factor, True,",
        ("lora", "qwen3", "tp2-sp", NORM),
    ),
    *planted(
        "experts count only on the first rank",
        LORA,
        "set_tensor_model_parallel_attributes(factor, is_split or is_alone,",
        "set_tensor_model_parallel_attributes(factor, False,",
        ("lora", "qwen3_moe", "tp2-sp-ep2", NORM),
    ),
    *planted(
        "keys and values are swapped in the export",
        "backends.megatron.conversion.export",
        "    trained: list[Any] = [item for item in exported if item.parameter.requires_grad]\n",
        "    trained: list[Any] = [item for item in exported if item.parameter.requires_grad]\n"
        "    orders = [(item, item.rule.sources) for item in trained]\n"
        "    orders = [(item, (s[0], s[2], s[1]) if len(s) == 3 else s) for item, s in orders]\n"
        "    trained = [replace(item, rule=replace(item.rule, sources=sources)) for item, sources in orders]\n",
        ("lora", "qwen3", "single", FACTORS),
    ),
    *planted(
        "alpha is forgotten in the export of Megatron",
        LORA,
        "self.b.detach(), self.owner, self.scale)",
        "self.b.detach(), self.owner, 1.0)",
        ("lora", "qwen3", "tp2", MERGED),
    ),
    *planted(
        "alpha is forgotten in the export of FSDP",
        "backends.fsdp.lora",
        "of_b.new_ones(len(of_b), 1), self._settings.scale)",
        "of_b.new_ones(len(of_b), 1), 1.0)",
        ("lora", "qwen3_moe", "fsdp-dp2", MERGED),
    ),
    *planted(
        "weights are merged in place",
        LORA,
        "return merge_lora(weight, self.a.detach(), self.b.detach(), self.owner, self.scale)",
        "return weight.copy_(merge_lora(weight, self.a.detach(), self.b.detach(), self.owner, self.scale))",
        ("lora", "qwen3", "single", BASE),
    ),
    *planted(
        "the merged base is merged again",
        "backends.fsdp.lora",
        "result = torch.empty_like(rows)",
        "result = rows",
        ("lora", "qwen3_moe", "fsdp-dp2", MERGED),
    ),
    *planted(
        "owners are forgotten",
        LORA,
        "block_diagonal(self.b, self.owner)",
        "self.b.repeat(1, self.owner.shape[1])",
        ("lora", "qwen3", "single", SCORES),
    ),
    *planted(
        "gate and up are swapped",
        "backends.fsdp.lora",
        "self._of_experts(x, ends, a, b) for a, b in every]",
        "self._of_experts(x, ends, a, b) for a, b in [*every][::-1]]",
        ("lora", "qwen3_moe", "fsdp-dp2", SCORES),
    ),
    *planted(
        "the reference keeps its factors",
        "backends.common.trainer.state",
        "in zip(self._changing(base), values, strict=True):",
        "in zip(self._changing(base), values, strict=True) if any(each.any() for each in values) else ():",
        ("lora", "qwen3", "single", REFERENCE),
    ),
    *planted(
        "recomputed layers get no gradient",
        LORA,
        "return output.requires_grad_() if torch.is_grad_enabled() else output",
        "return output",
        ("lora", "qwen3", "recompute", FACTORS),
    ),
    *rows_of(
        None,
        *(("lora", "qwen3", layout, BASE) for layout in ("single", "tp2-sp")),
        ("lora", "qwen3_moe", "fsdp-dp2", MERGED),
    ),
]
OF_ROUTES = [
    *planted(
        "rows are shifted by one",
        ROUTES,
        "rows_of_tokens(pack)[",
        "rows_of_tokens(pack).roll(-1)[",
        ("forced routes", "qwen3_moe", "single", SCORES),
        ("forced routes", "deepseek_v3", "fsdp", SCORES),
    ),
    *planted(
        "dense layers are counted",
        ROUTES,
        "given = self.given[:, self.layers.index(layer)]",
        "given = self.given[:, self.layers.index(min(layer + self.layers.start, self.layers[-1]))]",
        ("forced routes", "deepseek_v3", "single", SCORES),
    ),
    *planted(
        "sequence parallel ranks take each others part",
        MICRO_BATCH,
        "return slice(self._sequence_group.rank() * count, (self._sequence_group.rank() + 1) * count)",
        "other = self._sequence_group.size() - 1 - self._sequence_group.rank()\n"
        "        return slice(other * count, (other + 1) * count)",
        ("forced routes", "qwen3_moe", "tp2-sp", SCORES),
    ),
    *planted(
        "prompts are routed live",
        ROUTES,
        "        given = None if replay.records else pack.routes\n",
        "        given, source = None if replay.records else pack.routes, shard.source[rows]\n"
        "        mine = mine.masked_fill((source >= 0) & ~pack.response_mask[source.clamp_min(0)], -1)\n",
        ("forced routes", "qwen3_moe", "single", SCORES),
    ),
    *planted(
        "unknown routes go to the first experts",
        ROUTES,
        "given = None if replay.records else pack.routes\n",
        "given = torch.where(pack.routes < 0, torch.arange(model.moe_top_k), pack.routes)\n",
        ("forced routes", "qwen3_moe", "single", SCORES),
    ),
    *planted(
        "probabilities are zeroed in Megatron",
        "backends.megatron.router",
        "return scores.gather(1, experts), experts",
        "return scores.gather(1, experts) * 0, experts",
        ("forced routes", "qwen3_moe", "single", SCORES),
    ),
    *planted(
        "probabilities are zeroed in FSDP",
        "backends.fsdp.experts",
        "return weights / scale * router.routed_scaling_factor",
        "return weights / scale * 0",
        ("forced routes", "deepseek_v3", "fsdp", SCORES),
    ),
    *planted(
        "probabilities have no gradient in Megatron",
        "backends.megatron.router",
        "return scores.gather(1, experts), experts",
        "return scores.gather(1, experts).detach(), experts",
        ("forced routes", "qwen3_moe", "single", GRADIENTS),
    ),
    *planted(
        "probabilities have no gradient in FSDP",
        "backends.fsdp.experts",
        "weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)",
        "weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts).detach()",
        ("forced routes", "qwen3_moe", "fsdp", GRADIENTS),
    ),
    *rows_of(None, *(("forced routes", "qwen3_moe", layout, GRADIENTS) for layout in ("single", "fsdp"))),
]
OF_CRITICS = [
    *planted(
        "a stored head is ignored",
        "backends.common.hugging_face.files",
        "        self._slices.setdefault(VALUE_HEAD,",
        "        self._slices.pop(VALUE_HEAD)\n        self._slices.setdefault(VALUE_HEAD,",
        ("values", "qwen2", "single", VALUES),
        ("values", "qwen2", "fsdp", VALUES),
    ),
    *planted(
        "the head is rounded",
        HEAD,
        "return values_of(selected, weight)",
        "return (weight.bfloat16() @ selected.T.bfloat16()).float()",
        ("values", "qwen2", "single", VALUES),
    ),
    *planted(
        "tensor ranks sum the gradients of equal states",
        HEAD,
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
        ("values", "qwen2", "tp2-sp", EXPORTED),
    ),
    *planted(
        "tensor ranks sum the heads gradient",
        MEGATRON,
        "        self.wrapped = self.state.wrapped = wrap_for_data_parallel(",
        "        for chunk in self.chunks:\n"
        "            chunk.score.weight.sequence_parallel = True\n"
        "        self.wrapped = self.state.wrapped = wrap_for_data_parallel(",
        ("values", "qwen2", "tp2-sp", EXPORTED),
    ),
    *planted(
        "values are not clipped",
        OBJECTIVE,
        "value_loss(*inputs, self._clip)",
        "value_loss(*inputs, None)",
        ("values", "qwen2", "fsdp", EXPORTED),
    ),
    *planted(
        "the newest values are the old ones",
        OBJECTIVE,
        "return values, pack.values, pack.returns",
        "return values, values.detach(), pack.returns",
        ("values", "qwen2", "single", EXPORTED),
    ),
    *rows_of(None, *(("values", "qwen2", layout, GRADIENTS) for layout in ("single", "tp2-sp"))),
]
OF_TEACHERS = [
    *planted(
        "the kl is the forward one",  # its gradient is the student's, too
        TEACHER,
        KL,
        "pair = (hidden, head.weight, temperatures), student[:3]\n"
        '        u, z = ((h @ w.T / t[:, None]).float()[:, : shard["vocab_size"]].log_softmax(1) for h, w, t in pair)\n'
        "        return (u.exp() * (u - z)).sum(1)",
        *(("distilled", "qwen3", layout, KLS) for layout in ("single", "fsdp")),
    ),
    *planted(
        "the teacher is a token late",
        PACKS,
        "else pack.teacher_hidden[shard.response_slot]",
        "else pack.teacher_hidden[shard.response_slot].roll(1, 0)",
        *(("distilled", "qwen3", layout, KLS) for layout in ("single", "fsdp")),
    ),
    *planted(
        "the teacher is at temperature 1",
        TEACHER,
        "rows.teacher.to(head.weight.dtype), rows.temperatures / head.factor",
        "rows.teacher.to(head.weight.dtype), rows.temperatures * 0 + 1",
        ("distilled", "qwen3", "fsdp", KLS),
    ),
    *planted(
        "every tensor rank sums its own columns",
        TEACHER,
        "head.softcap), **shard)",
        "head.softcap), vocab_size=len(student[1]))",
        ("distilled", "qwen3", "tp2-sp", KLS),
    ),
    *planted(
        "every rank reads the first columns",
        TEACHER,
        "checkpoint.read(name, 0, columns.start, held)",
        "checkpoint.read(name, 0, 0, held)",
        ("distilled", "qwen3", "tp2-sp", KLS),
    ),
    *planted(
        "the gradient is not summed over tensor ranks",
        TEACHER,
        KL,
        'once = iter([shard["all_reduce_sum"]])\n'
        '        shard["all_reduce_sum"] = lambda tensor: next(once, lambda _: None)(tensor)\n'
        f"        {KL}",
        ("distilled", "qwen3", "tp2-sp", EXPORTED),
    ),
    *planted(
        "teachers are swapped",
        TEACHER,
        "head = self.get(rows.source, self.get(None))",
        'head = self.get({"sums": "words", "words": "sums"}[rows.source])',
        ("distilled", "qwen3", "fsdp", KLS, ("second", 48)),
    ),
    *rows_of(None, *(("distilled", "qwen3", layout, EXPORTED) for layout in ("fsdp", "tp2-sp"))),
]
