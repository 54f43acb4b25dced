"""What Ray reports of a worker's end, as one sentence with a remedy."""

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from slime_like.errors import TrainerError
from slime_like.orchestration.cluster.ray_calls import one

_REPORT = """1 worker(s) were killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 7d5b) was 22.91GB used / 23.54GB limit (0.973), above 0.9."""


def test_a_worker_that_memory_ran_out_for_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: object, timeout: float) -> None:
        raise OutOfMemoryError(_REPORT)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(TrainerError) as caught:
        one(object(), "trainer rank 0", phase="saving a checkpoint", error=TrainerError)
    assert caught.value.code == "node-out-of-memory"
    assert "22.91GB of 23.54GB" in caught.value.problem and "7d5b" not in str(caught.value)
    assert "trainer.target_tokens_per_batch" in str(caught.value.remedy)
