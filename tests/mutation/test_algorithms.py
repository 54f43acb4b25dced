"""Put known bugs of packed RL training into the algorithm layer, one at a time: the named tests must fail.

Bugs of rollouts of several rows, on their way to training, are covered too. The sources are copied to a temporary
folder and changed there, and the tests run against the copy in their own process. Not covered: bugs of the parallel
layer, of engines and of the rest of the orchestration.
"""

import importlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import slime_like
from tests.support.forks import clean_forks

ROOT = Path(__file__).parents[2]
SOURCES = Path(slime_like.__file__).parent
TIMEOUT_S = 120


@dataclass(frozen=True)
class Mutation:
    """Replaces ``before`` by ``after`` in ``slime_like/<room>/<file>``; its test ``caught_by`` must then fail."""

    bug: str
    file: str
    before: str
    after: str
    caught_by: str
    room: str = "algorithms"

    @property
    def target(self) -> str:
        return f"tests/unit/{self.room}/{self.caught_by}"


MUTATIONS = [
    Mutation(
        "logits are read at the token instead of before it",
        "packing/pack.py",
        "nonzero().squeeze(1) - 1",
        "nonzero().squeeze(1)",
        "test_logprobs.py::test_response_logprobs_of_each_sequence_alone",
    ),
    Mutation(
        "the last response token carries no loss",
        "packing/fields.py",
        "    mask = loss_mask.numpy()\n",
        "    mask = loss_mask.numpy()\n    mask[lengths.response.cumsum() - 1] = False\n",
        "test_packing.py::test_layout_written_out_by_loops",
    ),
    Mutation(
        "padding belongs to the last sequence",
        "packing/fields.py",
        "np.append(np.arange(lengths.total.size), -1)",
        "np.append(np.arange(lengths.total.size), lengths.total.size - 1)",
        "test_packing.py::test_padding_belongs_to_no_sequence",
    ),
    Mutation(
        "positions run on over the pack",
        "packing/fields.py",
        "    positions -= np.repeat(firsts, segments)\n",
        "",
        "test_packing.py::test_layout_written_out_by_loops",
    ),
    Mutation(
        "the zigzag layout gets contiguous chunks",
        "context.py",
        'if layout == "contiguous":\n        total',
        "if True:\n        total",
        "test_context.py::test_zigzag_written_out_by_loops",
    ),
    Mutation(
        "positions stay behind when the zigzag moves the tokens",
        "context.py",
        "position_ids=torch.where(inside, packed.position_ids[source.clamp_min(0)], offset.to(torch.int32)),",
        "position_ids=torch.arange(offset.numel(), device=offset.device, dtype=torch.int32),",
        "test_context.py::test_split_and_merge_are_inverse",
    ),
    Mutation(
        "every micro-batch takes a separate mean",
        "losses/loss.py",
        "* inputs.token_weights).sum()",
        "* inputs.token_weights).sum() / inputs.token_weights.sum().clamp_min(1e-6)",
        "test_losses.py::test_token_losses",
    ),
    Mutation(
        "a fully masked sample counts in the denominator",
        "reduction.py",
        "return float(sum(count > 0 for count in counts))",
        "return float(len(counts))",
        "test_reduction.py::test_a_fully_masked_sample_adds_nothing",
    ),
    Mutation(
        "groups are identified by position",
        "advantages.py",
        "torch.unique(ids,",
        "torch.unique_consecutive(ids,",
        "test_advantages.py::test_group_formulas_on_uneven_shuffled_groups",
    ),
    Mutation(
        "the ratio is taken against a detached copy of itself",
        "losses/policy.py",
        'bounded_exp(log_ratio(inputs.logprobs, required(inputs, "old_logprobs")))',
        "bounded_exp(log_ratio(inputs.logprobs, inputs.logprobs.detach()))",
        "test_losses.py::test_ratio_and_clip_fraction_come_from_the_old_policy",
    ),
    Mutation(
        "a ratio overflows",
        "importance.py",
        "log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()",
        "log_ratios.exp()",
        "test_bounds.py::test_flat_groups_and_far_policies",
    ),
    Mutation(
        "a veto looks at what the correction left of a ratio",
        "importance.py",
        "log_ratios < math.log(veto)",
        "weights < veto",
        "test_importance.py::test_a_veto_removes_whole_sequences",
    ),
    Mutation(
        "the head scores without the sampling temperature",
        "head.py",
        "row_sums(x.div_(temperatures.to(x.dtype)[:, None]), column",
        "row_sums(x, column",
        "test_head.py::test_any_sharding_equals_the_whole",
    ),
    Mutation(
        "response logprobs ignore the temperature",
        "logprobs.py",
        "None if temperature == 1.0 else",
        "None if temperature > 0 else",
        "test_logprobs.py::test_response_logprobs_of_each_sequence_alone",
    ),
    Mutation(
        "the mean is over rows instead of rollouts",
        "reduction.py",
        "places.setdefault(rollout, len(places))",
        "places.setdefault(row, len(places))",
        "test_rollout_rows.py::test_a_published_example",
    ),
    Mutation(
        "rollouts are grouped by the position of rows",
        "advantages.py",
        "group_ids = [rollout.group_id for rollout in rollouts]",
        "group_ids = [row.group_id for rollout in rollouts for row in rollout.rows][: len(rollouts)]",
        "test_rows.py::test_a_rollout_has_one_reward_and_one_advantage",
        room="orchestration/rollout",
    ),
    Mutation(
        "every row of a rollout has the last one's mask",
        "requests.py",
        "_copy(segment.loss_mask, np.bool_)",
        "_copy(np.resize(segments[-1].loss_mask, len(segment.token_ids)), np.bool_)",
        "test_rows.py::test_a_row_for_each_segment",
        room="orchestration/rollout",
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.bug)
def test_mutation_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    target = mutation.target
    copy_sources(tmp_path, mutation)
    assert run_apart(tmp_path, target) == pytest.ExitCode.TESTS_FAILED, f"{target} passes although {mutation.bug}"


def test_the_copy_passes_without_mutation(tmp_path: Path) -> None:
    """Otherwise a broken copy would look like a caught mutation."""
    copy_sources(tmp_path, None)
    targets = sorted({mutation.target for mutation in MUTATIONS})
    assert run_apart(tmp_path, *targets) == pytest.ExitCode.OK


def copy_sources(folder: Path, mutation: Mutation | None) -> None:
    shutil.copytree(SOURCES, folder / "slime_like")  # with the compiled modules, which stay valid
    if mutation is None:
        return
    file = folder / "slime_like" / mutation.room / mutation.file
    text = file.read_text()
    assert text.count(mutation.before) == 1, f"{mutation.file} no longer has exactly one {mutation.before!r}; adapt it"
    file.write_text(text.replace(mutation.before, mutation.after))


def run_apart(folder: Path, *targets: str) -> int:
    # Forks of a clean server are quick, and free of threads that earlier tests left in this process.
    process = clean_forks().Process(target=_run, args=(folder, targets))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"the test run took longer than {TIMEOUT_S} s")
    return process.exitcode


def _run(folder: Path, targets: tuple[str, ...]) -> None:
    """Forget the real modules, import the copy instead, and run the named tests quietly."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("slime_like", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.import_module("slime_like")  # before pytest puts the real tree first in the path
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    # The plugin for unraisable exceptions would search all imported objects for garbage, which takes most of the time.
    plugins = ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    arguments = ["-x", "-q", *plugins, "--rootdir", str(ROOT), "--hypothesis-profile", "mutation"]
    code = pytest.main([*arguments, *(str(ROOT / target) for target in targets)])
    module = sys.modules.get("slime_like.algorithms")
    came_from_copy = module is not None and str(module.__file__).startswith(str(folder))
    os._exit(int(code) if came_from_copy else 100)
