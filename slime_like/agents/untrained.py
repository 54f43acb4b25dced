"""Turns of a rollout that ``rollout.agent.untrained`` excludes from training."""

from collections.abc import Collection, Sequence

from slime_like.agents.turns import Turn
from slime_like.config.rollout import Untrained


def untrained_turns(turns: Sequence[Turn], kinds: Collection[Untrained], others: Collection[Turn]) -> set[Turn]:
    """Return the excluded ones of all turns, in sampling order. ``others`` are turns of other models' names.

    The main chain is the history with the most calls between its first and last turn, including those of subagents in
    between. A turn is discarded if nothing continues it, but a later turn of the same prompt is continued.
    """
    chains: dict[Turn, list[Turn]] = {}
    for turn in turns:
        followed = _followed(turn, chains)
        chains[turn] = [*chains[followed], turn] if followed else [turn]
    excluded = set(others) if "other_models" in kinds else set()
    if "discarded" in kinds:
        continued = {turn for chain in chains.values() for turn in chain[:-1]}
        last = {tuple(turn.prompt.input.token_ids): at for at, turn in enumerate(turns) if turn in continued}
        left = (turn for at, turn in enumerate(turns) if at < last.get(tuple(turn.prompt.input.token_ids), 0))
        excluded |= {turn for turn in left if turn not in continued}
    if "side_chains" in kinds:
        number = {turn: at for at, turn in enumerate(turns)}
        rest = [chains[turn] for turn in turns if turn not in excluded]
        main = max(rest, key=lambda chain: (number[chain[-1]] - number[chain[0]], len(chain[-1].token_ids)), default=[])
        excluded |= set(turns) - set(main)
    return excluded


def _followed(turn: Turn, earlier: Collection[Turn]) -> Turn | None:
    """Return the turn that the call's history continues, even if the template rewrites that history."""
    keys = turn.prompt.keys
    found = [each for each in reversed([*earlier]) if keys[: len(each.keys)] == each.keys]
    return turn.prompt.parent or max(found, key=lambda each: len(each.keys), default=None)
