"""Processes that see all devices of a node."""

from types import SimpleNamespace

import pytest

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster import node


@pytest.mark.parametrize(
    ("value", "given", "rejected"),
    [("1", ["3"], True), ("1", [], False), ("0", ["3"], False), (None, ["3"], False)],
)
def test_a_process_that_sees_all_gpus_is_rejected(
    monkeypatch: pytest.MonkeyPatch, value: str | None, given: list[str], rejected: bool
) -> None:
    """A process without a GPU from Ray is not affected."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given})
    monkeypatch.setattr(node, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(node, "node_address", lambda: "10.0.0.7")
    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    if not rejected:
        node.require_own_devices()
        return
    with pytest.raises(SlimeLikeError) as caught:
        node.require_own_devices()
    assert caught.value.code == "visible-devices"
    assert "10.0.0.7" in str(caught.value) and f"{name}=1" in str(caught.value)
