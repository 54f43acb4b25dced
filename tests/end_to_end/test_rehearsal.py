"""``slime-like rehearse``: faults put into a recipe are found, each by its stage, and a sound recipe has none."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.main import main
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.examples.tiny_model import CHAT_TEMPLATE, byte_tokenizer, make_tiny_model
from slime_like.sandbox.rewards.pool import RewardItem
from slime_like.verification.rehearsal import answers, rehearsal
from slime_like.verification.rehearsal.finding import Finding
from slime_like.verification.rehearsal.rehearsal import rehearse
from slime_like.verification.rehearsal.rows import asked_answers
from slime_like.verification.rehearsal.small_recipe import RANKS, small_recipe
from tests.conftest import Tiny

ROOT = Path(__file__).parents[2]


class Recipe:
    """The quickstart's, with its own model and rows, and what is put into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model, self.train, self.held_out = directory / "model", directory / "train.jsonl", directory / "held.jsonl"
        make_tiny_model(self.model)
        self.write(self.train, [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(48)])
        self.write(self.held_out, [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)])
        self.flags = ["--rollout.engine", "transformers", "--trainer.optimizer.warmup_steps", "0"]

    def write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def use_template(self, template: str) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(self.model)

    def custom(self, code: str) -> None:
        (self.directory / "mine.py").write_text(code)

    @property
    def arguments(self) -> list[str]:
        places = {"model.path": self.model, "data.train": self.train, "evaluation.files": self.held_out}
        named = [text for name, path in places.items() for text in (f"--{name}", str(path))]
        return [str(ROOT / "configs" / "quickstart.yaml"), *named, *self.flags]

    @property
    def config(self) -> RunConfig:
        return load_config(Path(self.arguments[0]), self.arguments[1:])


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path)


def found(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.stage, finding.text) for finding in findings if finding.kind == "FOUND"]


def _longer_prompts(recipe: Recipe) -> None:
    rows = [{"prompt": "1" * (60 if a % 3 == 0 else 4), "answer": "1"} for a in range(30)]
    recipe.write(recipe.train, rows)


def _another_end(recipe: Recipe) -> None:
    for name in ("config.json", "generation_config.json"):
        path = recipe.model / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 3}))


def _wrong_answers(recipe: Recipe) -> None:
    recipe.write(recipe.train, [{"prompt": f"{a}+{a}=", "answer": f"see page {a}: the sum"} for a in range(40)])
    recipe.flags += ["--reward.functions", "[{name: multiple_choice}]"]


def _no_module(recipe: Recipe) -> None:
    recipe.custom("import no_such_module\n\ndef judge(prompt, response, answer):\n    return 1.0\n")
    recipe.flags += ["--reward.functions", json.dumps([{"name": f"{recipe.directory}/mine.py:judge"}])]


QUICK: dict[str, tuple[Callable[[Recipe], object], str, str]] = {
    "a layout that the model's heads do not divide into": (
        lambda r: r.flags.extend(["--trainer.parallel.tensor", "8"]), "settings", "trainer.parallel.tensor",
    ),
    "a token budget below the longest sequence": (
        lambda r: r.flags.extend(["--trainer.target_tokens_per_batch", "32"]), "settings", "target_tokens_per_batch",
    ),
    "a data key that rows do not have": (
        lambda r: r.flags.extend(["--data.prompt_key", "question"]), "rows", "question",
    ),
    "held-out rows in another form": (
        lambda r: r.write(r.held_out, [{"question": "1+1=", "answer": "2"}]), "rows", "held.jsonl:1",
    ),
    "prompts over the limit": (_longer_prompts, "rows", "(33.3%) over data.max_prompt_tokens"),
    "a template that drops the system prompt": (
        lambda r: (
            r.use_template(CHAT_TEMPLATE.replace("in messages", "in messages if message.role != 'system'")),
            r.flags.extend(["--data.system_prompt", "Add."]),
        ),
        "chat template", "system message",
    ),
    "a template that fails": (
        lambda r: r.use_template("{{ raise_exception('no user here') }}"), "rows", "no user here",
    ),
    "a template without a generation prompt": (
        lambda r: r.use_template(CHAT_TEMPLATE.partition("{% if add_generation_prompt")[0]),
        "chat template", "no generation prompt",
    ),
    "a template that begins twice": (
        lambda r: r.use_template(f"<bos><bos>{CHAT_TEMPLATE}"), "chat template", "'<bos>' stands twice",
    ),
    "a stop token that the model does not have": (
        lambda r: r.flags.extend(["--rollout.stop_token_ids", "[999999]"]), "chat template", "no stop token (999999)",
    ),
    "a stop token that never comes": (_another_end, "chat template", "no stop token"),
    "answers that no response can match": (_wrong_answers, "settings", "multiple_choice"),
    "a reward whose import fails": (_no_module, "settings", "no_such_module"),
}  # fmt: skip


