"""The page, read with Python's HTML parser, compared with the values that the run was made of."""

import io
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slime_like.commands.root import run
from slime_like.errors import DataError, SlimeLikeError
from slime_like.observability.metrics import RESTARTS_FILE, MetricLogger, read_lines
from slime_like.observability.names import ACCURACY, FAILURES, REWARD, STEP_TIME
from slime_like.observability.report import data as report_data
from slime_like.observability.report.data import read_run, summary
from slime_like.observability.report.panels import panels
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE
from tests.support.rejections import Rejects
from tests.unit.observability.records import SFT_METRICS
from tests.unit.observability.report_run import (
    ACCURACIES,
    HOSTILE,
    SAMPLES,
    STEPS,
    TABLES_EVERY,
    TOKENS,
    printed,
    write_report,
    write_run,
)

Logged = list[tuple[int, dict[str, float]]]


class Page(HTMLParser):
    """Elements and texts of a page, and the JSON of its data blocks."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.blocks: dict[str, str] = {}
        self._script: str | None = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "script":
            self._script = attributes.get("id") or "page script"

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.blocks[self._script] = self.blocks.get(self._script, "") + data
        else:
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run <b>&")


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return Page(path.read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------------- page
def test_page_fetches_nothing_and_escapes_text(page: Page) -> None:
    assert {name for name, _ in page.tags}.isdisjoint({"img", "link", "iframe", "object", "embed", "br", "b", "i"})
    assert [attributes.get("id") for name, attributes in page.tags if name == "script"] == [
        "chart-data", "token-data", None, None,
    ]  # fmt: skip
    for name, attributes in page.tags:
        assert {"src", "href", "style", "action"}.isdisjoint(attributes), name
        assert not [attribute for attribute in attributes if attribute.startswith("on")], name


def test_hostile_text_is_shown_unchanged(page: Page) -> None:
    shown = "".join(page.texts)
    for text in HOSTILE[:6]:
        assert text in shown
    assert r"\x1b[2J\x07\u202eesrever\u2028\ud800" in shown
    assert not set("\x1b\x07\u202e\u2028") & set(shown)


def test_page_has_every_sample_and_token(page: Page) -> None:
    logged = STEPS // TABLES_EVERY * SAMPLES
    buttons = [attributes["data-sample"] for name, attributes in page.tags if "data-sample" in attributes]
    assert sorted(map(int, filter(None, buttons))) == list(range(logged))
    held_out = len(ACCURACIES) * SAMPLES
    assert page.count("tr") == logged + held_out + 3  # one row each, and three headings
    tokens = json.loads(page.blocks["token-data"])
    assert len(tokens["samples"]) == logged
    newest = tokens["samples"][0]
    assert newest["label"] == "step 30, 30-0<i>, 6 tokens" and newest["note"] == ""
    first = dict(zip(tokens["columns"], newest["rows"][0], strict=True))
    assert first["Decoded Token"] == HOSTILE[0] and first["Loss Mask"] is True
    assert first["Abs Diff Pi-Generated"] == pytest.approx(1e-5, rel=1e-2)
    assert first["Abs Diff Pi-Ref"] == pytest.approx(0.5, rel=1e-4)
    assert tokens["samples"][1]["rows"][0][tokens["columns"].index("Ref Logprob")] is None


def test_curves_carry_the_logged_values(page: Page, run_dir: Path) -> None:
    titles = [panel.spec.title for panel in panels(read_run(run_dir))]
    *drawn, phases = json.loads(page.blocks["chart-data"]).values()
    charts = dict(zip(titles, drawn, strict=True))
    assert titles[:4] == ["Reward", "Reward functions", "Held-out accuracy", "Loss"]
    ranges = [chart["layout"]["xaxis"]["range"] for chart in drawn]
    assert ranges == [[-0.5, STEPS + 0.5]] * len(titles)  # evaluated at step 0
    loss, policy = charts["Loss"]["data"]
    assert loss["x"] == list(range(1, STEPS + 1))
    assert loss["y"] == pytest.approx([1 / step for step in range(1, STEPS + 1)], rel=1e-5)
    assert policy["y"] == pytest.approx([0.5 / step for step in range(1, STEPS + 1)], rel=1e-5)
    assert charts["Held-out accuracy"]["data"][0]["y"] == [0.25, 0.5, 0.875]
    assert charts["Reward"]["data"][0]["y"] == pytest.approx([1.2] * STEPS)  # weighted
    assert [line["name"] for line in charts["Reward functions"]["data"]] == ["math_verify", "length"]
    seconds = {bars["name"]: sum(bars["y"]) for bars in phases["data"]}
    assert seconds["generate 50.0%"] == pytest.approx(4.0 * STEPS) and {"train 25.0%", "sync 5.0%"} <= seconds.keys()
    assert [value for name, value in seconds.items() if "orchestration 1." in name] == pytest.approx([0.1 * STEPS])
    assert sum(attributes.get("class") == "chart" for _, attributes in page.tags) == len(titles) + 1


def test_sources_have_a_panel(tmp_path: Path, logger: MetricLogger) -> None:
    names = [f"sources/{name}/total_reward_mean" for name in ("sums", "words")]
    for step in (1, 2):
        logger.log(step, {names[0]: step, names[1]: 0.5, "sources/sums/share": 0.25})
    drawn = panels(read_run(tmp_path))
    assert [[(line["name"], line["y"]) for line in panel.figure["data"]] for panel in drawn] == [
        [("sums", [1, 2]), ("words", [0.5, 0.5])]
    ]


def test_summary(run_dir: Path) -> None:
    (run_dir / "config.until-step-000008.yaml").touch()
    entries = dict(summary(read_run(run_dir)))
    assert entries["model"] == f"{run_dir / 'model'}, bfloat16"
    assert entries["trainer"] == "megatron, TP1 x PP1 x CP1 x DP1 (1 rank)"
    assert entries["engine"].startswith("vllm, 1 engine of TP1")
    assert entries["steps"] == "30 of 30"
    assert entries["held-out accuracy"] == "0.250 (step 0) → 0.875 (step 30)"
    assert entries["mean reward"] == "1.200 → 1.200 (first and last 3 steps)"
    assert entries["trained tokens/s"].startswith("10 response tokens/s over 240.0 s")  # 80 tokens in 8 s, 30 times
    assert entries["settings changed"].endswith("config.until-step-000008.yaml")
    assert "restarts" not in entries


def test_restarts_are_counted_by_cause(tmp_path: Path, logger: MetricLogger) -> None:
    logger.log(1, SFT_METRICS)
    for step, code in ((3, "killed"), (7, "worker-died"), (9, "killed")):
        row = {"step": step, "code": code, "resumed_from": step - 2, "sentence": f"died at {step}"}
        with (tmp_path / RESTARTS_FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")
    text = dict(summary(read_run(tmp_path)))["restarts"]
    assert text == "3 (2 by killed, 1 by worker-died); the last at step 9, resumed from 7: died at 9"


# ------------------------------------------------------------------------------------------------------ unusual runs
def test_unfinished_lines_and_other_files_are_skipped(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    for name in ("metrics.jsonl", f"tables/{SAMPLE_TABLE}.jsonl", f"tables/{TOKEN_TABLE}.jsonl"):
        os.truncate(copy / name, (copy / name).stat().st_size - 20)
    run = read_run(copy)
    assert [len(run.tables[name].rows) for name in (SAMPLE_TABLE, TOKEN_TABLE)] == [11, 12 * TOKENS - 1]
    assert max(record["step"] for record in run.records) == STEPS
    os.mkfifo(copy / "tables" / "pipe.jsonl")  # reading it would never end
    (copy / "tables" / "directory.jsonl").mkdir()
    assert write_report(copy).is_file()
    assert set(read_run(copy).tables) == {HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE}


def test_repeated_steps_show_the_last_rows(tmp_path: Path, logger: MetricLogger) -> None:
    logger.log(1, {"train_actor_training/loss": 1.0})
    rows = [(1, "a"), (2, "b"), (3, "c"), (2, "d"), (2, "e"), (2, "d")]
    for count, (step, name) in enumerate(rows):
        logger.log_table(step, SAMPLE_TABLE, [{"Sequence ID": name, "count": count}])
    stored = read_run(tmp_path).tables[SAMPLE_TABLE].rows
    assert [(row["Sequence ID"], row["count"]) for row in stored] == [("a", 0), ("d", 5), ("e", 4)]


def test_long_runs_show_the_newest_rows(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "NEWEST_ROWS", 5)
    monkeypatch.setattr(report_data, "NEWEST_TOKENS", 8)
    tables = read_run(run_dir).tables
    assert (len(tables[SAMPLE_TABLE].rows), tables[SAMPLE_TABLE].left_out) == (5, 7)
    assert (len(tables[TOKEN_TABLE].rows), tables[TOKEN_TABLE].left_out) == (8, 64)
    page = Page(write_report(run_dir, tmp_path / "page.html").read_text())
    shown = "".join(page.texts)
    assert "oldest 7 rows are in the run directory only" in shown and "oldest 64 tokens" in shown
    notes = [sample["note"] for sample in json.loads(page.blocks["token-data"])["samples"]]
    assert notes == ["The first 4 tokens are in the run directory only.", ""]


def test_a_supervised_run_without_configuration_and_tables(tmp_path: Path, logger: MetricLogger) -> None:
    logger.log(1, SFT_METRICS)
    titles = [panel.spec.title for panel in panels(read_run(tmp_path))]
    assert {"Loss", "Response length"} <= set(titles) and not {"Reward", "Held-out accuracy"} & set(titles)
    entries = dict(summary(read_run(tmp_path)))
    assert entries["configuration"].startswith("not recorded") and entries["steps"] == "1"
    shown = "".join(Page(write_report(tmp_path).read_text()).texts)
    assert "Held-out accuracy" not in shown and "Tokens of a sample" not in shown


FAILED, ENDED = "failed: engine 0: out of memory\n", "starting Ray\n"
LOSSES = [
    (1, {"train_actor_training/loss": 1.0}),
    *((step, {"train_actor_training/loss": math.nan}) for step in (2, 3)),
]
NONE_FAILED: Logged = [(0, {"evaluation/scoring_failures": 0})]
NONE_FAILED += [(step, {FAILURES: n, STEP_TIME: 1.0}) for step, n in ((1, 0), (2, 3), (3, 7), (3, 1), (4, 0))]
# What was logged, the driver's log, and entries of the summary; None: there is none.
SUMMARIES: list[tuple[Logged, str, dict[str, str | None]]] = [
    (
        [(0, {ACCURACY: 0.25}), (1, {REWARD: 0.5}), (2, {REWARD: 1.0})],
        "",
        {"held-out accuracy": "0.250 (step 0)", "mean reward": "0.750 (of 2 steps)", "scoring failures": None},
    ),
    ([(0, {ACCURACY: 0.25})], ENDED + FAILED, {"steps": "0: no step was trained", "failed": "engine 0: out of memory"}),
    ([(0, {ACCURACY: 0.25})], FAILED + ENDED, {"steps": "0: no step has been trained yet", "failed": None}),  # resumed
    (LOSSES, "", {"loss": "NaN or infinite at 2 steps, first at step 2"}),
    (NONE_FAILED, "", {"scoring failures": "4 responses in 2 steps, first at step 2"}),  # repeated steps count once
    (
        [*NONE_FAILED, (4, {"evaluation/scoring_failures": 1})],
        "",
        {
            "scoring failures": "4 responses in 2 steps, first at step 2; "
            "1 held-out response in 1 evaluation, first at step 4"
        },
    ),
]


@pytest.mark.parametrize(("logged", "log", "expected"), SUMMARIES)
def test_summary_of_an_unusual_run(
    tmp_path: Path, logger: MetricLogger, logged: Logged, log: str, expected: dict[str, str | None]
) -> None:
    for step, values in logged:
        logger.log(step, values)
    (tmp_path / "driver.log").write_text(log)
    entries = dict(summary(read_run(tmp_path)))
    assert {name: entries.get(name) for name in expected} == expected
    html = write_report(tmp_path).read_text()
    assert all(text in Page(html).texts for text in expected.values() if text)
    charts = json.loads(Page(html).blocks["chart-data"]).values()
    marks = [mark["x0"] for chart in charts for mark in chart["layout"].get("shapes", ())]
    assert marks == ([2, 3] if logged is LOSSES else [])


def test_alarms_link_to_the_samples_of_their_step(tmp_path: Path, run_dir: Path) -> None:
    """Rows of steps that a resumed run repeated, and rows of other kinds, are left out. The text stays text."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    alarm = {"rule": "disk", "severity": "alarm", "value": 0.51234, "threshold": 1.0, "text": HOSTILE[0]}
    kinds = [(12, "warning"), (10, "warning"), (15, "alarm"), (20, "cleared"), (21, "warning")]
    rows = [*(alarm | {"step": step, "severity": severity} for step, severity in kinds), {"step": 22, "event": "x"}]
    (copy / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = Page(write_report(copy).read_text())
    assert [each["href"] for tag, each in page.tags if tag == "a" and "step" in (each["href"] or "")] == [
        "#step-10", "#step-20",
    ]  # fmt: skip
    assert sorted(each["id"] for _, each in page.tags if (each.get("id") or "").startswith("step-")) == [
        "step-10", "step-20", "step-30",
    ]  # fmt: skip
    assert page.texts.count("disk") == 4 and "0.512" in page.texts and HOSTILE[0] in page.texts
    assert dict(summary(read_run(copy)))["alarms"] == "disk at step 10, disk at step 15, disk at step 21"


def test_custom_tables_are_shown(tmp_path: Path, logger: MetricLogger) -> None:
    logger.log(1, {"train_actor_training/loss": 1.0})
    logger.log_table(1, "mine", [{"text": "x" * 5000, "flag": True, "list": [1, None], "nothing": None}])
    page = Page(write_report(tmp_path).read_text())
    assert {"mine", "yes", "[1, null]", "-", f"{'x' * 1333} … (1000 characters) … {'x' * 2667}"} <= set(page.texts)


# ------------------------------------------------------------------------------ files that are damaged or being written
class GrowingFile(io.RawIOBase):
    """A file that grows after its end was reached."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._pieces.pop(0)
        buffer[: len(piece)] = piece
        return len(piece)


def test_a_line_finished_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second half is not read as a damaged line."""
    growing = GrowingFile([b'{"step": 1}\n{"st', b"", b'ep": 2}\n', b""])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: io.BufferedReader(growing))
        steps = [record["step"] for _, record in read_lines(tmp_path)]
    assert steps == [1]


