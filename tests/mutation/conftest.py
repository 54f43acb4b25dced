"""Cases and results of rows, as in ``tests/parallel``."""

from tests.parallel.harness import cases as cases
from tests.parallel.harness import results as results
