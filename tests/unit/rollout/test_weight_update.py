"""Updates against their manifests, and manifests against the model."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rollout.weight_update import WeightUpdateState
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import Manifest, TensorEntry
from slime_like.interfaces.weights import MODEL
from tests.support.rejections import Rejects

TENSORS = {"model.norm.weight": torch.ones(4), "model.embed_tokens.weight": torch.ones(3, 4)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
WHOLE = Manifest.of(TENSORS)


def _entries(dtype: str = "float32") -> list[TensorEntry]:
    return [TensorEntry(name, dtype, tuple(tensor.shape), 0, 0, 7) for name, tensor in TENSORS.items()]


def _changed(name: str, tensor: torch.Tensor) -> Manifest:
    return Manifest.of(TENSORS | {name: tensor})


def _nothing(state: WeightUpdateState) -> None:
    pytest.fail("the manifest was accepted")


def _update(state: WeightUpdateState, manifest: Manifest = WHOLE, version: int = 1) -> None:
    state.begin(version, manifest)
    state.check_bucket(_entries())
    received = {entry.name: entry.checksum for entry in _entries()}
    state.check_complete(version, received)
    state.commit(received)
    state.require_serving()


REJECTED: dict[str, tuple[str, Manifest, Callable[[WeightUpdateState], None]]] = {
    "an export without a tensor": ("incomplete-update", Manifest.of({"model.norm.weight": torch.ones(4)}), _nothing),
    "an export of another shape": ("incomplete-update", _changed("model.norm.weight", torch.ones(5)), _nothing),
    "an export with another tensor": ("incomplete-update", _changed("model.extra", torch.ones(4)), _nothing),
    "an adapter": ("update-target", replace(WHOLE, updates="adapter"), _nothing),
    "an adapter on mixed weights": (
        "update-target", WHOLE, lambda state: state.begin(3, replace(WHOLE, updates="head")),
    ),
    "another type": ("tensor-shape", WHOLE, lambda state: state.check_bucket(_entries("bfloat16"))),
    "a missing tensor": (
        "incomplete-update", WHOLE, lambda state: state.check_complete(2, dict.fromkeys([*TENSORS][:1], 7)),
    ),
    "another tensor": (
        "incomplete-update", WHOLE, lambda state: state.check_complete(2, dict.fromkeys([*TENSORS, "extra"], 7)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "manifest", "then"), REJECTED.values(), ids=REJECTED)
def test_nothing_is_sampled_after_a_rejected_update(
    code: str, manifest: Manifest, then: Callable[[WeightUpdateState], None], rejects: Rejects
) -> None:
    state = WeightUpdateState("engine", dict.fromkeys((MODEL, "head"), SHAPES))
    _update(state)
    with rejects(WeightSyncError, code):
        state.begin(2, manifest)
        then(state)
    with rejects(EngineError, "mixed-weights"):
        state.require_serving()
    with rejects(WeightSyncError, "no-open-update"):
        state.check_bucket(_entries())
    _update(state, version=3)
    _update(state, replace(WHOLE, updates="head"), version=4)


def test_a_failed_adapter_is_repaired_by_the_next(rejects: Rejects) -> None:
    """If syncs send only factors, no model comes first."""
    state = WeightUpdateState("engine", {"adapter": SHAPES})
    adapter = replace(WHOLE, updates="adapter")
    state.begin(1, adapter)
    state.fail("a rank died")
    with rejects(WeightSyncError, "update-target"):
        state.begin(2, WHOLE)
    with rejects(EngineError, "mixed-weights"):
        state.require_serving()
    _update(state, adapter)
