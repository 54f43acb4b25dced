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


def _update(state: WeightUpdateState, manifest: Manifest = WHOLE, version: int = 1) -> None:
    state.begin(version, manifest)
    state.check_bucket(_entries())
    received = {entry.name: entry.checksum for entry in _entries()}
    state.check_complete(version, received)
    state.commit(received)
    state.require_serving()


REJECTED: dict[str, tuple[str, Callable[[WeightUpdateState], None]]] = {
    "an export without a tensor": (
        "incomplete-update",
        lambda state: state.begin(2, Manifest.of({"model.norm.weight": torch.ones(4)})),
    ),
    "an export of another shape": (
        "incomplete-update",
        lambda state: state.begin(2, Manifest.of(TENSORS | {"model.norm.weight": torch.ones(5)})),
    ),
    "an adapter": ("update-target", lambda state: state.begin(2, replace(WHOLE, updates="adapter"))),
    "an adapter on mixed weights": (
        "update-target",
        lambda state: (state.begin(2, WHOLE), state.begin(3, replace(WHOLE, updates="head")))[1],
    ),
    "another type": (
        "tensor-shape",
        lambda state: (state.begin(2, WHOLE), state.check_bucket(_entries("bfloat16")))[1],
    ),
    "a missing tensor": (
        "incomplete-update",
        lambda state: (state.begin(2, WHOLE), state.check_complete(2, {"model.norm.weight": 7}))[1],
    ),
}


@pytest.mark.parametrize("what", REJECTED)
def test_nothing_is_sampled_after_a_rejected_update(what: str, rejects: Rejects) -> None:
    code, update = REJECTED[what]
    state = WeightUpdateState("engine", dict.fromkeys((MODEL, "head"), SHAPES))
    _update(state)
    with rejects(WeightSyncError, code):
        update(state)
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
