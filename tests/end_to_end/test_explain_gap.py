"""``slime-like explain-gap`` with ranks and engines of a cluster; tests/parallel tries every cause."""

from pathlib import Path

import pytest

from tests.conftest import Tiny
from tests.support.acceptance import some_in_acceptance
from tests.support.gap_faults import CASES, install, make_run
from tests.support.processes import succeed

REPO = Path(__file__).parents[2]
QUICK = ("reversed tensor",)


@pytest.mark.parametrize(
    "name",
    some_in_acceptance(CASES, lambda name: name not in QUICK),
)
def test_the_cause_is_named(
    name: str, tiny: Tiny, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run_dir = CASES[name], tmp_path / "run"
    install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{REPO}")
    make_run(case, tiny, run_dir)
    (run_dir / "checkpoints").symlink_to(trained / "checkpoints")
    finished = succeed(["explain-gap", str(run_dir), "--step", str(case.step)], tmp_path / "log")
    *table, sentence = finished.stdout.splitlines()
    share, said = sentence.split(" % of the gap is ")
    assert said == (case.name or case.cause) and float(share) > 95, finished.stdout
    row = [line for line in table if line.startswith(case.cause)][-1]
    assert (case.finding or "it does not serve the weights it received") in row
    assert sorted(path.name for path in run_dir.iterdir() if path.name.startswith("explain")) == []
