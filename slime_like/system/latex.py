"""Answers in LaTeX."""

import re

_BOX = re.compile(r"\\boxed(?![A-Za-z])\s*")
_FRAME = re.compile(r"\\fbox(?![A-Za-z])\s*")
_END_OF_FORMULA = re.compile(r"[$\n]|\\[])]")


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}``, or else of the last ``\fbox{}``.

    Without braces (``$\boxed 9$``), it ends with the formula or line. ``None`` if there is no closed box.
    """
    boxes = list(_BOX.finditer(text)) or list(_FRAME.finditer(text))
    if not boxes:
        return None
    begin = boxes[-1].end()
    if not text.startswith("{", begin):
        return _END_OF_FORMULA.split(text[begin:], maxsplit=1)[0].strip().removesuffix(".") or None
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None
