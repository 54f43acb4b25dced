"""`slime-like train` for a few steps on the real components."""

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_like.config.reading.load import load_config
from slime_like.data.dump import load_trajectories
from slime_like.examples.tiny_model import VOCAB_SIZE, make_tiny_model
from slime_like.observability.report.data import read_run
from tests.conftest import Tiny
from tests.support.processes import succeed
from tests.support.shared_cluster import train_together

PHASES = ("wait", "generate", "reward", "score", "train", "sync", "orchestration")
SFT_ROWS = 64
"""Conversations of a supervised step."""
SFT_EPSILON = 1e-3
"""About the gradients' root mean square, so updates depend smoothly on gradients and rounding flips no sign."""


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metrics_of(run_dir) if "train_actor_training/loss" in row]


ENGINES = {"vllm": "--rollout.top_p 0.9 --rollout.top_k 40 --rollout.min_p 0.02", "sglang": ""}


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with each engine. A KL term needs the reference."""
    root = tmp_path_factory.mktemp("runs")
    flags = ["--algorithm.kl.coef", "0.01", "--algorithm.minibatches", "1", "--logging.tensorboard", "true"]
    flags += ["--trainer.target_tokens_per_batch", "256", "--algorithm.old_logprobs", "score"]
    halves = [{"name": name, "files": [str(tiny.data / f"{name}.jsonl")]} for name in ("train", "sft")]
    flags += ["--profile.steps", "[2]"]
    flags += ["--data.train", "[]", "--data.mixture", json.dumps([{**halves[0], "weight": 3}, halves[1]])]
    each = [
        tiny.rl_flags(root / engine, "--rollout.engine", engine, *flags, *cut.split())
        for engine, cut in ENGINES.items()
    ]
    train_together([*each, truncated(tiny, root, "transformers")], root)
    return root


@pytest.mark.parametrize("engine", ENGINES)
def test_rl_runs_and_every_claim_of_a_step_holds(tiny: Tiny, runs: Path, engine: str) -> None:
    """With one update per step, the ratio is 1.

    A run with vLLM over the whole vocabulary: test_killed_processes.py.
    """
    run_dir, cut = runs / engine, ENGINES[engine]
    steps = steps_of(run_dir)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["train_actor_training/old_gap_max"] < 1e-6  # the same weights give the same scores
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4  # float32: engine and trainer agree
        assert row["weights/probe_gap"] < 1e-4
        assert 0 < row["train_actor_training/entropy"] < math.log(40 if cut else VOCAB_SIZE)
        assert row["train_actor_training/ratios"] == pytest.approx(1.0, abs=1e-4)
        assert math.isfinite(row["train_actor_training/grad_norm"])
        shares = {name: row[f"sources/{name}/share"] for name in ("train", "sft")}
        assert shares == {"train": 0.75, "sft": 0.25}
        mean = sum(share * row[f"sources/{name}/total_reward_mean"] for name, share in shares.items())
        assert mean == pytest.approx(row["ref_actor_rewards/total_reward_mean"])
        total = row["train_actor_performance/total_step_time (s)"]
        assert sum(row[f"phases/{phase} (s)"] for phase in PHASES) == pytest.approx(total, rel=1e-3)
    assert steps[0]["train_actor_training/kl_loss"] == pytest.approx(0.0, abs=1e-6)  # the reference is the start
    assert steps[1]["train_actor_training/kl_loss"] > 0
    assert {row["step"] for row in metrics_of(run_dir) if "evaluation/accuracy" in row} == {0, 2}
    table = (run_dir / "tables" / "held_out_debug_table.jsonl").read_text().splitlines()
    held_out = [json.loads(line) for line in table]
    assert [(row["step"], row["Sequence ID"]) for row in held_out] == [(step, i) for step in (0, 2) for i in range(4)]
    assert {row["Dataset"] for row in held_out} == {"eval"}
    asked = [json.loads(line) for line in (tiny.data / "eval.jsonl").read_text().splitlines()[:4]]
    for row, question in zip(held_out, asked * 2, strict=True):
        assert question["prompt"] in row["Prompt"] and row["Answer"] == question["answer"]
        assert row["Success"] == row["Response"].removesuffix("<eos>").endswith(question["answer"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_profiled_step_has_a_trace_of_each_process(runs: Path, engine: str) -> None:
    """Traces are JSON in Chrome's format, which Perfetto reads. Ranks' phases are named."""
    found = sorted((runs / engine / "profiles" / "step-2").glob("*.json.gz"))
    assert [path.name for path in found] == ["engine-0-rank-0.json.gz", "rank-0.json.gz"]
    assert not (runs / engine / "profiles" / "step-1").exists()
    names = []
    for path in found:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        spans = [event for event in events if event["ph"] == "X" and event["dur"] >= 0]
        names.append({span["name"] for span in spans})
        assert sum(span["name"].startswith("aten::") for span in spans) > 1000
    assert {"begin_step", "accumulate", "finish_step", "score"} <= names[1] and "aten::mm" in names[1]
    assert read_run(runs / engine).profiles == tuple(f"profiles/step-2/{path.name}" for path in found)


def conversations(tiny: Tiny, path: Path) -> list[list[tuple[str, str]]]:
    """Write conversations of one or two sums, every other one after a system message. Return (role, text) pairs."""
    sums = [json.loads(line) for line in (tiny.data / "sft.jsonl").read_text().splitlines()[: 3 * SFT_ROWS + 1]]
    written = []
    for number, (first, second) in enumerate(itertools.pairwise(sums)):
        messages = [("system", "Add.")] * (number % 2)
        for row in (first, second)[: 1 + number % 3]:
            messages += [("user", row["prompt"]), ("assistant", row["response"])]
        written.append(messages)
    rows = [{"messages": [{"role": role, "content": text} for role, text in messages]} for messages in written]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


def losses_by_transformers(tiny: Tiny, conversations: list[list[tuple[str, str]]], steps: int) -> Iterator[float]:
    """Yield the losses of AdamW's first steps on the conversations in order. Only answers have labels.

    Pieces are encoded separately, since every byte is a token of the tiny tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is decays], "weight_decay": 0.5 * decays}
              for decays in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=SFT_EPSILON)
    for step in range(steps):
        ids, labels = [], []
        for messages in conversations[step * SFT_ROWS : (step + 1) * SFT_ROWS]:
            pieces = [(tokenizer.encode(f"<{role}>"), tokenizer.encode(text + "<eos>" * (role == "assistant")), role)
                      for role, text in messages]  # fmt: skip
            ids.append(torch.tensor([token for header, text, _ in pieces for token in header + text]))
            labels.append(torch.tensor([
                token for header, text, role in pieces
                for token in [-100] * len(header) + (text if role == "assistant" else [-100] * len(text))
            ]))  # fmt: skip
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = model(input_ids=padded, labels=targets).loss
        yield loss.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.acceptance
