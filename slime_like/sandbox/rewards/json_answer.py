"""Reward for JSON that has the form of a schema."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking, last_block

_PATH_CHARS = 100


def json_schema(prompt: str, response: str, answer: str, *, schema: Mapping[str, Any] | None = None) -> RewardResult:
    """1 if the response, or its last fenced block of JSON, is JSON that fits a JSON Schema, else 0.

    Args:
        schema: schema of all rows; default: ``answer``, as JSON. ``$ref`` must stay inside it.

    Raises:
        ValueError: there is no valid schema.
    """
    validator = _validator(answer if schema is None else json.dumps(schema))
    said = after_thinking(response, prompt)
    block = last_block(said, ("json",))
    try:
        value = json.loads(said if block is None else block, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return RewardResult(0.0, False, {"reason": "no JSON"})
    try:
        fault = next(validator.iter_errors(value), None)
    except RecursionError:
        return RewardResult(0.0, False, {"reason": "nested too deeply"})
    if fault is None:
        return RewardResult(1.0, True)
    place = f"{fault.json_path[:_PATH_CHARS]}: {fault.validator}"
    return RewardResult(0.0, False, {"reason": f"does not fit the schema ({place})"})


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, RecursionError, SchemaError) as error:
        raise ValueError(f"{text[:40]!r} is not a JSON Schema ({str(error).splitlines()[0]})") from error
    return kind(schema, registry=Registry())  # this registry downloads nothing


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
