"""Pages and help that are made from the configuration's models and from docstrings."""

import inspect
from pathlib import Path
from typing import get_args

import pytest

from slime_like.algorithms import ESTIMATORS
from slime_like.algorithms.losses import POLICY_LOSSES
from slime_like.commands import parts
from slime_like.commands.parts import named_parts
from slime_like.commands.reference import fields_help, page_text, reference_text
from slime_like.config import SyncConfig
from slime_like.config.reading.fields import all_fields
from slime_like.config.rollout import AGENT, ENVIRONMENT
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP, installed_names
from slime_like.plugins.resolve import resolve
from slime_like.sandbox.environments.registry import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.rewards.registry import REGISTERED, resolve_reward
from slime_like.weights.transports.registry import AUTO

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["configuration", "rewards"])
def test_generated_pages_are_current(page: str) -> None:
    path = DOCS / f"{page}.md"
    assert path.read_text() == page_text(path), "run: python -m slime_like.commands.reference"


def test_every_field_and_every_name_is_in_page_and_help() -> None:
    page, help_text = reference_text(), fields_help()
    names = {
        "reward.functions": {*REGISTERED, AGENT, ENVIRONMENT},
        "algorithm.loss": set(POLICY_LOSSES),
        "algorithm.advantage": set(ESTIMATORS),
        "rollout.environment.name": set(ENVIRONMENTS),
        "rollout.engine": set(installed_names(ENGINE_GROUP)),
        "trainer.backend": set(installed_names(BACKEND_GROUP)),
        "sync.transport": set(get_args(SyncConfig.model_fields["transport"].annotation)) - {AUTO},
    }
    assert {setting: {part.name for part in found} for setting, found in named_parts().items()} == names
    for name in all_fields():
        assert f"\n- `{name}` (" in page and f"\n  --{name} (" in help_text
    for setting, found in names.items():
        section = help_text.partition(f"names for {setting}:")[2].partition("\n\n")[0]
        listed = page.partition(f"\n`{setting}`\n\n")[2].partition("\n\n")[0]
        in_page = [f"- `{name}`: " in listed for name in found]
        assert all(f"\n  {name}: " in section for name in found)
        assert all(in_page) if setting != "reward.functions" else not any(in_page)  # docs/rewards.md


def test_names_are_described_by_what_a_run_would_use() -> None:
    functions = {name: estimator.compute for name, estimator in ESTIMATORS.items()}
    for used, places in ((POLICY_LOSSES, parts.LOSSES), (functions, parts.ADVANTAGES)):
        assert {name: resolve("part", place, {}) for name, place in places.items()} == dict(used)


@pytest.mark.parametrize("name", REGISTERED)
def test_options_of_rewards_are_those_of_the_functions(name: str) -> None:
    (part,) = (part for part in named_parts()["reward.functions"] if part.name == name)
    parameters = list(inspect.signature(resolve_reward(name)).parameters.values())[3:]
    assert [option.name for option in part.options] == [parameter.name for parameter in parameters]
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    assert [option.name for option in part.options if option.default is None] == required
    assert all(option.meaning and part.summary.endswith(".") for option in part.options)