@pytest.mark.parametrize("mode", ["sampled", "exact"])
def test_each_source_is_distilled_from_its_teacher(tiny: Tiny, tmp_path: Path, mode: str) -> None:
    """The first step's KLs are those of float64 models on the saved rollouts. Exact: with workers, and resumed."""
    sources, sections = {"train": 1, "sft": 2}, []
    for name, seed in sources.items():
        make_tiny_model(tmp_path / name, seed=seed)
        sections.append({"name": name, "files": [str(tiny.data / f"{name}.jsonl")]})
    flags = ["--data.train", "[]", "--data.mixture", json.dumps(sections), "--rollout.engine", "transformers"]
    flags += ["--distillation.coef", "1", "--distillation.mode", mode, "--debug.save_rollouts", str(tmp_path / "kept")]
    flags += [part for name in sources for part in (f"--distillation.teachers.{name}", str(tmp_path / name))]
    flags += [
        "--algorithm.minibatches",
        "1",
        "--distillation.placement",
        {"sampled": "trainer", "exact": "workers"}[mode],
    ]
    succeed(tiny.rl_flags(tmp_path / "run", *flags, "--steps", "1"), tmp_path / "log")
    if mode == "exact":
        succeed(tiny.rl_flags(tmp_path / "run", *flags, "--steps", "2"), tmp_path / "log")
    student, *teachers = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (tiny.model, *(tmp_path / name for name in sources))
    )
    kls: dict[str, list[torch.Tensor]] = {name: [] for name in sources}
    for row in load_trajectories(tmp_path / "kept" / "step-000001.pt"):
        ids = torch.cat([row.prompt_tokens, row.response_tokens])[None]
        with torch.no_grad():
            models = student, dict(zip(sources, teachers, strict=True))[row.source or ""]
            own, other = (model(ids).logits[0, row.prompt_len - 1 : -1].log_softmax(-1) for model in models)
        kl = (own.exp() * (own - other)).sum(-1)
        if mode == "sampled":
            kl = (own - other).gather(1, row.response_tokens[:, None])[:, 0]
        kls[row.source or ""].append(kl[row.loss_mask])
    first, *others = steps_of(tmp_path / "run")
    for row in others:
        assert all(row[f"sources/{name}/distillation_kl"] > 0.1 for name in sources)
    for name, found in kls.items():
        wanted = float(torch.cat(found).mean())
        assert wanted > 0.1 and first[f"sources/{name}/distillation_kl"] == pytest.approx(wanted, abs=1e-5)


