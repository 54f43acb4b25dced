"""A task that a tiny model solves with a calculator only: it cannot learn products, but it can learn to copy."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPENING, CLOSING = "[", "]"
"""What marks an expression in the demonstrations: one token each."""

_DEMONSTRATIONS = 4


def make_calculator_data(
    directory: Path, seed: int = 0, num_train: int = 1300, num_eval: int = 200, guesses: float = 0.7
) -> None:
    """Write ``train.jsonl``, ``sft.jsonl`` and ``eval.jsonl``: products of two numbers from 10 to 49.

    Rows are ``{"prompt": "37*48=", "answer": "1776"}``; training and held-out problems are disjoint as ordered pairs.

    ``sft.jsonl`` demonstrates both turns of every training problem. In the first, with probability ``guesses``, the
    teacher does not ask the calculator (``[37*48]``) but guesses a number; in the second, whose prompt is the
    conversation so far, it repeats what the calculator said. A model that imitates it can use the tool and mostly does
    not: the habit that rewards can change.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 50) for b in range(10, 50)]
    rng.shuffle(pairs)
    train, held_out = pairs[:num_train], pairs[num_train : num_train + num_eval]
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "train.jsonl", [_problem(a, b) for a, b in train])
    _write(directory / "eval.jsonl", [_problem(a, b) for a, b in held_out])
    demonstrations = [row for pair in train * _DEMONSTRATIONS for row in _demonstrations(*pair, rng, guesses)]
    rng.shuffle(demonstrations)
    _write(directory / "sft.jsonl", demonstrations)


def _problem(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}*{b}=", "answer": str(a * b)}


def _demonstrations(a: int, b: int, rng: random.Random, guesses: float) -> list[dict[str, Any]]:
    problem = _problem(a, b)
    call = f"{OPENING}{a}*{b}{CLOSING}"
    guess = str(rng.randint(100, 2401))
    said = [
        {"role": "user", "content": problem["prompt"]},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": problem["answer"]},
    ]
    return [
        {**problem, "response": guess if rng.random() < guesses else call},
        {**problem, "prompt": said, "response": problem["answer"]},
    ]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
