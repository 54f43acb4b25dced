"""Import paths of custom code, and the table of the objective's parts."""

import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from slime_like.algorithms import importance
from slime_like.algorithms.advantages import find_estimator
from slime_like.algorithms.losses import kl
from slime_like.algorithms.losses.loss import find_policy
from slime_like.algorithms.reduction import build_reduction
from slime_like.config.algorithm import AlgorithmConfig, ImportanceConfig, KLRewardConfig
from slime_like.config.reading.parts import read_part
from slime_like.config.rollout import EnvironmentConfig, RewardFunction
from slime_like.plugins import objective
from slime_like.plugins.options import OPTIONS
from slime_like.plugins.resolve import import_path_problem, resolve

NO_PATH = "is not an import path; give `package.module:name` or `path/to/file.py:name`"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("judged:anything", None),
        ("HERE/__init__.py:anything", None),
        *((path, NO_PATH) for path in ("a:", ":b", "a.b", "a b:c", "a:b.c", "a..b:c")),
        ("judged.nothing.more:x", r"cannot be found: there is no module judged\.nothing; .*"),
        ("HERE/nothing.py:x", r"cannot be found: there is no file .*/nothing\.py.*; correct the path"),
    ],
)
def test_a_path_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str | None) -> None:
    folder = tmp_path / "judged"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = import_path_problem(path.replace("HERE", str(folder)))
    assert found is None if problem is None else re.fullmatch(problem, found or "")
    assert not any(module.startswith("judged") for module in sys.modules)


def test_every_optional_part_is_defined_where_the_table_says() -> None:
    """The table is text, so nothing else checks it."""
    for place in OPTIONS.values():
        module, _, attribute = place.partition(":")
        source = Path(find_spec(module).origin or "").read_text(encoding="utf-8")  # type: ignore[union-attr]
        assert re.search(rf"^(class|def) {attribute}\b|^{attribute} =", source, re.MULTILINE), place


def test_a_package_in_editable_mode_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation adds a finder. No directory of ``sys.path`` contains the package."""
    folder = str(Path(import_path_problem.__code__.co_filename).parents[1])

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object) -> ModuleSpec | None:
            return PathFinder.find_spec("slime_like", [str(Path(folder).parent)]) if name == "slime_like" else None

    monkeypatch.setattr(sys, "path", [part for part in sys.path if "site-packages" in part])
    monkeypatch.setattr(sys, "meta_path", [PathFinder, Finder])
    assert import_path_problem("slime_like.examples.calculator:Calculator") is None


def test_a_file_is_imported_once_with_files_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "beside_it.py").write_text("scale = 2\n")
    file = tmp_path / "custom.py"
    file.write_text("from beside_it import scale\nmade = []\ndef double(x): return scale * x\n")
    assert resolve("thing", f"{file}:double", {})(3) == 6
    assert resolve("thing", f"{file}:made", {}) is resolve("thing", f"{file}:made", {})
    assert sys.path[-1] == str(tmp_path)  # after all others
    for path in (f"{tmp_path}/nothing.py:double", f"{file}:nothing", f"{file}double"):
        with pytest.raises(ValueError):
            resolve("thing", path, {})


def test_a_relative_path_of_a_setting_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = RewardFunction(name="mine/rewards.py:good")
    assert function.name == f"{tmp_path}/mine/rewards.py:good"
    assert (function.label, RewardFunction(name="mine.rewards:good").label) == ("rewards.py:good", "mine.rewards:good")
    assert AlgorithmConfig(loss="l.py:f", advantage="grpo").loss.name == f"{tmp_path}/l.py:f"
    assert EnvironmentConfig(name="e.py:E").name == f"{tmp_path}/e.py:E" and EnvironmentConfig().name is None


def test_names_and_traits_are_those_of_the_code_and_options_are_documented() -> None:
    for parts in (objective.LOSSES, objective.ADVANTAGES, objective.REDUCTIONS):
        for name, place in parts.items():
            assert all(option.meaning for option in read_part(name, place).options), name
    assert [find_policy(name).name for name in objective.LOSSES] == [*objective.LOSSES]
    per_sequence = [name for name in objective.LOSSES if find_policy(name).per_sequence]
    assert per_sequence == [*objective.SEQUENCE_LOSSES]
    unrewarded = [name for name in objective.LOSSES if not find_policy(name).needs_advantages]
    assert unrewarded == [*objective.DEMONSTRATION_LOSSES]
    scopes = {name: find_estimator(name).scope for name in objective.ADVANTAGES}
    assert {name for name, scope in scopes.items() if scope == "batch"} == {*objective.BATCH_ADVANTAGES}
    assert {"none", *importance.CORRECTIONS} == {*objective.CORRECTIONS}
    assert kl.KL_ESTIMATORS.keys() == {*objective.KL_ESTIMATORS}
    assert {*get_args(KLRewardConfig.model_fields["estimator"].annotation)} == {*objective.KL_ESTIMATORS}
    assert {*get_args(ImportanceConfig.model_fields["level"].annotation)} == {*importance.LEVELS}
    for name, options in (("constant", {}), ("tokens", {"length": 8}), ("constant", {"length": 0})):
        with pytest.raises(ValueError, match="; "):
            build_reduction(name, **options)