@pytest.mark.parametrize("fault", QUICK)
def test_a_fault_of_rows_template_or_settings_is_found_before_anything_is_started(
    fault: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, stage, words = QUICK[fault]
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    (recipe.directory / "sound").mkdir()
    assert found(list(rehearse(recipe.config, recipe.directory / "sound"))) == []
    put(recipe)
    (recipe.directory / "faulty").mkdir()
    findings = found(list(rehearse(recipe.config, recipe.directory / "faulty")))
    assert {name for name, _ in findings} - {"settings"} <= {stage}
    assert any(name == stage and words in text for name, text in findings)


def test_what_is_right_in_form_and_no_task_is_noted(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    recipe.write(recipe.train, [{"prompt": f"{a}+1=", "answer": "4" * (a != 7)} for a in range(12)])
    recipe.flags += ["--run_dir", "/proc/no/run"]
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    assert found(findings) == []
    notes = [(finding.stage, finding.text) for finding in findings if finding.kind == "note"]
    parts = [
        ("this machine", "[run_dir]"), ("answers", "1 row of 12"), ("answers", "all 11 answers are '4'"),
        ("held-out rows", "8 of 8 held-out prompts"),
    ]  # fmt: skip
    for stage, words in parts:
        assert [stage for name, text in notes if name == stage and words in text] == [stage]


ASKED = "How many clips did Natalia sell altogether in April and May, 48 and 24?"


RANDOM = """
import random

def judge(prompt, response, answer):
    return random.random()
"""
HELD = "def judge(prompt, response, answer):\n    return float(response in answer)\n"
AGAINST = "def judge(prompt, response, answer):\n    return -float(response == answer), response == answer\n"
LONG = "She sold 48 clips in April and half as many in May, 72 in all. "


def _same_prompts(recipe: Recipe) -> None:
    recipe.write(recipe.train, [{"prompt": "Add.", "answer": str(a)} for a in range(12)])


def _conflicts(recipe: Recipe) -> None:
    recipe.write(recipe.train, [{"prompt": f"{a % 4}+1=", "answer": str(a)} for a in range(12)])


def _scored_by(code: str) -> Callable[[Recipe], None]:
    def put(recipe: Recipe) -> None:
        recipe.custom(code)
        recipe.flags += ["--reward.functions", json.dumps([{"name": f"{recipe.directory}/mine.py:judge"}])]

    return put


def _answered_by(text: str, *flags: str) -> Callable[[Recipe], None]:
    def put(recipe: Recipe) -> None:
        recipe.write(recipe.train, [{"prompt": f"{a}+1=", "answer": text + str(a + 1)} for a in range(12)])
        recipe.flags += flags

    return put


def _tested_by(tests: str) -> Callable[[Recipe], None]:
    def put(recipe: Recipe) -> None:
        recipe.write(recipe.train, [{"prompt": f"{a}*x=", "answer": tests} for a in range(12)])
        recipe.flags += ["--reward.functions", "[{name: code}]"]

    return put


def _late(recipe: Recipe) -> None:
    recipe.flags += ["--trainer.optimizer.warmup_steps", "500"]


@pytest.mark.parametrize(
    ("put", "kind", "stage", "words"),
    [
        (_same_prompts, "note", "prompts", "all 12 prompts are 'Add.'"),
        (_conflicts, "note", "prompts", "4 prompts stand in several rows, with different answers"),
        (_conflicts, "note", "prompts", "12 rows have 4 different prompts"),
        (_scored_by(RANDOM), "FOUND", "rewards", "got another reward when scored a second time"),
        (_scored_by(HELD), "note", "rewards", "an empty response gets no lower reward"),
        (_scored_by(AGAINST), "FOUND", "rewards", "another row's answer gets a higher reward than a row's own"),
        (_answered_by(f"{LONG}#### "), "FOUND", "answers", "12 of 12 answers of the data are whole solutions"),
        (_answered_by("So the result is "), "note", "answers", "12 of 12 answers of the data are sentences"),
        (
            _tested_by("def check(f):\n    assert f(2) == 4"),
            "FOUND",
            "settings",
            "only define, so that every program passes",
        ),
        (_tested_by("print('tested')"), "FOUND", "rewards", "the tests of 12 of 20 rows pass for an empty program"),
        (_late, "note", "settings", "trainer.optimizer.warmup_steps=500 lasts longer than the run's"),
        (_answered_by("1000", "--rollout.max_new_tokens", "1"), "note", "answers", "max_new_tokens=1; raise it"),
    ],
)
def test_rows_and_rewards_that_teach_nothing_are_told(
    put: Callable[[Recipe], None], kind: str, stage: str, words: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    put(recipe)
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    assert any((each.kind, each.stage) == (kind, stage) and words in each.text for each in findings)


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        (
            [(ASKED, ASKED), (f"{ASKED} ", ASKED)],
            "FOUND",
            "2 of 2 answers of the data equal their prompt, e.g. 'How many",
        ),
        ([(ASKED, ASKED), (ASKED, "72")], "note", "1 of 2 answers of the data equal their prompt"),
        ([(f"Think. {ASKED}", ASKED), (ASKED, "72")], "note", "1 of 2 answers of the data stand in their prompt"),
        ([("Is 7 prime, yes or no?", "yes"), ("", "")], None, ""),
    ],
)
def test_an_answer_that_is_its_prompt_is_found(rows: list[tuple[str, str]], kind: str | None, words: str) -> None:
    items = [RewardItem(prompt, answer, answer) for prompt, answer in rows]
    findings = [(finding.kind, finding.text) for finding in asked_answers(items, "the data")]
    assert [each for each, _ in findings] == [kind] * (kind is not None)
    assert all(words in text for _, text in findings)


def test_the_wrong_answer_key_is_found_though_every_answer_is_right_by_itself(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    recipe.flags += ["--data.answer_key", "prompt", "--reward.functions", "[{name: exact_match}]"]
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    assert [stage for stage, _ in found(findings)] == ["answers"]
    assert "48 of 48 answers of the data equal their prompt, e.g. '0+0='" in found(findings)[0][1]


def test_slow_rewards_and_another_vocabulary_are_noted(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    monkeypatch.setattr(answers, "_SLOW_STEP_S", 0.0)
    path = recipe.model / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"vocab_size": 3 * settings["vocab_size"]}))
    (recipe.directory / "out").mkdir()
    notes = [each for each in rehearse(recipe.config, recipe.directory / "out") if each.kind == "note"]
    assert sum(each.stage == "tokenizer" and "is it the model's?" in each.text for each in notes) == 1
    assert sum(each.stage == "rewards" and "raise reward.workers" in each.text for each in notes) == 1


