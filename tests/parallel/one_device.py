"""Checks of a trainer in bfloat16 on one device, a GPU if there is one.

Gradients and logprobs are compared with the float64 reference on rounded weights and whole sequences. State that is
moved or saved is compared bit for bit.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron import model
from backends.megatron.experts import GroupedLinear
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.cases import (
    WIDE_CLIP,
    parity_config,
    samples_with_loss,
    shared_packs,
    sharing_sequences,
    with_supports,
)
from tests.parallel.checks import check_tensors
from tests.parallel.reference import Reference
from tests.parallel.steps import Trainer, exported_gradients, held_writes, running, take_step
from tests.parallel.test_no_waiting import strict_windows
from tests.parallel.tiny import save_checkpoint, scored_sequences, stacked_experts

MEAN_BOUND = 1e-2
"""Nats per token; twice the observed value."""
GRADIENT_BOUND = 0.1
"""Relative by norm; twice the observed value. A wrong read or a missing reduction gives tens of percent."""
ROUTED_MEAN_BOUND, ROUTED_GRADIENT_BOUND = 0.04, 0.3
"""Bounds for a mixture of experts, in which rounding sends some tokens to other experts."""
LENGTHS = [(5, 9), (3, 1), (11, 6), (60, 2), (2, 150)]


def _config(backend: str, checkpoint: Path, root: Path, settings: dict[str, Any], **algorithm: Any) -> RunConfig:
    layout = {"backend": backend, **settings}
    return parity_config(checkpoint, root / "run", layout, "bfloat16", **{**WIDE_CLIP, **algorithm})


@contextlib.contextmanager
def unwaiting() -> Iterator[None]:
    """Raise an error inside if the host waits for its device."""
    if not torch.cuda.is_available():
        with strict_windows():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients_of(trainer: Trainer, packs: list[PackedTrajectory], denominator: float, waits: bool) -> dict[str, Tensor]:
    trainer.begin_step(denominator, real_tokens(packs))
    with contextlib.nullcontext() if waits else unwaiting():
        trainer.accumulate(packs, last=True)
    exported = exported_gradients(trainer, denominator)
    return stacked_experts({name: tensor.float().cpu() for name, tensor in exported.items()})


def expected_logprobs(checkpoint: Path, config: RunConfig, sequences: list[ScoredTrajectory]) -> Tensor:
    """Return the reference's logprobs with rounded weights."""
    reference = Reference(checkpoint, config.algorithm)
    reference.round_weights()
    return torch.cat([reference.score(sequence)[0].detach() for sequence in sequences])


def _step(trainer: Trainer, packs: list[PackedTrajectory]) -> None:
    take_step(trainer, packs, 5.0, last=True)


def logprobs_of(trainer: Trainer, packs: list[PackedTrajectory], weights: Any = "policy") -> Tensor:
    scored = trainer.score(packs, weights)
    assert scored is not None
    return torch.cat([next(iter(each.values())).cpu() for each in scored])


