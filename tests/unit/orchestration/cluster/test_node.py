"""Processes that see all devices of a node."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster import node
from tests.support.rejections import Rejects


@pytest.mark.parametrize(
    ("value", "given", "rejected"), [("1", ["3"], True), ("1", [], False), ("0", ["3"], False), (None, ["3"], False)]
)
def test_a_process_that_sees_all_gpus_is_rejected(
    monkeypatch: pytest.MonkeyPatch, rejects: Rejects, value: str | None, given: list[str], rejected: bool
) -> None:
    """A process without a GPU from Ray is not affected."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given})
    monkeypatch.setattr(node, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(node, "node_address", lambda: "10.0.0.7")
    monkeypatch.delenv(name := "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with rejects(SlimeLikeError, "visible-devices") if rejected else nullcontext():
        node.require_own_devices()
