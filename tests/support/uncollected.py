"""Stop the garbage collector, which would take a quarter of the time of importing a million objects.

Tests start it again when they are collected, and the server that forks with ``tests.parallel.frozen``.
"""

import gc

gc.disable()
