"""Rules on histories whose values are known, and the places that are told."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from slime_like.config.base import CONFLICT
from slime_like.config.health import HealthConfig
from slime_like.observability.health import CHECKPOINT_SHARE, RULES, Alarm, Health, ends_in_a_loop
from slime_like.observability.webhook import Webhook

Row = dict[str, float]
Fault = Callable[[Row], Row]
CRITIC = "train_critic/explained_variance"
WAITING = [f"train_actor_performance/pct_time_{name} (%)" for name in ("idle", "waiting_buffer")]
FAULTY_FROM = 61


def sound(step: int) -> Row:
    """A step of a run that learns: noise of a fifth in every time, a falling entropy, rewards that rise."""
    draw = random.Random(step)
    seconds = {phase: each * draw.uniform(0.8, 1.2) for phase, each in (("wait", 0.1), ("generate", 4), ("train", 2))}
    return {
        **{f"phases/{phase} (s)": each for phase, each in seconds.items()},
        "phases/sync (s)": draw.choice([0.01, 0.1]),  # ten times its median, and nothing that matters
        "train_actor_performance/total_step_time (s)": sum(seconds.values()),
        **dict(zip(WAITING, (draw.uniform(60, 99), draw.uniform(0, 90)), strict=True)),
        "rollout/pct_time_idle (%)": draw.uniform(0, 90),
        "ref_actor_rewards/failed_fraction": draw.choice([0.0, 0.02]),
        "ref_actor_rewards/total_reward_mean": step / 500 + draw.uniform(-0.1, 0.1),
        "rollout/aborted_fraction": 0.0,
        "rollout/repeated_fraction": draw.choice([0.0, 0.03]),
        "rollout/zero_advantage_fraction": 1.0 if step % 5 else 0.9,
        "rollout/truncated_fraction": draw.uniform(0.0, 0.4),
        "rollout/response_length_mean": 100 * 1.01**step * draw.uniform(0.8, 1.2),
        "train_actor_training/entropy": 0.99**step * draw.uniform(0.8, 1.2),
        "train_actor_training/perplexity": 1.5,
        "train_actor_training/engine_perplexity": 1.5 * draw.uniform(0.95, 1.05),
        CRITIC: -0.1 if step % 50 else 0.1,
        CHECKPOINT_SHARE: 0.3,
    }


def times(name: str, factor: float) -> Fault:
    return lambda row: {name: row[name] * factor}


def value(name: str, constant: float) -> Fault:
    return lambda _: {name: constant}


def collapse(row: Row, factor: float) -> Row:
    return {"train_actor_training/entropy": row["train_actor_training/entropy"] * factor,
            "ref_actor_rewards/total_reward_mean": 0.0}  # fmt: skip


FAULTS: list[tuple[str, str, int, Fault]] = [
    # rule, severity, steps from the first faulty one to the alarm, fault
    ("slow_phase", "warning", 2, times("phases/train (s)", 12)),
    ("slow_phase", "warning", 2, value("phases/sync (s)", 15)),
    ("idle_trainers", "warning", 6, lambda _: dict.fromkeys(WAITING, 98.0)),
    ("idle_engines", "warning", 6, value("rollout/pct_time_idle (%)", 98)),
    ("failed_samples", "warning", 1, value("ref_actor_rewards/failed_fraction", 0.12)),
    ("failed_samples", "alarm", 1, value("rollout/aborted_fraction", 0.5)),
    ("engine_gap", "warning", 1, value("train_actor_training/engine_perplexity", 0.6)),
    ("engine_gap", "alarm", 1, value("train_actor_training/engine_perplexity", 20)),
    ("entropy_cliff", "warning", 2, lambda row: collapse(row, 0.1)),
    ("entropy_cliff", "warning", 2, times("train_actor_training/entropy", 20)),
    ("length_cliff", "warning", 2, times("rollout/response_length_mean", 0.1)),
    ("length_cliff", "warning", 2, times("rollout/response_length_mean", 6)),
    ("truncated", "warning", 5, value("rollout/truncated_fraction", 0.7)),
    ("truncated", "alarm", 6, value("rollout/truncated_fraction", 1.0)),
    ("no_gradient", "warning", 5, value("rollout/zero_advantage_fraction", 1.0)),
    ("reward_flat", "warning", 300, value("ref_actor_rewards/total_reward_mean", 0.0)),
    ("repeated_text", "warning", 1, value("rollout/repeated_fraction", 0.2)),
    ("repeated_text", "alarm", 1, value("rollout/repeated_fraction", 0.5)),
    ("explained_variance", "warning", 40, value(CRITIC, -0.5)),
    ("disk", "warning", 1, value(CHECKPOINT_SHARE, 0.6)),
    ("disk", "alarm", 1, value(CHECKPOINT_SHARE, 1.5)),
]


def alarms_of(rows: Mapping[int, Row], **settings: Any) -> list[Alarm]:
    health = Health(HealthConfig(**settings))
    return [alarm for step, row in rows.items() for alarm in health.check(step, row)]


def test_a_sound_run_raises_nothing() -> None:
    assert alarms_of({step: sound(step) for step in range(1, 501)}) == []


@pytest.mark.parametrize(("rule", "severity", "after", "fault"), FAULTS)
def test_each_rule_is_raised_by_its_fault(rule: str, severity: str, after: int, fault: Fault) -> None:
    """At the first step that shows it, and nothing else is raised."""
    rows = {step: sound(step) for step in range(1, FAULTY_FROM + after + 30)}
    rows |= {step: row | fault(row) for step, row in rows.items() if step >= FAULTY_FROM}
    found = [alarm for alarm in alarms_of(rows) if alarm.severity != "cleared"]
    assert {alarm.rule for alarm in found} == {rule}
    first = next(alarm for alarm in found if alarm.severity == severity)
    assert first.step == FAULTY_FROM + after - 1
    assert first.value >= first.threshold and f"{first.value:.3g}" in first.text


def test_every_threshold_has_a_rule_a_fault_and_a_row_in_the_documentation() -> None:
    thresholds = HealthConfig.model_fields.keys() - {"webhook", "stop_on"}
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## Alarms\n")[2].partition("\n## ")[0]
    described = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    assert {rule.name for rule in RULES} == thresholds == {rule for rule, *_ in FAULTS} == described


def test_an_entropy_that_falls_while_the_reward_rises_is_no_cliff() -> None:
    """Such as that of configs/calculator.yaml, whose reward rises from 0.4 to 0.9 in twelve steps."""
    names = ("train_actor_training/entropy", "ref_actor_rewards/total_reward_mean")
    flat, learned = ({step: dict(zip(names, (1.0, 0.4) if step < 20 else end, strict=True)) for step in range(1, 40)}
                     for end in ((0.05, 0.4), (0.05, 0.9)))  # fmt: skip
    assert [(alarm.step, alarm.value) for alarm in alarms_of(flat)][:1] == [(21, 20.0)]
    assert alarms_of(learned) == []


def test_a_rule_is_raised_again_only_after_it_was_cleared() -> None:
    """A warning that becomes an alarm is a second row. Values near the threshold neither raise nor clear."""
    shares = [0.15, 0.2, 0.15, 0.5, 0.45, 0.15, *[0.09] * 6, *[0.0] * 4, 0.09, *[0.0] * 5, 0.0, 0.11]
    rows = {step: {"ref_actor_rewards/failed_fraction": share, "rollout/aborted_fraction": 0.0}
            for step, share in enumerate(shares, start=1)}  # fmt: skip
    found = [(alarm.step, alarm.severity, alarm.threshold) for alarm in alarms_of(rows)]
    assert found == [(1, "warning", 0.1), (4, "alarm", 0.4), (22, "cleared", 0.1), (24, "warning", 0.1)]


def test_a_rule_can_be_switched_off_and_its_state_is_a_metric() -> None:
    row = {CHECKPOINT_SHARE: 2.0, "rollout/repeated_fraction": 0.2}
    health = Health(HealthConfig(disk=None))
    assert [alarm.rule for alarm in health.check(1, row)] == ["repeated_text"]
    assert {name: level for name, level in health.metrics.items() if level} == {"health/repeated_text": 1.0}
    assert "health/disk" not in health.metrics and health.metrics["health/slow_phase"] == 0.0


def test_the_slowest_phase_is_the_state_of_slow_phase() -> None:
    rows = {step: sound(step) for step in range(1, 30)}
    health = Health(HealthConfig(), rows.values())
    for step in (30, 31):
        health.check(step, sound(step) | {"phases/wait (s)": 60.0})
    assert health.metrics["health/slow_phase"] == 1.0


def test_a_resumed_run_compares_with_the_steps_before() -> None:
    slow = [sound(step) | {"phases/train (s)": 50.0} for step in (61, 62)]
    before = [sound(step) for step in range(1, 61)]
    for history, expected in (((), []), (before, ["slow_phase"])):
        health = Health(HealthConfig(), history)
        found = [alarm for step, row in enumerate(slow, start=61) for alarm in health.check(step, row)]
        assert [alarm.rule for alarm in found] == expected


def test_loops_at_the_end_of_a_response() -> None:
    text = np.random.default_rng(0).integers(0, 50_000, 400)
    loop = np.tile(text[:100], 3)
    assert ends_in_a_loop(loop) is False  # its last token is ignored
    assert ends_in_a_loop(np.append(loop, 7)) and ends_in_a_loop(np.concatenate([text, loop, [7]]))
    assert ends_in_a_loop(np.full(65, 3)) and not ends_in_a_loop(np.full(64, 3))
    assert not ends_in_a_loop(np.concatenate([np.full(300, 3), text[:50]]))
    assert not ends_in_a_loop(np.tile(text[:150], 3))  # longer than what is looked for
    assert not any(map(ends_in_a_loop, (text, text[:1], text[:0], np.tile(text[:2], 8))))


def test_settings_of_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALARM_URL", "https://hooks.example/secret")
    assert HealthConfig(webhook="$ALARM_URL").webhook == "$ALARM_URL"
    for settings in ({"webhook": "$NO_SUCH_URL"}, {"stop_on": ("entropy",)}, {"stop_on": ("disk",), "disk": None}):
        with pytest.raises(ValidationError) as caught:
            HealthConfig.model_validate(settings)
        assert [error["type"] for error in caught.value.errors()] == [CONFLICT]


# ---------------------------------------------------------------------------------------------------- webhook
class Receiver(HTTPServer):
    """A service that keeps the posted rows, and answers with ``status``."""

    status = 200

    def __init__(self) -> None:
        self.rows: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.rows.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_webhook_gets_rows_in_order_and_failures_are_noted_once(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIVER", f"http://127.0.0.1:{receiver.server_port}/secret")
    notes: list[str] = []
    with closing(Webhook("$RECEIVER", notes.append)) as webhook:
        for step in range(3):
            webhook.post({"step": step})
    assert receiver.rows == [{"step": step} for step in range(3)] and notes == []
    receiver.status = 500
    with closing(Webhook("$RECEIVER", notes.append)) as webhook:
        webhook.post({"step": 3})
        webhook.post({"step": 4})
    assert len(receiver.rows) == 5
    (note,) = notes
    assert "status 500" in note and "secret" not in note


def test_a_webhook_that_is_gone_takes_no_time_of_the_run() -> None:
    notes: list[str] = []
    started = time.monotonic()
    webhook = Webhook("http://127.0.0.1:9/", notes.append)
    webhook.post({"step": 1})
    assert time.monotonic() - started < 1
    webhook.close()
    assert len(notes) == 1 and "ConnectError" in notes[0]
