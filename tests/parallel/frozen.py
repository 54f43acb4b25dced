"""Imported last by the server that forks ranks: what it has imported is no garbage.

Otherwise every rank looks through it all, again and again, and copies each page of it as it looks.
"""

import gc

gc.collect()
gc.freeze()
