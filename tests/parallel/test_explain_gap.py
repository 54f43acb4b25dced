"""The gap of engine and trainer: for each of several faults, its cause is found, and no other."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences, unpack_response_logprobs
from slime_like.errors import ConfigError
from slime_like.interfaces import RankPlacement
from slime_like.orchestration.rollout.engines import DeviceSwitch
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.engine.subject import DrivenEngine, start_engine
from slime_like.verification.explain_gap import Explanation, Finding
from slime_like.verification.saved_batch import SavedBatch, Sides
from tests.conftest import Tiny
from tests.parallel.ranks import held_ports, run_ranks
from tests.support.acceptance import some_in_acceptance
from tests.support.gap_faults import CASES, ENGINES, TRAINERS, Case, install, make_run
from tests.support.rejections import Rejects


class LocalSides(Sides):
    """A trainer rank and an engine in this process."""

    def __init__(self, batch: SavedBatch, placement: RankPlacement, stack: ExitStack) -> None:
        self._config, self._stack, self._turns = batch.config, stack, DeviceSwitch()
        self._trainer = TRAINERS[batch.config.trainer.backend](batch.config, placement)
        stack.callback(self._trainer.shutdown)
        self._trainer.setup_for_scoring(batch.checkpoint)
        self._driven: DrivenEngine | None = None

    def score(self, rows: Sequence[ScoredTrajectory]) -> list[Tensor]:
        pack = pack_sequences(rows)
        scored = self._trainer.score([pack])
        assert scored is not None  # there is one stage
        return unpack_response_logprobs(pack, scored[0]["old_logprobs"])

    def _started(self) -> DrivenEngine:  # type: ignore[override]
        if self._driven is None:
            engine = ENGINES[self._config.rollout.engine](self._config, 0)
            loop = self._stack.enter_context(start_engine(engine))
            self._driven = DrivenEngine(engine, loop)
            self._stack.callback(self._driven.close)
        return self._driven

    def sync_problem(self) -> str | None:
        weights = {name: tensor.clone() for bucket in self._trainer.export_weights() for name, tensor in bucket.tensors}
        receipt, sent = (engine := self._started()).run(engine.update(weights))
        return None if receipt.checksums == sent else "the checksums differ"


def explain(placement: RankPlacement, batch: SavedBatch) -> tuple[list[Finding], float, bool]:
    @contextmanager
    def opened(batch: SavedBatch, _: bool) -> Iterator[LocalSides]:
        size = batch.config.trainer.parallel.world_size
        with ExitStack() as stack, held_ports(1) as (port,):
            here = placement if size > 1 else replace(placement, rank=0, world_size=1, master_port=port)
            yield LocalSides(batch, here, stack)

    found = Explanation(batch, opened, lambda _: None)
    return found.findings, found.share, found.is_rounding()


IN_ACCEPTANCE = ("added BOS", "8-bit weights", "perturbed routers", "bfloat16 experts")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def _explained(case: Case, tiny: Tiny, trained: Path, tmp_path: Path) -> tuple[list[Finding], float, bool]:
    run_dir = tmp_path / "run"
    make_run(case, tiny, run_dir)
    (run_dir / "checkpoints").symlink_to(trained / "checkpoints")
    batch = SavedBatch.read(run_dir, None, [])
    trainer = batch.config.trainer.model_copy(update={"fp8": case.fp8})
    batch = replace(batch, config=batch.config.model_copy(update={"trainer": trainer}))
    size = batch.config.trainer.parallel.world_size
    result: tuple[list[Finding], float, bool] = run_ranks(explain, size, tmp_path / "ranks", batch)[0]
    return result


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("name", some_in_acceptance(CASES, IN_ACCEPTANCE.__contains__))
def test_the_cause_is_found(name: str, tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    case = CASES[name]
    findings, share, is_rounding = _explained(case, tiny, trained, tmp_path)
    *others, found = [finding for finding in findings if finding.share]
    assert found.cause == case.cause and case.finding in found.text
    assert found.name == (case.name or case.cause)
    # On some processors, rounding to bfloat16 also decides a router's choice, which float32 then leaves alone.
    assert {other.cause for other in others} <= ({"routing"} if name == "bfloat16 experts" else set())
    explained = found.share + sum(other.share for other in others)
    assert explained > 0.95 and share == pytest.approx(1 - explained) and is_rounding
    assert findings[0].gap is not None and findings[0].gap[0] > 1e-3


def test_a_sound_run_has_no_cause(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    findings, share, is_rounding = _explained(Case("", ""), tiny, trained, tmp_path)
    assert is_rounding and share == 1.0
    assert [finding.share for finding in findings] == [0.0] * 10
    assert findings[0].gap is not None and 0 < findings[0].gap[0] < 1e-5


def test_a_gap_that_a_new_engine_does_not_have(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    constant = Case("", "", recorded=lambda row: replace(row, logprobs=torch.zeros(row.response_len)))
    findings, _, _ = _explained(constant, tiny, trained, tmp_path)
    assert [(finding.cause, finding.text) for finding in findings if finding.share] == [
        ("weights", "a new engine receives these weights unchanged; the run's had others, or sampled otherwise")
    ]


def test_what_has_no_usable_batch_is_rejected(tiny: Tiny, trained: Path, tmp_path: Path, rejects: Rejects) -> None:
    with rejects(ConfigError, "no-batch"):
        SavedBatch.read(tmp_path, None, [])
    with rejects(ConfigError, "no-batch"):
        SavedBatch.read(trained, None, [])  # it saved no rollouts
    run_dir = tmp_path / "run"
    make_run(Case("", "", step=2), tiny, run_dir)
    with rejects(ConfigError, "no-batch"):
        SavedBatch.read(run_dir, None, [])  # no checkpoint of step 1
    (run_dir / "checkpoints").symlink_to(trained / "checkpoints")
    assert SavedBatch.read(run_dir, None, []).checkpoint == run_dir / "checkpoints" / "step-000001" / "trainer"
    assert [*SavedBatch.read(run_dir, None, []).at_older_versions()] == [0]
    with rejects(ConfigError, "no-batch"):
        SavedBatch.read(run_dir, 1, [])
    with rejects(ConfigError, "no-batch"):  # an engine has no room for a token after any row
        SavedBatch.read(run_dir, 2, ["--rollout.max_model_len", "8"])