def _check_step(
    placement: RankPlacement,
    root: Path,
    family: str,
    sequences: list[ScoredTrajectory],
    packs: list[PackedTrajectory],
    backend: str = "megatron",
    settings: dict[str, Any] | None = None,
    waits: bool = False,
    seen: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Compare logprobs and gradients with the reference, gradients once more without waits of the host."""
    checkpoint, denominator = save_checkpoint(family, root / "model"), samples_with_loss(sequences)
    bounds = (MEAN_BOUND, GRADIENT_BOUND) if family == "qwen3" else (ROUTED_MEAN_BOUND, ROUTED_GRADIENT_BOUND)
    config = _config(backend, checkpoint, root, settings or {})
    reference = Reference(checkpoint, config.algorithm)
    reference.round_weights()
    expected = reference.step(sequences, denominator)
    with running(placement, config) as trainer:
        seen(trainer)
        gaps = (logprobs_of(trainer, packs).double() - torch.cat(expected.logprobs)).abs()
        assert float(gaps.mean()) < bounds[0]
        for may_wait in (True, waits):  # kernels are compiled in the first
            check_tensors(gradients_of(trainer, packs, denominator, may_wait), expected.gradients, bounds[1])


# ------------------------------------------------------------------------------------------------------- the arithmetic
def shared_prefixes(placement: RankPlacement, root: Path, backend: str) -> None:
    sequences = sharing_sequences()
    packs = shared_packs(sequences)
    assert sum(pack.shared_tokens for pack in packs) > 100
    _check_step(placement, root, "qwen3", sequences, packs, backend, {"share_prefixes": "tree"})


def experts(placement: RankPlacement, root: Path, grouped: bool) -> None:
    """Check Megatron's experts in one product, or one after the other, for which the host must know the sizes."""

    def seen(trainer: Trainer) -> None:
        assert isinstance(trainer, MegatronTrainer)
        assert any(isinstance(m, GroupedLinear) for m in trainer.chunks[0].modules()) == grouped

    sequences = scored_sequences(LENGTHS)
    with pytest.MonkeyPatch.context() as patch:
        if not grouped:
            patch.setattr(model, "can_be_grouped", lambda *arguments: False)
        packs = [pack_sequences(sequences)]
        _check_step(placement, root, "qwen3_moe", sequences, packs, waits=not grouped, seen=seen)


def latent_attention(placement: RankPlacement, root: Path, backend: str) -> None:
    sequences = scored_sequences(LENGTHS)
    packs = [pack_sequences(sequences)]
    _check_step(placement, root, "deepseek_v3", sequences, packs, backend)


def layers(placement: RankPlacement, root: Path, kind: tuple[str, str]) -> None:
    """Check linear attention, windows, sinks and biases of experts: the kinds of layers of other families."""
    backend, family = kind
    sequences = scored_sequences(LENGTHS)
    _check_step(placement, root, family, sequences, [pack_sequences(sequences)], backend)


def low_rank_factors(placement: RankPlacement, root: Path, backend: str) -> None:
    """New factors change no logprob, and one step on them does."""
    sequences = scored_sequences(LENGTHS)
    packs, checkpoint = [pack_sequences(sequences)], save_checkpoint("qwen3", root / "model")
    config = _config(backend, checkpoint, root, {})
    judge = Reference(checkpoint, config.algorithm)
    judge.round_weights()
    expected = torch.cat([judge.score(sequence)[0].detach() for sequence in sequences])
    lora = {**dict(config.model), "lora": {"rank": 8, "alpha": 64.0}}
    with running(placement, RunConfig(**{**dict(config), "model": lora})) as trainer:
        first = logprobs_of(trainer, packs)
        assert float((first.double() - expected).abs().mean()) < MEAN_BOUND
        gradients_of(trainer, packs, 5.0, waits=True)  # kernels are compiled
        gradients_of(trainer, packs, 5.0, waits=False)
        _step(trainer, packs)
        assert not torch.equal(logprobs_of(trainer, packs), first)


def supports(placement: RankPlacement, root: Path, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [with_supports(one, generator) for one in scored_sequences(LENGTHS)]
    _check_step(placement, root, "qwen3", sequences, [pack_sequences(sequences)], backend)


# ------------------------------------------------------------------------------------------------------------ the state
def _state(trainer: Trainer) -> list[Tensor]:
    """Return weights and the optimizer's whole state."""
    if isinstance(trainer, MegatronTrainer):
        parts = [part.optimizer for part in trainer.optimizer.parts]
        main = [(part, weight) for part in parts for group in part.param_groups for weight in group["params"]]
        # By name: loading changes their order.
        moments = [torch.as_tensor(value) for part, weight in main for _, value in sorted(part.state[weight].items())]
        return [*trainer.state.weights(), *(weight for _, weight in main), *moments]
    moments = [moment for kinds in trainer.optimizer.moments.values() for moment in kinds.values()]
    return [*trainer.state.weights(), *moments]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def _same(tensors: list[Tensor], copies: list[Tensor]) -> bool:
    return all(torch.equal(tensor.cpu(), copy) for tensor, copy in zip(tensors, copies, strict=True))


def saving_in_background(placement: RankPlacement, root: Path, backend: str) -> None:
    """A save in the background writes the state of its call, even if a further step changes it first."""
    packs = [pack_sequences(scored_sequences(LENGTHS))]
    config = _config(backend, save_checkpoint("qwen3", root / "model"), root, {})
    with held_writes() as gate, running(placement, config) as trainer:
        _step(trainer, packs)
        expected = _copies(_state(trainer))
        save = trainer.start_save(root / "save")
        _step(trainer, packs)
        assert not save.is_written() and not _same(_state(trainer), expected)
        gate.set()
        save.finish()
        trainer.load(root / "save")
        assert _same(_state(trainer), expected)


def reference_model(placement: RankPlacement, root: Path, backend: str) -> None:
    """The reference scores with its own weights before and after training, and doesn't change the policy."""
    sequences = scored_sequences(LENGTHS)
    packs = [pack_sequences(sequences)]
    other = save_checkpoint("qwen3", root / "other", seed=1)
    config = _config(backend, save_checkpoint("qwen3", root / "model"), root, {}, kl={"coef": 0.1})
    config = RunConfig(**{**dict(config), "reference": {"path": other}})
    expected = expected_logprobs(other, config, sequences)
    with running(placement, config) as trainer:
        policy, found = logprobs_of(trainer, packs), logprobs_of(trainer, packs, "reference")
        assert float((found.double() - expected).abs().mean()) < MEAN_BOUND
        assert torch.equal(logprobs_of(trainer, packs), policy) and not torch.equal(found, policy)
        _step(trainer, packs)
        kept = _copies(_state(trainer))
        assert torch.equal(logprobs_of(trainer, packs, "reference"), found) and _same(_state(trainer), kept)
        assert not torch.equal(logprobs_of(trainer, packs), policy)


def leaving_and_returning(placement: RankPlacement, root: Path, backend: str) -> None:
    """State leaves the device twice, in two stages, and returns unchanged, as do gradients."""
    packs = [pack_sequences(scored_sequences(LENGTHS))]
    config = _config(backend, save_checkpoint("qwen3", root / "model"), root, {})
    with running(placement, config) as trainer:
        _step(trainer, packs)
        kept, gradients = _copies(_state(trainer)), gradients_of(trainer, packs, 5.0, waits=True)
        for _ in range(2):
            held, nbytes = _device_bytes(trainer), sum(tensor.nbytes for tensor in _state(trainer) if tensor.ndim)
            _leave(trainer, keep_weights=True)
            assert _same(trainer.state.weights(), kept[: len(trainer.state.weights())])
            _leave(trainer, keep_weights=False)
            assert held - _device_bytes(trainer) >= nbytes
            trainer.onload()
            assert _same(_state(trainer), kept)
            # On a GPU, attention sums gradients in any order.
            check_tensors(gradients_of(trainer, packs, 5.0, waits=True), gradients, 1e-2)


def _leave(trainer: Trainer, keep_weights: bool) -> None:
    if torch.cuda.is_available():
        trainer.offload(keep_weights)
    else:
        trainer.state.offload_to_host(keep_weights)


def _device_bytes(trainer: Trainer) -> int:
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    storages = {tensor.untyped_storage() for tensor in _state(trainer)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


ARITHMETIC = (shared_prefixes, supports, latent_attention, low_rank_factors)
STATE = (saving_in_background, reference_model, leaving_and_returning)
CHECKS: dict[str, tuple[Callable[..., None], Any]] = {
    **{
        f"{check.__name__}-{backend}": (check, backend)
        for check in ARITHMETIC + STATE
        for backend in ("megatron", "fsdp")
    },
    "experts-grouped": (experts, True),
    "experts-sequential": (experts, False),
}

LAYERS = {
    f"layers-{family}-{backend}": (layers, (backend, family))
    for backend, family in (
        *(("megatron", family) for family in ("qwen3_5_text", "gpt_oss", "mistral", "gemma3")),
        *(("fsdp", family) for family in ("qwen3_next", "gpt_oss", "gemma3")),
    )
}
"""Checks of other families, which a CPU makes only in the acceptance run."""


def run_check(placement: RankPlacement, name: str, root: Path) -> None:
    check, option = (CHECKS | LAYERS)[name]
    check(placement, root / name, option)
