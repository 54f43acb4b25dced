"""Put known bugs of other agent endpoints into ours: the checks of random histories catch each."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_like.agents import turns
from slime_like.agents.rendering import ChatFormat, Rendering
from tests.unit.agents.histories import TEMPLATES, random_rollout
from tests.unit.agents.test_turns import TOKENIZER, require_seen, require_truth

HISTORIES = 40
Patch = pytest.MonkeyPatch


def sampled_turns_are_encoded_again(patch: Patch) -> None:
    def extend(self: ChatFormat, tokens: list[int], text: str, rendering: Rendering) -> list[int] | None:
        return None if rendering.after(text) is None else self.encode(rendering)

    patch.setattr(ChatFormat, "extend", extend)


def a_history_that_changed_extends_its_branch(patch: Patch) -> None:
    """Finds new messages by position only, whatever comes before them."""
    patch.setattr(Rendering, "after", lambda self, prefix: Rendering([self.text[len(prefix) :]]))


def a_shared_turn_is_trained_in_every_branch(patch: Patch) -> None:
    usual = turns._row
    patch.setattr(turns, "_row", lambda leaf, trained: usual(leaf, set()))


def only_the_last_turn_is_trained(patch: Patch) -> None:
    usual = turns._row

    def row(leaf: turns.Turn, trained: set[turns.Turn]) -> turns.Branch:
        found = usual(leaf, trained)
        mask = found.segment.loss_mask.copy()
        mask[: found.turns[-1][0]] = False
        return replace(found, segment=replace(found.segment, loss_mask=mask))

    patch.setattr(turns, "_row", row)


def a_fork_loses_its_logprobs(patch: Patch) -> None:
    usual = turns.TurnTree.record

    def record(self: turns.TurnTree, prompt: turns.CallPrompt, generation: Any, reply: Any) -> turns.Turn:
        if prompt.parent is None and self.turns:
            generation = replace(generation, logprobs=np.zeros_like(generation.logprobs))
        return usual(self, prompt, generation, reply)

    patch.setattr(turns.TurnTree, "record", record)


def a_turn_of_an_unfinished_branch_is_lost(patch: Patch) -> None:
    """Only the last leaf gives rows."""
    usual = turns.TurnTree.rows
    patch.setattr(turns.TurnTree, "rows", lambda self: usual(self)[-1:])


BUGS = (
    sampled_turns_are_encoded_again,
    a_history_that_changed_extends_its_branch,
    a_shared_turn_is_trained_in_every_branch,
    only_the_last_turn_is_trained,
    a_fork_loses_its_logprobs,
    a_turn_of_an_unfinished_branch_is_lost,
)


def require_all() -> None:
    for seed in range(HISTORIES):
        rollout = random_rollout(random.Random(seed), TEMPLATES["drops earlier thoughts"], TOKENIZER)
        require_truth(rollout)
        require_seen(rollout)


def test_without_a_bug_all_holds() -> None:
    require_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):  # ids of another length have no row
        require_all()
