"""What is written down as vector instructions, against NumPy in float64."""

import numpy as np
import pytest
from numba import njit

from slime_like.cpu.kernels.tile import LANES, ROWS, add_product, exponentials


@njit
def _exponentials(values: np.ndarray, first: int, count: int, seen: int) -> tuple[float, float]:
    return exponentials(values, first, count, seen)


@njit
def _add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, adds: bool) -> None:
    add_product(a, 0, a.shape[1], 1, b, 0, b.shape[1], a.shape[1], out, 0, out.shape[1], adds)


@pytest.mark.parametrize("seen", [1, 15, 16, 17, 47, 48])
def test_exponentials_of_what_is_seen(seen: int) -> None:
    given = (30 * np.random.default_rng(seen).standard_normal(80)).astype(np.float32)
    first, count = 5, -(-seen // LANES) * LANES
    values = given.copy()
    largest, total = _exponentials(values, first, count, seen)
    visible = given[first : first + seen]
    below = visible - visible.max()  # in float32, as the kernel subtracts
    expected = np.exp(below.astype(np.float64))
    assert largest == visible.max()
    np.testing.assert_allclose(values[first : first + seen], np.where(below < -87, 0, expected), rtol=3e-7)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
    assert not values[first + seen : first + count].any()
    np.testing.assert_array_equal(values[:first], given[:first])
    np.testing.assert_array_equal(values[first + count :], given[first + count :])


def test_what_is_no_number_stays_none() -> None:
    values = np.zeros(LANES, np.float32)
    values[3], values[5] = np.nan, -np.inf
    largest, total = _exponentials(values, 0, LANES, LANES)
    assert largest == 0 and np.isnan(total) and np.isnan(values[3])
    assert values[5] == 0 and values[0] == 1
    infinite = np.full(LANES, np.inf, np.float32)
    assert np.isnan(_exponentials(infinite, 0, LANES, LANES)[1])


@pytest.mark.parametrize("adds", [False, True])
def test_a_product_of_four_rows(adds: bool) -> None:
    generator = np.random.default_rng(0)
    a, b, out = (
        generator.standard_normal(shape).astype(np.float32) for shape in ((ROWS, 37), (37, LANES), (ROWS, LANES))
    )
    expected = a.astype(np.float64) @ b.astype(np.float64) + (out if adds else 0)
    _add_product(a, b, out, adds)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
