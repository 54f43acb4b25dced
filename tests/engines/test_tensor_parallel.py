"""One engine with two ranks on a CPU: answers, updates, and the death of its owner.

The model has a tied head and biases, which the conformance tests' model lacks. Acceptance runs with two ranks of an
engine leave no process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from slime_like.errors import WeightSyncError
from slime_like.interfaces import load_engine
from slime_like.system.processes import mapped_files, process_ids
from slime_like.weights.transports.names import SHARED_MEMORY
from tests.engines.harness import EngineUnderTest, check_logprobs, run_config, started, tiny_pair
from tests.support.acceptance import some_in_acceptance

PROMPTS = [[*range(3, 13)], [*range(200, 245)], [7]]


def own(kind: str, root: Path) -> None:
    """Start the engine, print its processes, and wait to be killed."""
    references = tiny_pair("qwen2", root)
    assert "lm_head.weight" not in references[0].weights
    assert "model.layers.0.self_attn.q_proj.bias" in references[0].weights
    config = run_config(references[0].directory, root / "run", tensor=2)
    engine = load_engine(kind)(config, 0)
    before = process_ids()
    with started(engine, references) as two_ranks:
        pids = two_ranks.run(engine.health()).process_ids
        assert len(pids) == 3  # the engine's process, and one per rank
        assert set(pids) <= process_ids() - before
        assert files_of_sglang(pids) == set()
        sample_update_and_find_damage(two_ranks)
        sockets = [socket for pid in pids for socket in psutil.Process(pid).net_connections(kind="tcp")]
        assert {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        two_ranks.sender.close()  # the trainer's socket
        print("pids", *pids, flush=True)
        time.sleep(300)


def sample_update_and_find_damage(two_ranks: EngineUnderTest) -> None:
    def sample() -> None:
        for prompt in PROMPTS:
            for generation in two_ranks.generate(prompt, max_new_tokens=16, num_samples=2, ignore_eos=True):
                check_logprobs(two_ranks.reference, prompt, generation)

    async def damaged() -> None:
        await two_ranks.engine.begin_update(two_ranks.version + 1, two_ranks.manifest)
        await two_ranks.send(list(two_ranks.reference.weights.items()), tamper=two_ranks.flip_a_bit)

    sample()
    receipt, sent = two_ranks.run(two_ranks.load(1))
    assert receipt.checksums == sent
    sample()
    with pytest.raises(WeightSyncError, match="arrived damaged"):
        two_ranks.run(damaged())
    if core := getattr(two_ranks.engine, "_core", None):  # for vLLM, as if only one worker had received damage
        two_ranks.run(core.workers("start_weight_update"))
    two_ranks.run(two_ranks.load(0))
    sample()


def files_of_sglang(process_ids: Iterable[int]) -> set[Path]:
    """Return files outside the run directory, which a killed process could not remove."""
    shared = set(mapped_files(process_ids, "/dev/shm/sglang_"))
    commands = [psutil.Process(pid).cmdline() for pid in process_ids]
    scratch = {Path(command[-1]) for command in commands if "rollout.sglang.main" in command}
    return {path for path in shared | scratch if path.exists()}


@pytest.mark.parametrize("kind", some_in_acceptance(["sglang", "vllm"], lambda kind: kind == "sglang"))
def test_two_ranks_serve_and_end_with_their_owner(kind: str, tmp_path: Path) -> None:
    """The owner is killed with its children and process group, as Ray does, so it cannot clean up."""
    log = tmp_path / "owner.log"
    script = f"from tests.engines.test_tensor_parallel import Path, own; own({kind!r}, Path({str(tmp_path)!r}))"
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("w") as errors:
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, process_group=0)
    try:
        assert owner.stdout is not None
        line = next((line for line in owner.stdout if line.startswith("pids")), "")
        pids = [int(word) for word in line.split()[1:]]
        assert pids, log.read_text()
        assert files_of_sglang(pids) == set()
        shared = set(mapped_files([owner.pid, *pids], f"{SHARED_MEMORY}/")) & set(SHARED_MEMORY.iterdir())
        assert shared or kind == "sglang"  # SGLang never leaves files
    finally:
        children = psutil.Process(owner.pid).children()
        os.killpg(owner.pid, signal.SIGKILL)
        for child in children:
            child.kill()
        owner.wait()
    deadline = time.monotonic() + 60
    while (any(map(psutil.pid_exists, pids)) or any(file.exists() for file in shared)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
    assert [file for file in shared if file.exists()] == []
