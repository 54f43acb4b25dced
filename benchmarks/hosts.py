"""Run the 32B recipe on two hosts with every engine: ``python -m benchmarks.hosts OUT RESULT [ENGINE ...]``.

Eight ranks (tensor 2 x pipeline 2 x context 2) span both hosts. Each engine trains two steps, and two more after a
second start. Most time is spent importing everything nine times per start. Exit code 1 if a bound does not hold.
"""

import datetime
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from slime_like.observability.metrics import read_metrics
from tests.conftest import Tiny
from tests.hosts.hosts import Network, two_hosts
from tests.hosts.test_two_hosts import TWO_RANKS_EACH, left_on, start

ENGINES = ("transformers", "vllm", "sglang")
MOST_GAP = 1e-4


@dataclass(frozen=True)
class Row:
    """Two starts with one engine.

    Attributes:
        seconds: wall time of each start.
        codes: exit codes of both nodes in both starts.
        steps: steps trained.
        gap: largest logprob difference between engine and trainer in the sync's probe.
        left: processes still on the hosts afterwards.
    """

    engine: str
    seconds: tuple[float, ...]
    codes: tuple[int, ...]
    steps: int
    gap: float
    left: int

    @property
    def held(self) -> bool:
        return not any(self.codes) and self.steps == 4 and self.gap < MOST_GAP and not self.left


def train(engine: str, network: Network, tiny: Tiny) -> Row:
    run_dir = network.shared / engine
    seconds, codes = [], []
    parallel = ("--trainer.parallel.tensor", "2", "--trainer.parallel.sequence", "true")
    for steps in ("2", "4"):
        flags = (*TWO_RANKS_EACH, *parallel, "--checkpoint.every", "1", "--steps", steps)
        began = time.monotonic()
        runs = [
            start(host, rank, network, tiny, f"{engine}-{steps}", ("--run_dir", str(run_dir), *flags), ENGINE=engine)
            for rank, host in enumerate(network.nodes)
        ]
        codes += [run.finish(900) for run in runs]
        seconds.append(time.monotonic() - began)
        for run in runs:
            print(run.output)
    rows = read_metrics(run_dir / "metrics.jsonl")
    gaps = [row["weights/probe_gap"] for row in rows if "weights/probe_gap" in row]
    left = sum(len(left_on(host)) for host in network.nodes)
    steps_done = {row["step"] for row in rows if "train_actor_training/loss" in row}
    return Row(engine, tuple(seconds), tuple(codes), len(steps_done), max(gaps), left)


def render(rows: list[Row]) -> str:
    lines = [
        f"`scripts/run_qwen_32b.sh` on two hosts (network namespaces), {datetime.date.today()}, CPU, "
        "`python -m benchmarks.hosts`.",
        "A tiny Qwen3 on tensor 2 x pipeline 2 x context 2 over both; two steps, and two more by a second start.",
        f"Bounds: exit code 0 on both nodes, four steps, probe gap below {MOST_GAP:g}, nothing left running.",
        "",
        "| engine | first start, s | second start, s | exit codes | steps | largest probe gap | left | bound held |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, second = row.seconds
        lines.append(
            f"| {row.engine} | {first:.0f} | {second:.0f} | {' '.join(map(str, row.codes))} | {row.steps} | "
            f"{row.gap:.1e} | {row.left} | {'yes' if row.held else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    out, result, engines = Path(sys.argv[1]).absolute(), Path(sys.argv[2]), sys.argv[3:] or ENGINES
    out.mkdir(parents=True)
    make_tiny_model(out / "model", family="qwen3", seed=0)
    make_arithmetic_data(out / "data", seed=0)
    rows: list[Row] = []
    result.parent.mkdir(parents=True, exist_ok=True)
    with two_hosts(out) as network:
        for engine in engines:
            rows.append(train(engine, network, Tiny(out / "model", out / "data")))
            result.write_text(render(rows), encoding="utf-8")
    print(render(rows))
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
