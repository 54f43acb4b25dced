"""A written configuration reads back equal, whatever its values."""

from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from tests.support.properties import examples
from tests.unit.config.test_load import MINIMAL

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text("abcXYZ_", min_size=1)


def value_types(data: Any) -> Any:
    """Return the types of the values. 1, 1.0 and True are equal in Python, but differ here."""
    if isinstance(data, dict):
        return {key: value_types(value) for key, value in data.items()}
    return [value_types(item) for item in data] if isinstance(data, list) else type(data)


@examples(10)  # of many values, since a file takes longer than its values
@given(entries=st.dictionaries(KEYS, PLAIN | st.lists(PLAIN) | st.dictionaries(KEYS, PLAIN), min_size=36))
@example(entries={})
@example(
    entries={"a": "\x85", "b": "off", "c": "5e-4", "d": "010", "e": "2024-01-01", "f": "none", "g": "<<", "h": "\u2028"}
)
@example(entries={"a": "${steps}", "b": "\\${x}", "c": "${", "d": "\\\\${x}${y}", "e": "1:30"})
def test_what_is_written_reads_back_equal(entries: dict[str, Any], tmp_path_factory: Any) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    save_config(RunConfig.model_validate(MINIMAL | {"rollout": {"engine_args": entries}}), path)
    found = load_config(path).rollout.engine_args
    assert found == entries
    assert value_types(found) == value_types(entries)
