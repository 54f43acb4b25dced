"""Agents that are programs: what they get, what they return, and their bounds."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.errors import AgentFailure
from slime_like.interfaces import ConversationTask, Generation
from slime_like.system.processes import is_alive
from tests.process.scripted import MESSAGES, TOKENIZER, Engine, failure, request, talk_of
from tests.process.test_agents import config, rollouts
from tests.support.rejections import Rejects

COMMAND = """
import json, os, subprocess, sys, urllib.request
url, key, task_file, result_file = sys.argv[1:]
task = json.load(open(task_file))
assert os.environ["OPENAI_BASE_URL"] == url + "/v1" and os.environ["ANTHROPIC_API_KEY"] == key == task["key"]
body = json.dumps({"messages": task["messages"], "max_tokens": 5}).encode()
answer = json.load(urllib.request.urlopen(urllib.request.Request(url + "/v1/messages", body, {"x-api-key": key})))
word = answer["content"][0]["text"]
print("the program heard", word, flush=True)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(sys.argv[0] + ".pids", "a") as pids:
    pids.write(f"{child.pid}\\n")
if word == "again":
    sys.exit("went wrong")
if word == "killed":
    os.kill(os.getpid(), 9)
if word != "nothing":
    result = {"reward": 0.5, "success": True, "metadata": {"said": word}}
    json.dump(result if word == "ok" else [], open(result_file, "w"))
"""


def test_a_command_is_an_agent(tmp_path: Path) -> None:
    """A program gets its task in a file and writes its result to another. The worker's log has its output."""
    (tmp_path / "agent.py").write_text(COMMAND)
    command = ["python", str(tmp_path / "agent.py"), "{base_url}", "{key}", "{task_file}", "{result_file}"]
    words = ("ok", "again", "nothing", "odd", "killed")
    (tmp_path / "logs").mkdir()
    engine = Engine(*([word] for word in words))
    good, *bad = rollouts(engine, request(5), (tmp_path / "logs", "agent"), name=None, command=command)
    assert talk_of(good).answer is None
    assert (failure(good), talk_of(good).reward, talk_of(good).success) == (None, 0.5, True)
    assert [failure(generation) for generation in bad] == ["error"] * 4
    details = [detail(generation) for generation in bad]
    assert details[0] == "CommandFailed: exit code 1: the program heard again | went wrong"
    assert details[1] == "CommandFailed: it wrote no result file"
    # A program that ends by itself has answered.
    assert [(talk_of(generation).failure or {}).get("fault") for generation in bad] == ["program"] * 3 + [None]
    printed = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert all(f"the program heard {word}" in printed for word in words)
    left = list(map(int, (tmp_path / "agent.py.pids").read_text().split()))
    assert len(left) == 5 and not any(map(is_alive, left))


def test_a_command_may_answer_on_its_standard_output(tmp_path: Path) -> None:
    """Reward functions then get this text, not the judged turn. The log has it, too."""
    (tmp_path / "agent.py").write_text("import sys; print('thinks', file=sys.stderr); print('It is\\n42. ')")
    (tmp_path / "logs").mkdir()
    command, logs = [sys.executable, str(tmp_path / "agent.py")], (tmp_path / "logs", "agent")
    settings = config(name=None, command=command, answer="stdout", workers=1)
    settings = settings.model_copy(update={"reward": settings.reward.model_copy(update={"functions": ()})})
    (found,) = rollouts(Engine(["unused"]), request(1), logs, settings=settings)
    assert (failure(found), talk_of(found).answer) == (None, "It is\n42.")
    assert "thinks\nIt is\n42. \n" in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


def test_the_example_program_solves_a_task() -> None:
    program = Path(__file__).parents[2] / "docs" / "examples" / "agents" / "calculator_program.py"
    command = [sys.executable, str(program), "{task_file}", "{result_file}"]
    asked = replace(request(1), task=ConversationTask("408", {}, MESSAGES))
    (generation,) = rollouts(Engine(["[12*34]", "408"]), asked, name=None, command=command, workers=1)
    assert failure(generation) is None and talk_of(generation).success and talk_of(generation).reward == 1.0
    assert TOKENIZER.decode(generation.token_ids) == "[12*34]<eos><user>408<assistant>408<eos>"


def program(path: Path, text: str) -> list[str]:
    """Write a program of an agent, whose first call is made, and return the command."""
    call = """
import json, os, subprocess, sys, urllib.request
from pathlib import Path
task = json.loads(Path(sys.argv[1]).read_text())
body = json.dumps({"messages": task["messages"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
word = json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"x-api-key": task["key"]})))
word = word["choices"][0]["message"]["content"]
def end(code=0, **result):
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.exit(code)
"""
    path.write_text(call + text)
    return [sys.executable, str(path), "{task_file}", "{result_file}"]


def metadata(generation: Generation) -> dict[str, Any]:
    return dict(talk_of(generation).metadata[0])


def detail(generation: Generation) -> str:
    return str((talk_of(generation).failure or {})["detail"])


