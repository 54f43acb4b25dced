"""Known bugs of parallel training, each with the rows of the parity tests that it must fail: ``training_bugs.txt``."""

import importlib
from pathlib import Path
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.parallel import checks
from tests.parallel.harness import Row
from tests.support.planted import Bug, Patch, name_of, read_bugs

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


IN_OTHER_LIBRARIES: list[Bug] = [
    tied_embedding_is_not_reduced, query_and_key_norms_are_not_reduced, gradients_are_not_synchronised,
]  # fmt: skip
_NAMED: dict[str, Bug | None] = {"no bug": None, **{name_of(bug): bug for bug in IN_OTHER_LIBRARIES}}


def _row(bug: Bug | None, text: str) -> Row:
    """Read ``feature, family, layout[, option=number]: comparison[, in acceptance]``."""
    case, _, rest = text.partition(": ")
    comparison = rest.removesuffix(", in acceptance")
    feature, family, layout, *options = case.split(", ")
    caught_by = getattr(checks, f"check_{comparison}")
    given = tuple((name, int(value)) for name, value in (option.split("=") for option in options))
    steps = int(feature in ("lora", "distilled") or caught_by in (checks.check_norm, checks.check_biases))
    return Row(feature, family, layout, given, later=comparison != rest, bug=bug, caught_by=caught_by, steps=steps)


EVERY = [
    _row(_NAMED[bug] if isinstance(bug, str) else bug, text)
    for bug, rows in read_bugs(Path(__file__).with_name("training_bugs.txt"))
    for text in rows
]
BY_NAME = {name_of(row.bug): row.bug for row in EVERY if row.bug is not None}
