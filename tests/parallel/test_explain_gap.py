"""The gap of engine and trainer: for each of several faults, its cause is found, and no other."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences, unpack_response_logprobs
from slime_like.config import RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Generation, GenerationRequest, RankPlacement
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.engine.driven import DrivenEngine, started
from slime_like.verification.gap.batch import SavedBatch, checkpoint_of
from slime_like.verification.gap.explain import Explanation, Finding
from slime_like.verification.gap.sides import Sides
from tests.conftest import Tiny
from tests.parallel.ranks import held_ports, run_ranks
from tests.support.gap_faults import CASES, ENGINES, TRAINERS, install, make_run


class LocalSides(Sides):
    """A trainer rank and an engine in this process."""

    def __init__(self, config: RunConfig, version: int, placement: RankPlacement, stack: ExitStack) -> None:
        self._config, self._stack = config, stack
        self._trainer = TRAINERS[config.trainer.backend](config, placement)
        stack.callback(self._trainer.shutdown)
        self._trainer.setup_for_scoring(checkpoint_of(config, version) if version else None)
        self._driven: DrivenEngine | None = None

    def score(self, rows: Sequence[ScoredTrajectory]) -> list[Tensor]:
        pack = pack_sequences(rows)
        scored = self._trainer.score([pack])
        assert scored is not None  # there is one stage
        return unpack_response_logprobs(pack, scored[0]["old_logprobs"])

    def _generated(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        return self._engine.generate_all(requests)

    @property
    def _engine(self) -> DrivenEngine:
        if self._driven is None:
            engine = ENGINES[self._config.rollout.engine](self._config, 0)
            loop = self._stack.enter_context(started(engine))
            self._driven = DrivenEngine(engine, loop)
            self._stack.callback(self._driven.close)
        return self._driven

    def sync_problem(self) -> str | None:
        weights = {name: tensor.clone() for bucket in self._trainer.export_weights() for name, tensor in bucket.tensors}
        receipt, sent = self._engine.run(self._engine.update(weights))
        return None if receipt.checksums == sent else "the checksums differ"


def explain(placement: RankPlacement, batch: SavedBatch) -> tuple[list[Finding], float, bool]:
    @contextmanager
    def opened(config: RunConfig, version: int, _: bool) -> Iterator[LocalSides]:
        size = config.trainer.parallel.world_size
        with ExitStack() as stack, held_ports(1) as (port,):
            here = placement if size > 1 else replace(placement, rank=0, world_size=1, master_port=port)
            yield LocalSides(config, version, here, stack)

    found = Explanation(batch, opened)
    return found.findings, found.share, found.is_rounding


@pytest.mark.parametrize("name", list(CASES))
def test_the_cause_is_found(
    name: str, tiny: Tiny, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run_dir = CASES[name], tmp_path / "run"
    if case.family != "qwen3":
        make_tiny_model(tmp_path / "model", case.family)
        tiny = Tiny(tmp_path / "model", tiny.data)
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    make_run(case, tiny, run_dir)
    (run_dir / "checkpoints").symlink_to(trained / "checkpoints")
    batch = SavedBatch.read(run_dir, None, [])
    size = batch.config.trainer.parallel.world_size
    findings, share, is_rounding = run_ranks(explain, size, tmp_path / "ranks", batch)[0]
    assert [finding.cause for finding in findings if finding.share] == [case.cause]
    (found,) = [finding for finding in findings if finding.share]
    assert found.share > 0.95 and share == pytest.approx(1 - found.share) and is_rounding
    assert found.name == (case.name or case.cause) and case.finding in found.text
    assert findings[0].gap is not None and findings[0].gap[0] > 1e-3