def test_a_supervised_run_learns_and_exports(tiny: Tiny, tmp_path: Path) -> None:
    """Transformers and torch compute the same losses for the first three steps. Runs in a new interpreter."""
    run_dir, data = tmp_path / "run", tmp_path / "conversations.jsonl"
    written = conversations(tiny, data)
    flags = ["--data.train", str(data), "--data.messages_key", "messages", "--data.shuffle", "false"]
    flags += ["--rollout.prompts_per_step", str(SFT_ROWS), "--trainer.optimizer.eps", str(SFT_EPSILON)]
    succeed(tiny.sft_flags(run_dir, *flags), tmp_path / "log", forked=False)
    losses = [row["train_actor_training/loss"] for row in steps_of(run_dir)]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    assert losses[:3] == pytest.approx(list(losses_by_transformers(tiny, written, steps=3)), rel=1e-5)

    before = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert (run_dir / "checkpoints" / "latest" / "state.json").is_file()
    assert "\nstep 20/20 | " in (run_dir / "driver.log").read_text()
    assert (run_dir / "worker_logs" / "trainer-0.log").is_file() and not (run_dir / "worker_logs").is_symlink()
    resolved = load_config(run_dir / "config.yaml", [])
    assert resolved.steps == 20 and resolved.algorithm.loss.name == "sft"


_GAME = """
from slime_like.interfaces import Step

class Game:
    def reset(self, task):
        return 0

    def step(self, state, response):
        return Step(state, "again")
"""
# With many stop tokens, most turns of a random model end.
_STOPS = f"--rollout.stop_token_ids [{','.join(map(str, range(2, 262, 10)))}]"
_TALKING = f"{_STOPS} --rollout.environment.max_turn_tokens 24 --rollout.max_new_tokens 96 --rollout.environment.name"
_TOP = "--rollout.top_k 40"
_TRUNCATED = {
    "transformers": "",
    "vllm-tp2": f"{_TOP} --rollout.tensor 2 --trainer.parallel.tensor 2",
    "sglang-tp2": f"{_TOP} --rollout.tensor 2 --trainer.parallel.tensor 2",
    "transformers-tp2": f"{_TOP} --trainer.parallel.tensor 2 --trainer.share_prefixes prompts {_TALKING} GAME",
    "sglang-talking": f"--trainer.backend fsdp --trainer.share_prefixes tree {_TALKING} GAME",
}


def truncated(tiny: Tiny, root: Path, case: str) -> list[str]:
    flags = ["--rollout.engine", case.partition("-")[0], "--rollout.top_p", "0.9", "--checkpoint.export_hf", "false"]
    flags += ["--algorithm.kl.coef", "0.01", "--algorithm.minibatches", "1", "--evaluation.files", "[]"]
    (root / "game.py").write_text(_GAME)
    return tiny.rl_flags(root / case, *flags, *_TRUNCATED[case].replace("GAME", f"{root}/game.py:Game").split())


@pytest.mark.acceptance
@pytest.mark.parametrize("case", list(_TRUNCATED)[1:])
def test_other_truncated_samples_are_trained_over_their_supports(tiny: Tiny, case: str, tmp_path: Path) -> None:
    succeed(truncated(tiny, tmp_path, case), tmp_path / "log")
    check_truncated(tmp_path / case, case)


def test_truncated_samples_are_trained_over_their_supports(runs: Path) -> None:
    check_truncated(runs / "transformers", "transformers")


def check_truncated(run_dir: Path, case: str) -> None:
    """Require that engine, trainer and reference agree about each logprob of the first step."""
    steps = steps_of(run_dir)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4  # 0.1 and more over the whole vocabulary
        assert row["train_actor_training/old_gap_max"] < 1e-6
        assert 0 < row["train_actor_training/entropy"] < (math.log(40) if _TOP in _TRUNCATED[case] else 5.0)
        assert "GAME" not in _TRUNCATED[case] or row["rollout/turns_mean"] > 1.5
    assert steps[0]["train_actor_training/kl_loss"] == pytest.approx(0.0, abs=1e-4)
    assert steps[1]["train_actor_training/kl_loss"] > 0
