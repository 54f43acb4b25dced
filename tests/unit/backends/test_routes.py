"""Rows and checks of routes on the host."""

from pathlib import Path

import pytest
import torch

from backends.common.process.rendezvous import fake_world
from backends.common.step.routes import Replay, require_routes, rows_of_tokens
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.errors import TrainerError
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from tests.parallel.tiny import save_checkpoint, scored_sequences
from tests.support.prefixes import row
from tests.support.rejections import Rejects


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    checkpoint: Path = save_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"))
    return Replay("rollout", ModelDimensions.from_checkpoint(checkpoint))


def _pack(route: list[int], layers: int = 4) -> PackedTrajectory:
    """Return a pack of two sequences; the second token of the second one has ``route`` in the last layer."""
    sequences = scored_sequences([(3, 2), (2, 3)])
    for sequence in sequences:
        sequence.routes = torch.tensor([3, 0], dtype=torch.int16).repeat(4, layers, 1)
    routes = sequences[1].routes
    assert routes is not None
    routes[1, -1] = torch.tensor(route)
    return pack_sequences(sequences)


def test_a_shared_token_follows_the_first_sequence_that_reads_it() -> None:
    """The last token of the first sequence has no row, but a longer one reads it."""
    rows = [row(0, 0, [1, 2], [3]), row(1, 0, [1, 2], [3, 4]), row(2, 1, [5], [6])]
    pack = pack_sequences(rows, target_tokens_per_batch=11, sharing="tree")
    assert pack.shared_tokens == 3
    assert rows_of_tokens(pack).tolist() == [0, 1, 4, 0, 1, 4, -1, 5, -1, -1, -1, -1]


@pytest.mark.parametrize("route", [[1, 4], [2, 2], [-1, 1], [1, -1], [-2, -2]])
def test_a_route_without_different_experts_of_the_model_is_rejected(route: list[int], replay: Replay) -> None:
    for accepted in ([1, 2], [2, 0], [-1, -1]):
        require_routes(_pack(accepted), replay)
    with fake_world(0, 1, torch.distributed.destroy_process_group), pytest.raises(TrainerError) as caught:
        require_routes(_pack(route), replay)
    assert caught.value.code == "routes-of-another-model"
    assert f"sequence 's1' has the route {route}" in str(caught.value)


def test_routes_of_other_layers_and_no_routes_are_rejected(replay: Replay, rejects: Rejects) -> None:
    pack = _pack([1, 2])
    with fake_world(0, 1, torch.distributed.destroy_process_group):
        with rejects(TrainerError, "routes-of-another-model"):
            require_routes(_pack([1, 2], layers=3), replay)
        pack.routes = None
        with rejects(TrainerError, "routes-missing"):
            require_routes(pack, replay)