def test_answers_from_which_the_reward_takes_its_part_are_no_finding(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    recipe.flags += ["--reward.functions", "[{name: math_verify}]"]
    recipe.flags += ["--rollout.max_new_tokens", "24"]
    boxed = [{"prompt": f"{a}+1=", "answer": f"{LONG}So it is $\\boxed{{{a + 1}}}$."} for a in range(6)]
    in_dollars = [{"prompt": f"{a}+2=", "answer": f"${a + 2}$ apples are left"} for a in range(6)]
    recipe.write(recipe.train, boxed + in_dollars)
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    assert [each for each in findings if each.stage == "answers"] == []


def test_a_source_of_which_no_answer_succeeds_is_named(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first source has more rows than are tried of all data without sources; the last has LaTeX alone."""
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    deep = "(" * 30 + "1" + ")" * 30  # of a response, math_verify reads 24 levels
    texts_of = {"broken": [deep] * 8, "half": ["7", deep], "latex": [r"\sqrt{3}", "[2,5)", "(3,4)"]}
    for name, texts in texts_of.items():
        rows = [{"prompt": f"{name} {i}?", "answer": text} for i, text in enumerate(texts)]
        recipe.write(recipe.directory / f"{name}.jsonl", rows)
    files = {"sums": recipe.train} | {name: recipe.directory / f"{name}.jsonl" for name in texts_of}
    mixture = [{"name": name, "files": [str(file)]} for name, file in files.items()]
    recipe.flags += ["--data.train", "[]", "--data.mixture", json.dumps(mixture)]
    recipe.flags += ["--reward.functions", "[{name: math_verify}]"]
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    texts = {
        finding.text.split("source ")[1].split()[0]: finding for finding in findings if "of source" in finding.text
    }
    assert {name: finding.kind for name, finding in texts.items()} == {
        "sums": "ok", "broken": "FOUND", "half": "note", "latex": "ok",
    }  # fmt: skip
    assert "0 of 8 own answers" in texts["broken"].text and "e.g. '((((" in texts["broken"].text
    assert "1 of 2 own answers" in texts["half"].text and "e.g. '((((" in texts["half"].text
    assert found(findings) == [("rewards", texts["broken"].text)]


def test_a_reward_that_no_answer_changes_is_noted(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun())
    recipe.custom("def kind(prompt, response, answer):\n    return 1.0\n")
    recipe.flags += ["--reward.functions", json.dumps([{"name": f"{recipe.directory}/mine.py:kind"}])]
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    assert found(findings) == []
    assert [f.stage for f in findings if f.kind == "note" and "no reward depends on the answer" in f.text] == [
        "rewards"
    ]


def test_a_fault_that_later_stages_meet_again_is_counted_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    again = [(False, "first steps", "trainer.parallel.tensor=2 [trainer.layout]"), (False, "resume", "lost [other]")]
    monkeypatch.setattr(rehearsal, "SmallRun", lambda *_: NoRun(again))
    recipe.flags += ["--trainer.parallel.tensor", "8"]
    (recipe.directory / "out").mkdir()
    findings = list(rehearse(recipe.config, recipe.directory / "out"))
    assert [stage for stage, _ in found(findings)] == ["settings", "resume"]
    assert ("note", "first steps") in [(finding.kind, finding.stage) for finding in findings]


class NoRun:
    """What is looked at here comes before the small run."""

    def __init__(self, outcomes: Sequence[tuple[bool, str, str]] = ()) -> None:
        self._outcomes = outcomes

    def stages(self) -> Sequence[tuple[bool, str, str]]:
        return self._outcomes


REWARD = """
from pathlib import Path
calls = 0

def judge(prompt, response, answer):
    global calls
    calls += 1
    if calls == 24:
        raise LookupError("call 24")
    with Path({train!r}).open("a") as file:
        file.write('{{"prompt": "1+2=", "answer": "3"}}\\n' * ({appends} and calls == 22))
    return float(len(response) % 3)
"""
GAME = """
from slime_like.interfaces import Step

class Game:
    def reset(self, task):
        return 0

    def step(self, state, response):
        return Step(state + 1, "again", reward=0.5) if state == 0 else {}["no such move"]
"""
ADVANTAGE = """
import torch

def flat(rewards, groups):
    raise RuntimeError("no advantage")
"""


def _judged_by(recipe: Recipe, appends: bool) -> None:
    recipe.custom(REWARD.format(train=str(recipe.train), appends=appends))
    recipe.flags += ["--reward.functions", json.dumps([{"name": f"{recipe.directory}/mine.py:judge"}])]
    recipe.flags += ["--reward.workers", "1"]


def _played(recipe: Recipe) -> None:
    recipe.custom(GAME)
    recipe.flags += ["--rollout.environment.name", f"{recipe.directory}/mine.py:Game", "--rollout.max_new_tokens", "60"]
    recipe.flags += ["--reward.functions", "[{name: environment}]", "--rollout.environment.max_turn_tokens", "8"]


SLOW: dict[str, tuple[Callable[[Recipe], object], dict[str, str]]] = {
    "a reward that raises in a later call": (
        lambda r: _judged_by(r, False), {"rewards": "call 24", "scoring": "call 24"},
    ),
    "an environment that raises in its second turn": (_played, {"scoring": "no such move"}),
    "an advantage that raises": (
        lambda r: (r.custom(ADVANTAGE), r.flags.extend(["--algorithm.advantage", f"{r.directory}/mine.py:flat"])),
        {"first steps": "estimator-failed"},
    ),
    "nothing": (lambda r: None, {}),
}  # fmt: skip


def test_a_reward_that_raises_in_a_later_call_and_data_that_change_before_the_resume(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    _judged_by(recipe, appends=True)
    directory = recipe.directory / "rehearsal"
    assert main(["rehearse", *recipe.arguments, "--directory", str(directory), "--small_steps", "2"]) == 1
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    stages = {rest[:13].strip(): rest for kind, rest in lines if kind == "FOUND"}
    assert stages.keys() == {"rewards", "resume", "scoring"}
    assert "data-changed" in stages["resume"]
    assert "call 24" in stages["scoring"] and "call 24" in stages["rewards"]
    assert "slime-like: " in (directory / "second.log").read_text()


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", SLOW)
def test_a_fault_that_only_a_run_shows_is_found_by_its_stage(fault: str, recipe: Recipe) -> None:
    put, expected = SLOW[fault]
    put(recipe)
    (recipe.directory / "rehearsal").mkdir()
    findings = dict(found(list(rehearse(recipe.config, recipe.directory / "rehearsal"))))
    assert findings.keys() == expected.keys()
    assert all(words in findings[stage] for stage, words in expected.items())


def test_a_recipe_without_held_out_rows_stays_one(tiny: Tiny, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["--evaluation.files", "[]", "--evaluation.every", "0"])
    small = small_recipe(config, tiny.model, tmp_path / "run", 3)
    assert (small.evaluation.files, small.evaluation.every) == ((), 0)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_recipes_keep_their_method_and_axes_when_they_are_made_small(name: str, tiny: Tiny, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml", [])
    small = small_recipe(config, tiny.model, tmp_path / "run", 3)
    assert small.trainer.parallel.world_size <= RANKS
    for axis in ("tensor", "pipeline", "context", "expert"):
        assert getattr(small.trainer.parallel, axis) == min(2, getattr(config.trainer.parallel, axis))
    for kept in ("loss", "advantage", "reduction", "clip_low", "clip_high", "kl_coef", "importance_correction"):
        assert getattr(small.algorithm, kept) == getattr(config.algorithm, kept)
    assert small.data == config.data and small.reward.functions == config.reward.functions
    assert small.cluster.placement == config.cluster.placement and small.rollout.engine == config.rollout.engine