def test_newest_lines(tmp_path: Path, rejects: Rejects) -> None:
    """Damage is found only in lines that are read."""
    path = tmp_path / "table.jsonl"
    path.write_text('{"step": 1}\n{}\n{"step": 3}\n{"step"')
    assert list(read_lines(path, 2)) == [(3, {"step": 3})]
    with rejects(DataError, "damaged-line") as fault:
        list(read_lines(path, 3))
    assert f"{path}:2:" in str(fault.value)


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "no-metrics"),
        ({"metrics.jsonl": ""}, "no-step-logged"),
        ({"metrics.jsonl": '{"st'}, "no-step-logged"),
        ({"metrics.jsonl": "", "driver.log": "starting Ray\nfailed: engine 0: out of memory"}, "no-step-logged"),
        ({"metrics.jsonl": '{"a": 1}\n'}, "damaged-line"),
        ({"metrics.jsonl": '{"step": 1, "a": "text"}\n'}, "damaged-line"),
        ({"metrics.jsonl": '{"step": 1, "a": ' + "[" * 100_000 + "\n"}, "damaged-line"),
        # Only the last line may be unfinished. A broken line with a newline is damage.
        ({"metrics.jsonl": '{"step": 1, "a"\n{"step": 2}\n'}, "damaged-line"),
        ({"metrics.jsonl": '{"step": 1}\n[2]\n'}, "damaged-line"),
        ({"metrics.jsonl": '{"step": 1}\n', "config.yaml": "a: [\n"}, "yaml-syntax"),
        ({"metrics.jsonl": '{"step": 1}\n', "config.yaml": "- a\n"}, "file-content"),
        ({"metrics.jsonl": '{"step": 1}\n', "config.yaml": "\udcc3"}, "file-unreadable"),
        ({"metrics.jsonl": '{"step": 1}\n', "tables/t.jsonl": '{"step": 1}\n{}\n'}, "damaged-line"),
        ({"metrics.jsonl": '{"step": 1}\n', "tables/t.jsonl": '{"s\n'}, "damaged-line"),
    ],
)
def test_missing_and_damaged_files(tmp_path: Path, rejects: Rejects, files: dict[str, str], code: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with rejects(SlimeLikeError, code):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_output_file(tmp_path: Path, run_dir: Path, rejects: Rejects, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "page.html"
    assert run(["report", str(run_dir), "--output", str(output)]) == 0
    assert f"report: {output}" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    with rejects(SlimeLikeError, "output-not-writable"):
        write_report(run_dir, tmp_path)
    with rejects(SlimeLikeError, "output-not-writable"):
        write_report(run_dir, output / "below.html")


# ------------------------------------------------------------------------------------------------------------ terminal
@pytest.mark.parametrize("width", [72, 80, 200])
def test_terminal_report(run_dir: Path, width: int) -> None:
    report = printed(run_dir, width)
    lines = report.splitlines()
    assert all(character == "\n" or character.isprintable() for character in report)
    assert all(len(line) <= width for line in lines)
    for text in ("0.250 (step 0) → 0.875 (step 30)", "generate", "50.0%"):
        assert text in report
    names = [line.strip().split("  ")[0] for line in lines]
    assert width < 200 or {"train_actor_performance/total_step_time (s)", "train_actor_training/loss"} <= set(names)


def test_terminal_samples(tmp_path: Path, logger: MetricLogger) -> None:
    logger.log(1, {"train_actor_training/loss": 1.0})
    prompt = f"<|im_start|>system\n{'Be brief. ' * 50}<|im_end|>\n<|im_start|>user\nWhat is 40+2?<|im_end|>\n"
    row = {"Prompt": prompt, "Response": f"Well, {'so ' * 500}it is 42.", "Answer": "42", "Reward_math": 1.0, "x": 9}
    row["Reward Metadata"] = '{"math": {"found": 42}}'
    logger.log_table(1, SAMPLE_TABLE, [row])
    lines = printed(tmp_path, 80).splitlines()
    assert any(line.count("│") == 3 and "Reward_math" in line.split("│")[1] for line in lines)
    cells = " ".join(line.split("│")[2].strip() for line in lines if line.count("│") == 3)
    for text in ("What is 40+2?", "Well, so", 'it is 42. 42 1 {"math": {"found": 42}}'):
        assert text in cells
    logger.log_table(2, SAMPLE_TABLE, [{"Conversation": "1 model: [6*7]\n1 environment: 42"}])
    assert {"1 model: [6*7]", "1 environment: 42"} <= set(re.split(r" *│ *|\n", printed(tmp_path, 80)))


def test_closed_pipe(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is written even if nobody reads the terminal, e.g. in ``slime-like report RUN_DIR | head -1``."""
    page = run_dir / "report.html"
    page.unlink(missing_ok=True)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(BrokenPipeError):
            run(["report", str(run_dir)])
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())  # for the flush at its end
    assert page.is_file()