def test_a_command_has_its_own_directories_and_the_task_in_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing path is made absolute. Places in the prompt are text of the row, and stay."""
    names = (
        "XDG_CONFIG_HOME",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_AUTH_TOKEN",
        "MY_API_KEY",
        "LC_TIME",
        "https_proxy",
        "GIVEN",
    )
    for name in names:
        monkeypatch.setenv(name, "x")
    monkeypatch.chdir(tmp_path)
    command = program(tmp_path / "agent.py", """
found = {"work": os.getcwd(), "home": os.environ["HOME"], "args": sys.argv[3:], "pwd": os.environ["PWD"]}
found |= {"empty": not os.listdir() and not os.listdir(found["home"]), "names": sorted(os.environ)}
for name in ("work", "home"):
    Path(found[name], "left").write_text("")
end(reward=1.0, metadata=found)
""")  # fmt: skip
    command[1] = "agent.py"
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say {key} or {model}."})
    asked = replace(request(2), task=ConversationTask("x", {}, messages))
    found = rollouts(Engine([], []), asked, name=None, command=[*command, "{model}: {prompt}", "{x}"], workers=1,
                     environment=["GIVEN"])  # fmt: skip
    endpoint = {f"{service}_{value}" for service in ("OPENAI", "ANTHROPIC") for value in ("BASE_URL", "API_KEY")}
    told = [metadata(generation) for generation in found]
    for one in told:
        assert one["args"] == ["policy: Say {key} or {model}.", "{x}"]
        assert (one["empty"], one["pwd"]) == (True, one["work"])
        assert {*one["names"]} & {*names} == {"LC_TIME", "https_proxy", "GIVEN"}
        assert {*one["names"]} >= {*endpoint, "PATH", "HOME", "no_proxy"}
        assert Path(one["work"]).parent == Path(one["home"]).parent and not Path(one["work"]).parent.exists()
    assert told[0]["work"] != told[1]["work"]


def test_a_result_counts_whatever_the_exit_code(tmp_path: Path, rejects: Rejects) -> None:
    """Without the reward `agent`, a command needs no result: other functions grade the model's last turn."""
    lines = "for i in range(20): print('line', i, file=sys.stderr)\nprint(file=sys.stderr)\n"
    text = lines + "if word == 'give': end(3, reward=0.5, metadata={'a': 1})\nsys.exit(2 * (word == 'quit'))\n"
    command = program(tmp_path / "agent.py", text)
    given, none, fails = rollouts(Engine(["give"], ["ok"], ["quit"]), request(3), name=None, command=command)
    last = " | ".join(f"line {i}" for i in range(8, 20))
    assert (failure(given), talk_of(given).reward) == (None, 0.5)
    assert metadata(given) | {"endpoint": 0} == {"a": 1, "exit_code": 3, "output": last, "endpoint": 0}
    reasons = ("it wrote no result file", f"exit code 2: {last}")
    assert [detail(none), detail(fails)] == [f"CommandFailed: {reason}" for reason in reasons]
    graded = config(name=None, command=command)
    graded = graded.model_copy(
        update={"reward": graded.reward.model_copy(update={"functions": graded.reward.computed})}
    )
    ended = rollouts(Engine(["ok"], ["quit"]), request(2), settings=graded)
    assert [failure(generation) for generation in ended] == [None, None]
    assert [metadata(generation) | {"endpoint": 0} for generation in ended] == [
        {"endpoint": 0}, {"exit_code": 2, "output": last, "endpoint": 0},
    ]  # fmt: skip
    silent = graded.rollout.agent.model_copy(update={"command": ("sh", "-c", "echo unknown flag; exit 9")})
    graded = graded.model_copy(update={"rollout": graded.rollout.model_copy(update={"agent": silent})})
    with rejects(AgentFailure, "agent-silent") as caught:
        rollouts(Engine(), request(8), settings=graded)
    assert "unknown flag" in str(caught.value)


def test_memory_is_bounded_by_resident_size(tmp_path: Path) -> None:
    """Reserved addresses do not count. All processes of the program do, and none outlives the rollout."""
    command = program(tmp_path / "agent.py", """
import mmap, time
reserved = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | 0x4000)  # MAP_NORESERVE
if word == "fill":
    hold = "import time; held = bytearray(b'x') * (200 << 20); time.sleep(1000)"
    children = [subprocess.Popen([sys.executable, "-c", hold], start_new_session=True) for _ in range(2)]
    Path(sys.argv[3]).write_text(" ".join(str(child.pid) for child in children))
    time.sleep(1000)
end(reward=1.0)
""")  # fmt: skip
    pids = tmp_path / "pids"
    engine = Engine(["fill"], ["ok"])
    full, good = rollouts(engine, request(2), name=None, command=[*command, str(pids)], memory_mb=256)
    told = "its processes exceeded rollout.agent.memory_mb=256"
    assert failure(good) is None
    assert talk_of(full).failure == {"reason": "memory", "function": "rollout.agent", "detail": told}
    left = list(map(int, pids.read_text().split()))
    assert len(left) == 2 and not any(map(is_alive, left))
