"""Flat ranges of a tensor as boxes, compared with NumPy's order of elements."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.megatron.optimizer import boxes


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_boxes_have_the_elements_of_the_range_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    covered = [
        elements[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        for offsets, sizes in boxes(start, stop, shape)
    ]
    assert [element for box in covered for element in box.ravel()] == list(range(start, stop))
    assert len(covered) <= 2 * len(shape) - 1
