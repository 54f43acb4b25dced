"""Plain values arrive unchanged between ranks, received data is never executed, and ranks meet without a port."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from backends.common.process.rendezvous import join_world
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.system.json_collectives import all_gather_json, gather_json
from tests.parallel.ranks import run_ranks
from tests.support.forged import Program
from tests.support.rejections import Rejects

CPU = torch.device("cpu")
LARGE = 300_000


def values(rank: int) -> list[Any]:
    """Return empty values, one that is large on a single rank, and texts with multi-byte characters."""
    return [
        "",
        [],
        {},
        None,
        rank,
        {"größe": "日本" * rank, "b": [1.5, False, [rank] * rank]},
        list(range(rank * LARGE)),
    ]


def _exchange(placement: RankPlacement, root: Path) -> dict[str, Any]:
    config = RunConfig(run_dir=root, model={"path": root}, trainer={"parallel": {"data": placement.world_size}})
    join_world(config.trainer, replace(placement, store=root / "store", key="k"))
    listening = {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    rank = placement.rank
    found: dict[str, Any] = {"listens": placement.master_port in listening}
    found["gathered"] = [gather_json(value, CPU) for value in values(rank)]
    found["all"] = [all_gather_json(value, CPU) for value in values(rank)]
    found["forged"] = _forged(rank, root / "executed")
    found["error"] = _object(OSError(2, f"of rank {rank}"))
    found["program"] = _object(Program(root / "executed"))
    dist.destroy_process_group()
    return found


def _forged(rank: int, executed: Path) -> str:
    """Send a pickled call from rank 1, as torch's own collectives of objects would."""
    data = torch.frombuffer(bytearray(pickle.dumps(Program(executed))), dtype=torch.uint8)
    if rank != 1:
        try:
            all_gather_json("x" * (data.numel() - 2), CPU)
        except ValueError as error:
            return type(error).__name__
        return "none"
    size = torch.tensor([data.numel()])
    dist.all_gather([torch.empty_like(size) for _ in range(dist.get_world_size())], size)
    dist.all_gather([torch.empty_like(data) for _ in range(dist.get_world_size())], data)
    return "sent"


def _object(value: Any) -> str:
    """Return rank 1's value from torch's own collective of objects, as libraries use it."""
    everyones: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyones, value)
    except pickle.UnpicklingError as error:
        return str(error)
    return str(everyones[1])


def test_values_arrive_unchanged_and_execute_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(_exchange, 3, tmp_path, tmp_path)
    expected = [[values(rank)[turn] for rank in range(3)] for turn in range(len(values(0)))]
    assert ranks[0]["gathered"] == expected
    assert ranks[1]["gathered"] == ranks[2]["gathered"] == [None] * len(expected)
    for found in ranks:
        assert found["all"] == expected
        assert not found["listens"]
    assert [found["forged"] for found in ranks] == ["UnicodeDecodeError", "sent", "UnicodeDecodeError"]
    whole = "which is not part of what ranks exchange"
    assert {found["error"] for found in ranks} == {f"it names builtins.FileNotFoundError, {whole}"}
    assert {found["program"] for found in ranks} == {f"it names pathlib.Path.touch, {whole}"}
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Program(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_ranks_missing_at_the_rendezvous_file_are_reported(tmp_path: Path, rejects: Rejects) -> None:
    trainer = {"parallel": {"data": 2}, "start_timeout_s": 0.1}
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, trainer=trainer)
    placement = RankPlacement(0, 2, 0, "127.0.0.1", 21_000, store=tmp_path / "store", key="k")
    with rejects(TrainerError, "no-rendezvous"):
        join_world(config.trainer, placement)
