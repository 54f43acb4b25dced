"""The endpoint, read like Prometheus does, and the dashboard's queries."""

import json
import re
import socket
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime_like.config import LoggingConfig
from slime_like.errors import SlimeLikeError
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.names import update_metrics
from slime_like.observability.prometheus import gauge_name
from tests.support.rejections import Rejects
from tests.unit.observability.records import RL_METRICS, value_stats

DASHBOARD = Path(__file__).parents[3] / "configs" / "grafana.json"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_every_metric_is_a_gauge_with_its_last_value(tmp_path: Path, port: int) -> None:
    with closing(MetricLogger(LoggingConfig(tensorboard=False, prometheus_port=port), tmp_path)) as logger:
        assert scraped(port) == {}
        logger.log(1, RL_METRICS)
        logger.log(2, {"phases/train (s)": 7.5, "health/disk": 2.0, "evaluation/pass@2": float("nan")})
        found = scraped(port)
    assert found["slime_like_step"] == 2 and found["slime_like_phases_train_s"] == 7.5
    assert found["slime_like_health_disk"] == 2 and found["slime_like_evaluation_pass_2"] != 0
    kept = RL_METRICS.keys() - {"phases/train (s)", "health/disk"}
    assert {name: found[gauge_name(name)] for name in kept} == pytest.approx({name: RL_METRICS[name] for name in kept})
    assert len(found) == len({gauge_name(name) for name in RL_METRICS}) + 2
    with pytest.raises(OSError):
        scraped(port)


def test_metrics_have_different_gauges() -> None:
    names = [*RL_METRICS, *update_metrics([value_stats()], "train_critic")]
    assert len({gauge_name(name) for name in names}) == len(names)


def test_a_port_in_use_is_rejected(tmp_path: Path, port: int, rejects: Rejects) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with rejects(SlimeLikeError, "port-unavailable"):
            MetricLogger(LoggingConfig(tensorboard=False, prometheus_port=port), tmp_path)


def test_the_dashboard_queries_metrics_that_exist() -> None:
    known = {gauge_name(name) for name in (*RL_METRICS, *update_metrics([value_stats()], "train_critic"))}
    known |= {gauge_name(name) for name in ("evaluation/accuracy", "rollout/pct_time_idle (%)", "step")}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"slime_like_\w+", query)}
    assert len(queries) > 20 and asked <= known
    assert {name for name in known if name.startswith("slime_like_health_")} <= asked
