"""Put known bugs of packed RL training into the algorithm layer, one at a time: the named tests must fail.

Bugs of rollouts of several rows, on their way to training, are covered too. The tests run in a fork with the changed
code. Not covered: bugs of the parallel layer, of engines and of the rest of the orchestration.
"""

import os
from pathlib import Path

import pytest

from tests.support.forks import clean_forks
from tests.support.planted import Edit, plant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


TABLE = [
    (
        "logits are read at the token instead of before it",
        "slime_like.algorithms.packing.pack",
        "nonzero().squeeze(1) - 1",
        "nonzero().squeeze(1)",
        "algorithms/test_logprobs.py::test_response_logprobs_of_each_sequence_alone",
    ),
    (
        "the last response token carries no loss",
        "slime_like.algorithms.packing.fields",
        "    mask = loss_mask.numpy()\n",
        "    mask = loss_mask.numpy()\n    mask[lengths.response.cumsum() - 1] = False\n",
        "algorithms/test_packing.py::test_layout_written_out_by_loops",
    ),
    (
        "padding belongs to the last sequence",
        "slime_like.algorithms.packing.fields",
        "np.append(np.arange(lengths.total.size), -1)",
        "np.append(np.arange(lengths.total.size), lengths.total.size - 1)",
        "algorithms/test_packing.py::test_padding_belongs_to_no_sequence",
    ),
    (
        "positions run on over the pack",
        "slime_like.algorithms.packing.fields",
        "    positions -= np.repeat(firsts, segments)\n",
        "",
        "algorithms/test_packing.py::test_layout_written_out_by_loops",
    ),
    (
        "the zigzag layout gets contiguous chunks",
        "slime_like.algorithms.context",
        'if layout == "contiguous":\n        total',
        "if True:\n        total",
        "algorithms/test_context.py::test_zigzag_written_out_by_loops",
    ),
    (
        "positions stay behind when the zigzag moves the tokens",
        "slime_like.algorithms.context",
        "position_ids=torch.where(inside, packed.position_ids[source.clamp_min(0)], offset.to(torch.int32)),",
        "position_ids=torch.arange(offset.numel(), device=offset.device, dtype=torch.int32),",
        "algorithms/test_context.py::test_split_and_merge_are_inverse",
    ),
    (
        "every micro-batch takes a separate mean",
        "slime_like.algorithms.losses.loss",
        "* inputs.token_weights).sum()",
        "* inputs.token_weights).sum() / inputs.token_weights.sum().clamp_min(1e-6)",
        "algorithms/test_losses.py::test_token_losses",
    ),
    (
        "a fully masked sample counts in the denominator",
        "slime_like.algorithms.reduction",
        "return float(sum(count > 0 for count in counts))",
        "return float(len(counts))",
        "algorithms/test_reduction.py::test_a_fully_masked_sample_adds_nothing",
    ),
    (
        "groups are identified by position",
        "slime_like.algorithms.advantages",
        "torch.unique(ids.long()",
        "torch.unique_consecutive(ids.long()",
        "algorithms/test_advantages.py::test_group_formulas_on_uneven_shuffled_groups",
    ),
    (
        "the ratio is taken against a detached copy of itself",
        "slime_like.algorithms.losses.policy",
        'bounded_exp(log_ratio(inputs.logprobs, required(inputs, "old_logprobs")))',
        "bounded_exp(log_ratio(inputs.logprobs, inputs.logprobs.detach()))",
        "algorithms/test_losses.py::test_ratio_and_clip_fraction_come_from_the_old_policy",
    ),
    (
        "a ratio overflows",
        "slime_like.algorithms.importance",
        "log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()",
        "log_ratios.exp()",
        "algorithms/test_bounds.py::test_flat_groups_and_far_policies",
    ),
    (
        "a veto looks at what the correction left of a ratio",
        "slime_like.algorithms.importance",
        "log_ratios < math.log(veto)",
        "weights < veto",
        "algorithms/test_importance.py::test_a_veto_removes_whole_sequences",
    ),
    (
        "the head scores without the sampling temperature",
        "slime_like.algorithms.head",
        "row_sums(x.div_(temperatures.to(x.dtype)[:, None]), column",
        "row_sums(x, column",
        "algorithms/test_head.py::test_any_sharding_equals_the_whole",
    ),
    (
        "response logprobs ignore the temperature",
        "slime_like.algorithms.logprobs",
        "None if temperature == 1.0 else",
        "None if temperature > 0 else",
        "algorithms/test_logprobs.py::test_response_logprobs_of_each_sequence_alone",
    ),
    (
        "the mean is over rows instead of rollouts",
        "slime_like.algorithms.reduction",
        "places.setdefault(rollout, len(places))",
        "places.setdefault(row, len(places))",
        "algorithms/test_rollout_rows.py::test_a_published_example",
    ),
    (
        "rollouts are grouped by the position of rows",
        "slime_like.orchestration.rollout.advantages",
        "group_ids = [rollout.group_id for rollout in rollouts]",
        "group_ids = [row.group_id for rollout in rollouts for row in rollout.rows][: len(rollouts)]",
        "orchestration/rollout/test_rows.py::test_a_rollout_has_one_reward_and_one_advantage",
    ),
    (
        "every row of a rollout has the last one's mask",
        "slime_like.orchestration.rollout.requests",
        "_copy(segment.loss_mask, np.bool_)",
        "_copy(np.resize(segments[-1].loss_mask, len(segment.token_ids)), np.bool_)",
        "orchestration/rollout/test_rows.py::test_a_row_for_each_segment",
    ),
]
BUGS = [(Edit(*edit), target) for *edit, target in TABLE]


@pytest.mark.parametrize(("bug", "target"), BUGS, ids=lambda each: each.name if isinstance(each, Edit) else "")
def test_a_bug_is_caught(bug: Edit, target: str) -> None:
    assert run_apart([bug], target) == pytest.ExitCode.TESTS_FAILED, f"{target} passes although {bug.name}"


def test_the_tests_pass_without_a_bug() -> None:
    """Otherwise a broken fork would look like a caught bug."""
    assert run_apart([], *sorted({target for _, target in BUGS})) == pytest.ExitCode.OK


def run_apart(bugs: list[Edit], *targets: str) -> int:
    # Forks of a clean server are quick, and free of threads that earlier tests left in this process.
    process = clean_forks().Process(target=_run, args=(bugs, targets))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"the test run took longer than {TIMEOUT_S} s")
    return process.exitcode


def _run(bugs: list[Edit], targets: tuple[str, ...]) -> None:
    """Run the named tests quietly."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    # The plugin for unraisable exceptions would search all imported objects for garbage, which takes most of the time.
    plugins = ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    arguments = ["-x", "-q", *plugins, "--rootdir", str(ROOT), "--hypothesis-profile", "mutation"]
    code = 100  # for an error here, which is no caught bug
    try:
        with plant(*bugs):
            code = int(pytest.main([*arguments, *(str(ROOT / "tests/unit" / target) for target in targets)]))
    finally:
        os._exit(code)
