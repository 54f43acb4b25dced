"""Put known bugs into agents' endpoints, shared prefixes, exported adapters and merged models, one at a time.

The checks of random histories must notice bugs of other agent endpoints, the comparison with a pack that shares nothing
those of prefixes, and the comparison with PEFT or transformers those of exports. Without a bug, each succeeds.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.parallel.test_lora_checkpoint import SavedLora, check_adapter, check_whole, converted, expected_logits
from tests.support.planted import Edit, plant
from tests.support.prefixes import SmallModel, check_gradients, group_of_four
from tests.unit.agents.histories import TEMPLATES, random_rollout
from tests.unit.agents.test_turns import TOKENIZER, require_seen, require_truth

# ------------------------------------------------------------------------------------------------------------- agents
TURNS, RENDERING = "slime_like.agents.turns", "slime_like.agents.rendering"
ROWS = "return [_row(leaf, trained) for leaf in kept if leaf not in parents]"
OF_AGENTS = [
    Edit("sampled turns are encoded again", RENDERING, "new = self.encode(rest)\n", "return self.encode(rendering)\n"),
    # Finds new messages by position only, whatever comes before them.
    Edit("a history that changed extends its branch", RENDERING, "if not self.text.startswith(prefix):", "if False:"),
    Edit("a shared turn is trained in every branch", TURNS, ROWS, ROWS.replace("trained", "set()")),
    Edit("only the last turn is trained", TURNS, "if turn not in trained:", "if turn is leaf and turn not in trained:"),
    Edit(
        "a fork loses its logprobs",
        TURNS,
        "        given, tokens, stored = prompt.input.token_ids,",
        "        if prompt.parent is None and self.turns:\n"
        "            generation = replace(generation, logprobs=np.zeros_like(generation.logprobs))\n"
        "        given, tokens, stored = prompt.input.token_ids,",
    ),
    Edit("a turn of an unfinished branch is lost", TURNS, ROWS, f"{ROWS}[-1:]"),
]


def require_all() -> None:
    for seed in range(40):
        rollout = random_rollout(random.Random(seed), TEMPLATES["drops earlier thoughts"], TOKENIZER)
        require_truth(rollout)
        require_seen(rollout)


@pytest.mark.parametrize("bug", [None, *OF_AGENTS], ids=lambda bug: bug.name if bug else "")
def test_random_histories_catch(bug: Edit | None) -> None:
    if bug is None:
        require_all()
        return
    with plant(bug), pytest.raises((AssertionError, ValueError)):  # ids of another length have no row
        require_all()


# ----------------------------------------------------------------------------------------------------------- prefixes
PREFIXES = "backends.common.attention.prefixes"
OF_SCORES = [
    Edit(
        "a response attends to its sibling",
        PREFIXES,
        "        # The segment that the part begins inside",
        "        if parents is not None:\n"
        "            parents = torch.where(parents == 0, torch.arange(len(parents)) - 1, parents)\n"
        "        # The segment that the part begins inside",
    ),
    Edit(
        "positions restart behind the prefix",
        "backends.fsdp.attention",
        'layout="contiguous")\n',
        'layout="contiguous")\n'
        "    bounds = shard.cu_seqlens_padded\n"
        "    begins = bounds[:-1].repeat_interleave(bounds.diff())\n"
        "    shard = replace(shard, position_ids=torch.arange(len(begins), dtype=torch.int32) - begins)\n",
    ),
]
OF_GRADIENTS = [
    Edit(
        "the prompts last row counts once",
        "backends.common.step.packs",
        "return scored if self.repeats is None else scored.index_select(0, self.repeats)",
        "if self.repeats is None:\n"
        "            return scored\n"
        "        rows, every = self.repeats.tolist(), scored.index_select(0, self.repeats)\n"
        "        again = torch.tensor([row in rows[:place] for place, row in enumerate(rows)])\n"
        "        return torch.where(again[:, None], every.detach(), every)",
    ),
    Edit(
        "prefixes have no gradient of what follows",
        PREFIXES,
        "in zip((dq, dk, dv), (rows, seen, seen), parts, strict=True):",
        "in zip((dq,), (rows,), parts[:1], strict=True):",
    ),
]


@pytest.mark.parametrize("bug", OF_SCORES + OF_GRADIENTS, ids=lambda bug: bug.name)
def test_the_comparison_of_prefixes_catches(bug: Edit) -> None:
    model = SmallModel()
    with plant(bug), nullcontext() if bug in OF_GRADIENTS else pytest.raises(AssertionError, match="logprobs"):
        results = model.check_scores(group_of_four(), "prompts")
    if bug in OF_GRADIENTS:
        with pytest.raises(AssertionError):
            check_gradients(*results)


# ------------------------------------------------------------------------------------------------------------ exports
CONVERTER, SOURCE = "backends.common.hugging_face.converter", "backends.megatron.offline"
READ = "return dict(zip(plan.placement.source_names(), tensors, strict=True))"
OTHER = 'name.replace("k_proj", "-").replace("v_proj", "k_proj").replace("-", "v_proj")'
ALPHA = Edit(
    "alpha is forgotten",
    CONVERTER,
    "write_adapter_settings(hidden, lora,",
    'write_adapter_settings(hidden, lora.model_copy(update={"alpha": float(lora.rank)}),',
)
SWAPPED = Edit(  # their factors have the same shapes
    "keys and values are swapped",
    SOURCE,
    READ,
    f"{READ.replace('return', 'found =')}\n        return {{name: found.get({OTHER}, found[name]) for name in found}}",
)
ZERO = Edit("the adapter is zero", SOURCE, READ, READ.replace("tensors,", "[0 * each for each in tensors],"))
UNMERGED = Edit(
    "the base is not merged",
    CONVERTER,
    "return torch.add(weight.float(), found[b].float() @ found[a].float(), alpha=self._model.lora.scale)",
    "return tensor",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[SavedLora, Tensor]:
    run = SavedLora(tmp_path_factory.mktemp("run"), "qwen3", "single")
    return run, expected_logits(run)


@pytest.mark.parametrize(
    ("bug", "merge"),
    [(bug, False) for bug in (None, ALPHA, SWAPPED, ZERO)] + [(bug, True) for bug in (None, SWAPPED, ZERO, UNMERGED)],
    ids=lambda each: each.name if isinstance(each, Edit) else str(each),
)
def test_a_wrong_export_is_noticed(bug: Edit | None, merge: bool, saved: Any, tmp_path: Path) -> None:
    run, expected = saved
    with plant(*([] if bug is None else [bug])):
        output = converted(run, tmp_path / "output", merge=merge)
    with nullcontext() if bug is None else pytest.raises(AssertionError, match="not close"):
        if merge:
            check_whole(output, expected)
        else:
            check_adapter(run, output, expected)
