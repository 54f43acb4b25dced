"""A configuration that is written reads back equal, whatever its values."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from slime_like.config.reading.yaml_text import read_document, write_text
from tests.support.properties import examples
from tests.unit.config.test_load import KEYS, PLAIN, value_types


@examples(100)
@given(entries=st.dictionaries(KEYS, PLAIN | st.lists(PLAIN) | st.dictionaries(KEYS, PLAIN)))
@example(
    entries={"a": "\x85", "b": "off", "c": "5e-4", "d": "010", "e": "2024-01-01", "f": "none", "g": "<<", "h": "\u2028"}
)
def test_what_is_written_reads_back_equal(entries: dict[str, Any]) -> None:
    document = read_document(write_text(entries), "x.yaml")
    assert document.problems == []
    assert document.data == entries
    assert value_types(document.data) == value_types(entries)
