"""Thinking that a prompt opens, in a response as reward functions get it."""

THINKING, THOUGHT = "<think>", "</think>"


def with_opening(response: str, prompt: str) -> str:
    """Return the response after the ``<think>`` that the prompt ends with, if it does."""
    is_open = prompt.rstrip().endswith(THINKING) and not response.lstrip().startswith(THINKING)
    return f"{THINKING}\n{response}" if is_open else response


def without_opening(response: str, prompt: str) -> str:
    """Return a later turn so that thinking that the first ``prompt`` opens does not continue in it."""
    return response if with_opening(response, prompt) == response else f"{THINKING}{THOUGHT}{response}"
