"""Expected errors: type and code where they are expected, sentences in one golden file beside the tests."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "sentences.json"
WRITE = "--write-sentences"
_ROOT = Path(__file__).parent.parent.parent


class Rejects:
    """The fixture ``rejects``: one test's expected errors.

    Args:
        test: node id, the key in the golden file.
        expected: the test's sentences in it; none while they are written.
        directory: below which the test's temporary files lie; their names differ from run to run.
    """

    def __init__(self, test: str, expected: list[str] | None, directory: Path) -> None:
        self._test = test
        self._expected = expected
        self._temporary = re.compile(rf"{re.escape(str(directory))}/[\w.-]+")  # a test's directory is numbered
        self.sentences: list[str] = []

    @contextlib.contextmanager
    def __call__(
        self, kind: type[BaseException], code: str | None = None
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """Require an error of this type, with this code where one is given, and with the golden file's sentence."""
        with pytest.raises(kind) as caught:
            yield caught
        if code is not None:
            assert getattr(caught.value, "code", None) == code
        text = self._temporary.sub("<tmp>", str(caught.value)).replace(str(_ROOT), "<root>")
        if text not in self.sentences:
            self.sentences.append(text)
        if self._expected is not None:
            assert text in self._expected, f"not in {GOLDEN.name} for {self._test}; pytest -n 0 {WRITE} rewrites it"


def read() -> dict[str, list[str]]:
    sentences: dict[str, list[str]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return sentences


def write(rewritten: dict[str, list[str]]) -> None:
    """Replace the sentences of the tests that ran; those of tests that are gone from their files go."""
    files = {test.partition("::")[0] for test in rewritten}
    kept = {test: texts for test, texts in read().items() if test.partition("::")[0] not in files}
    merged = dict(sorted({**kept, **{test: texts for test, texts in rewritten.items() if texts}}.items()))
    GOLDEN.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
